"""What a template should make of a conversation: what transformers' apply_chat_template does.

It hands messages over as they were sent. Where the template fails on that, or writes a value's Python or JSON form into
the prompt, what is right is what transformers makes of the same conversation in another shape: contents that are
strings, arguments that are objects, as OpenAI's format allows both of each."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tiny_tokenizers as tiny
from templates.conversations import Conversation

from minivllm.engine.chat_template import knows_tools
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest

Change = Callable[[dict[str, Any]], dict[str, Any]]
ROLES = ("developer", "system", "user", "assistant", "tool")
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
# Of a list of parts, or of a string in a string, that a template prints as it is.
MANGLED = ("'type': 'text'", '"type": "text"', '\\"port\\":', '\\"q\\":', '\\"flag\\":', '\\"none\\":', '"{}"')
WORD = re.compile(r"word\d+x")  # conversations.py: of each content and thought


class Verdict(NamedTuple):
    ok: bool
    what: str
    ours: str
    theirs: str


def ours(template: str, conversation: Conversation) -> str:
    """Raises BadRequest."""
    tokenizer = TextTokenizer(tiny.byte_level()._tokenizer, SPECIAL, {"default": template}, ())
    return tokenizer.apply_chat_template(
        conversation.messages,
        tools=conversation.tools,
        add_generation_prompt=not conversation.continued,
        continue_final_message=conversation.continued,
        variables=conversation.variables,
    )


def theirs(template: str, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
    """As the end of apply_chat_template does it, which first drops what is null. Raises whatever the template does."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [messages],
        tools=[*conversation.tools] if conversation.tools else None,
        chat_template=template,
        add_generation_prompt=not conversation.continued,
        continue_final_message=conversation.continued,
        **SPECIAL,
        **conversation.variables,
    )
    return texts[0]


def judge(template: str, conversation: Conversation) -> Verdict:
    try:
        made, refusal = ours(template, conversation), ""
    except BadRequest as error:
        made, refusal = "", str(error)
    right = list(_right(template, conversation))
    if refusal:
        return Verdict(not right, "refused", refusal, "\n-- or --\n".join(right))
    if not right:
        return Verdict(False, "transformers refuses", made, "")
    return Verdict(made in right, "equal" if made == right[0] else "in another shape", made, right[0])


def _right(template: str, conversation: Conversation) -> Iterator[str]:
    """As it was sent, if nothing is lost by that, else with as little changed as needed; and the same with arguments as
    objects, since a template may take both."""
    given = conversation.messages
    if not re.search("['\"]developer['\"]", template):
        given = [message | {"role": "system"} if message["role"] == "developer" else message for message in given]
    results = _with_role(_as_strings, "tool")
    for first in itertools.product((_as_sent, _as_objects), (_without_null, _with_null), (results, _as_sent)):
        changed = functools.reduce(lambda messages, change: list(map(change, messages)), first, given)
        best, most = None, -1
        wanted = {word: 1 if message["role"] == "assistant" else 100 for message in given for word in _words(message)}
        for messages in _variants(changed):
            text = _whole(template, conversation, messages)
            words = -1 if text is None else sum(wanted[word] for word in wanted if word in text)
            if words > most:
                best, most = text, words
            if most == sum(wanted.values()):
                break
        if best is not None:
            yield best


def _words(message: dict[str, Any]) -> list[str]:
    """Of its content, behind thinking: templates leave earlier thinking out."""
    return WORD.findall(json.dumps(message.get("content")).rpartition("</think>")[2])


def _whole(template: str, conversation: Conversation, messages: list[dict[str, Any]]) -> str | None:
    try:
        text = theirs(template, conversation, messages)
    except Exception:  # whatever a template raises
        return None
    has_null = any("null" in str(message.get("tool_calls")) for message in conversation.messages)
    marks = MANGLED if has_null else (*MANGLED, "None")
    return None if any(mark in text and mark not in template for mark in marks) else text


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The same messages with ever more of them in another shape."""
    shapes = [_with_role(change, role) for change in (_as_strings, _as_parts) for role in ROLES]
    changes = [_null_as_text, _one_name, *shapes]
    useful = [change for change in changes if list(map(change, messages)) != messages]
    for k in range(min(len(useful), 5) + 1):
        for subset in itertools.combinations(useful, k):
            changed = messages
            for change in subset:
                changed = list(map(change, changed))
            yield changed


def _with_role(change: Change, role: str) -> Change:
    return lambda message: change(message) if message["role"] == role else message


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _as_strings(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "\n".join(part["text"] for part in content)}


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _as_objects(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _with_null(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": None} | message


def _null_as_text(message: dict[str, Any]) -> dict[str, Any]:
    return message if message.get("content") is not None else message | {"content": ""}


def _one_name(message: dict[str, Any]) -> dict[str, Any]:
    """Without thinking: gpt-oss's template refuses it beside a content."""
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}


def fitting(template: str, conversation: Conversation) -> Conversation | None:
    """What of it the template has a place for. The rest is told in words, which transformers does not do
    (tests/engine/test_tool_prompt.py)."""
    if not conversation.has_tools:
        return conversation
    if "tool_calls" not in template:
        return None
    return conversation if knows_tools(template) else conversation._replace(tools=None)
