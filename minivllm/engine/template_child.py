"""Chat templates that clients bring, rendered in a process that is killed when it takes too long or too much.

They have the limits of all templates (chat_template.py). These are for what those might miss, for compiling such a
program, and for the memory that its texts take; and nothing that it does holds this process's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from minivllm.engine.conversation import Chat, Tools, rendered
from minivllm.engine.template_shapes import ContentFormat
from minivllm.errors import BadRequest, ModelError
from minivllm.sandbox import Limits, Sandbox, TooMuch

LIMITS = Limits(seconds=15, megabytes=2048)  # above template_budget.py's, which say more


class Task(msgspec.Struct, array_like=True):
    template: str
    chat: list[dict[str, Any]]
    tools: list[Any] | None
    values: dict[str, Any]
    content_format: ContentFormat


class Told(msgspec.Struct, array_like=True):
    """The text; or, if `wrong` is not empty, what is wrong with the template or with the messages for it."""

    text: str = ""
    wrong: str = ""
    is_none: bool = False  # it is no template


def render(
    template: str, chat: Chat, tools: Tools, values: Mapping[str, Any], content_format: ContentFormat = "auto", /
) -> str:
    """As conversation.rendered. Blocks: to be called in a thread. Raises BadRequest and ModelError."""
    task = Task(template, list(map(dict, chat)), list(tools) if tools else None, dict(values), content_format)
    try:
        told = msgspec.msgpack.decode(_sandbox().run(msgspec.msgpack.encode(task)), type=Told)
    except TooMuch as error:
        raise BadRequest(f"the chat template refuses these messages: it {error}", "chat_template") from None
    if told.wrong:
        raise ModelError(told.wrong) if told.is_none else BadRequest(told.wrong, "messages")
    return told.text


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox("minivllm.engine.template_child", b"", LIMITS)


# ------------------------------------------------------------------------------------------------------ in the child


def prepare(_: bytes) -> Callable[[bytes], bytes]:
    rendered("{{ messages[0].content }}", [{"role": "user", "content": ""}], None, {})  # imports all that is needed

    def work(data: bytes) -> bytes:
        task = msgspec.msgpack.decode(data, type=Task)
        try:
            told = Told(rendered(task.template, task.chat, task.tools, task.values, task.content_format))
        except (BadRequest, ModelError) as error:
            told = Told(wrong=str(error), is_none=isinstance(error, ModelError))
        return msgspec.msgpack.encode(told)

    return work
