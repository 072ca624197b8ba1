"""Tools for a model whose chat template knows none: told in plain messages, in the style of Hermes 2 Pro.

The tools and the form of a call go into the system message; calls of the past become the text that a model would have
written; results become messages of the user. A model that was not trained on tools often gets it wrong: force a call
with tool_choice where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from minivllm.engine.template_shapes import read_arguments

INSTRUCTIONS = """You can call these functions:
<tools>
{tools}
</tools>
To call one, write only this, with its name and arguments as JSON:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
The result then comes between <tool_response> tags. Answer in words when no function is needed."""


def told_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, role: str = "system"
) -> list[dict]:
    """messages: contents are strings. The result has no tools, no tool_calls, and no
    role "tool"; the results of one turn's calls are one message. role: whose first message the tools are told in; the
    user's for templates that refuse a system message."""
    told: list[dict] = []
    for is_result, turn in groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in turn]
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            told += map(without_calls, turn)
    return with_instructions(told, instructions(tools), role) if tools else told


def as_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict]:
    """With the user's messages in a row as one, for templates whose roles must alternate: results that are told in
    words, and what the user says behind them, are such."""
    turns: list[dict] = []
    for role, row in groupby(messages, lambda message: message["role"]):
        said = list(map(dict, row))
        together = "\n".join(message["content"] for message in said)
        turns += [{**said[0], "content": together}] if role == "user" else said
    return turns


def without_calls(message: Mapping[str, Any]) -> dict:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [as_text(call["function"]) for call in message.get("tool_calls") or ()]
    return {**plain, "content": "\n".join(filter(None, [plain["content"], *calls]))}


def as_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": arguments_of(function)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def arguments_of(function: Mapping[str, Any]) -> Any:
    """An object, or the text of what should have been one: an answer may have ended within it."""
    given = function.get("arguments") or {}
    try:
        return read_arguments(given) if isinstance(given, str) else given
    except ValueError:
        return given


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def with_instructions(messages: list[dict], text: str, role: str) -> list[dict]:
    first = messages[0]
    if first["role"] != role:
        return [{"role": role, "content": text}, *messages]
    both = (text, first["content"]) if role == "user" else (first["content"], text)
    return [{**first, "content": "\n\n".join(both)}, *messages[1:]]
