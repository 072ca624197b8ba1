"""How a chat template reads a message's content: as a string, or as OpenAI's list of parts.

Most templates print `message.content`. Those of models that also see or hear go through its parts, and of a string they
print nothing, or each of its characters. `auto` looks for a loop over the content in the template, as vLLM does.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

ContentFormat = Literal["auto", "string", "openai"]
FORMATS: tuple[ContentFormat, ...] = ("auto", "string", "openai")
Part = dict[str, str]


@functools.lru_cache(maxsize=16)
def reads_parts(template: str) -> bool:
    """Whether it goes through a message's content. False for what is no template: whoever renders it says so."""
    from jinja2 import TemplateSyntaxError, nodes

    from minivllm.engine.chat_template import parse

    try:
        tree = parse(template)
    except (TemplateSyntaxError, RecursionError):
        return False
    named = [found for found in tree.find_all(nodes.Assign) if isinstance(found.target, nodes.Name)]
    names = {found.target.name for found in named if _is_content(found.node, set())}
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(expression: Any, names: set[str]) -> bool:
    """message.content, message["content"], a name that was set to it, or one of these filtered or cut."""
    from jinja2 import nodes

    if isinstance(expression, nodes.Filter) or (
        isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Slice)
    ):
        return _is_content(expression.node, names)
    if isinstance(expression, nodes.Getitem):
        return isinstance(expression.arg, nodes.Const) and expression.arg.value == "content"
    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    return isinstance(expression, nodes.Name) and expression.name in names


def joined(parts: list[Part]) -> str:
    return "\n".join(part["text"] for part in parts)


def with_strings(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, each with its parts as one string."""
    return [{**message, "content": joined(message["content"])} for message in chat]


def with_parts(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, each with its string as one part."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
