"""A conversation becomes a prompt: messages as clients send them, as a chat template takes them, as its text.

A template gets messages as transformers hands them over, each field in the shape that it takes (template_shapes.py).
What it fails on in this way it gets once more in the other shapes, before the request is refused. Tools, calls and
results are told in words where a template has a place for none of them (tool_prompt.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.engine import template_shapes as shapes
from minivllm.engine.chat_template import budget, knows_tools, mentions, render
from minivllm.engine.template_shapes import ContentFormat
from minivllm.engine.tool_prompt import as_turns, told_in_words
from minivllm.errors import BadRequest

CONTINUE_HERE = "\ue000continue here\ue000 "  # private use: no prompt holds it. Ends in a space, see cut_at_mark.

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


def rendered(
    template: str, chat: Chat, tools: Tools, values: Mapping[str, Any], content_format: ContentFormat = "auto", /
) -> str:
    """chat: plain messages. values: the template's variables. Raises BadRequest for a conversation that the template
    refuses, ModelError for a template that is none."""
    values = {**budget(), **values}  # for all that is tried
    named = mentions(template)
    chat = [_as_named(message, named) for message in chat]
    if knows_tools(template) or not (tools or any(map(_has_tools, chat))):
        return _rendered(template, chat, tools, values, content_format)
    if not tools and named & {"tool_calls", "tool"}:
        with contextlib.suppress(BadRequest):  # it may name the role to refuse it
            return _rendered(template, chat, None, values, content_format)
    return _in_words(template, chat, tools, values, content_format)


def _rendered(template: str, chat: Chat, tools: Tools, values: Mapping[str, Any], content_format: ContentFormat) -> str:
    def with_messages(messages: list[dict[str, Any]]) -> str:
        text = render(template, {**values, "messages": messages, "tools": tools})
        again = shapes.without_lost(messages)
        return text if again is None else render(template, {**values, "messages": again, "tools": tools})

    messages = shapes.shaped(chat, content_format)
    try:
        return with_messages(messages)
    except BadRequest as refused:
        for changed in shapes.reshaped(messages):
            with contextlib.suppress(BadRequest):
                return with_messages(changed)
        raise refused


def _in_words(template: str, chat: Chat, tools: Tools, values: Mapping[str, Any], form: ContentFormat) -> str:
    chat = [{**message, "content": shapes.text_of(message)} for message in chat]

    refused: BadRequest | None = None
    for in_turns in (False, True):
        for role in ("system", "user") if tools and chat[0]["role"] != "system" else ("system",):
            told = told_in_words(chat, tools, role)
            try:
                return _rendered(template, as_turns(told) if in_turns else told, None, values, form)
            except BadRequest as error:
                refused = refused or error
    assert refused is not None
    raise refused


def _has_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _as_named(message: Mapping[str, Any], named: frozenset[str]) -> dict[str, Any]:
    """With the role and the names of its thinking that a template may look for; the names are those that transformers
    adds. A role of OpenAI's that the template does not know has its older name."""
    role = "system" if message["role"] == "developer" and "developer" not in named else message["role"]
    kept = {key: value for key, value in message.items() if value is not None} | {"role": role}
    thinking = next((kept[name] for name in shapes.THINKING if name in kept), None)
    return kept if thinking is None else {"thinking": thinking, **kept, "reasoning_content": thinking}


# ------------------------------------------------------------------------------------------------------- plain messages


def plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Its content a string, parts of text, or null. Raises BadRequest."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{index}] must be an object with a role", "messages")
    content = message.get("content")
    return {**message, "content": content if content is None or isinstance(content, str) else _parts(index, content)}


def _parts(index: int, content: Any) -> list[dict[str, str]]:
    if not isinstance(content, list | tuple):
        raise BadRequest(f"messages[{index}].content must be a string or a list of parts", "messages")
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"messages[{index}].content: a part of type {kind!r} is not supported, only text", "messages"
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def marked(message: dict[str, Any]) -> dict[str, Any]:
    """With a mark behind its content, where the model is to go on."""
    content = message["content"] or ""
    if isinstance(content, str):
        return {**message, "content": content + CONTINUE_HERE}
    last = content[-1]
    return {**message, "content": [*content[:-1], {**last, "text": last["text"] + CONTINUE_HERE}]}


def cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_HERE.strip())
    if at < 0:
        raise BadRequest("the chat template drops the final message: it cannot be continued", "continue_final_message")
    # A template that strips contents took the mark's space: then the text before the mark would have been stripped too.
    return text[:at] if text.startswith(CONTINUE_HERE, at) else text[:at].rstrip()
