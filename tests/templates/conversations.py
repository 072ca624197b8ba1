"""Conversations as OpenAI's clients send them, drawn at random: roles with strings, parts or null, thinking, calls in
parallel and alone, their results; with tools or without, to be answered or to be continued."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

TEXTS = ("Where is {}?", " leading {} trailing \n", "two {}\nlines", "a \"{}\" and 's'", "Grüße <b> & {}", "日本 {} 😀")
THOUGHTS = ("Let me look: {}.", "First\n\nthen {}", "is it {} < 8?")
ARGUMENTS = (
    {"port": "Brest"},
    {"port": "Saint-Malo", "days": 3},
    {"q": 'say "hi" & <b>', "deep": {"list": [1, 2.5, None, True], "ü": "é"}},
    {"none": None, "flag": False, "text": "two\nlines"},
    {},
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks it up.",
            "parameters": {
                "type": "object",
                "properties": {"port": {"type": "string", "description": "which"}, "days": {"type": "integer"}},
                "required": ["port"],
            },
        },
    }
    for name in ("tide", "weather")
]


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    continued: bool  # the last message is the assistant's, and goes on; else it is to be answered
    variables: dict[str, Any]

    @property
    def has_tools(self) -> bool:
        used = any(message["role"] == "tool" or "tool_calls" in message for message in self.messages)
        return used or self.tools is not None


def draw(rng: random.Random) -> Conversation:
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(("system", "system", "developer")), "content": _content(rng)})
    with_calls = rng.random() < 0.6
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": _content(rng)})
        if with_calls and rng.random() < 0.7:
            messages += _called(rng)
        messages.append(_said(rng))
    continued = rng.random() < 0.2 and "</think>" not in str(messages[-1])  # which transformers does not find again
    if not continued:
        messages.append({"role": "user", "content": _content(rng)})
        if with_calls and rng.random() < 0.4:
            messages += _called(rng)
    tools = TOOLS if with_calls and rng.random() < 0.8 else None
    variables = {"enable_thinking": rng.random() < 0.5} if rng.random() < 0.5 else {}
    return Conversation(messages, tools, continued, variables)


def _text(rng: random.Random, texts: tuple[str, ...] = TEXTS) -> str:
    """With a word that stands nowhere else."""
    return rng.choice(texts).format(f"word{rng.randrange(10**9)}x")


def _content(rng: random.Random) -> Any:
    if rng.random() < 0.6:
        return _text(rng)
    return [{"type": "text", "text": _text(rng)} for _ in range(rng.choice((1, 1, 2)))]


def _said(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _content(rng)}
    if rng.random() < 0.3:
        message[rng.choice(("reasoning_content", "reasoning"))] = _text(rng, THOUGHTS)
    elif rng.random() < 0.2 and isinstance(message["content"], str):
        message["content"] = f"<think>\n{_text(rng, THOUGHTS)}\n</think>\n\n{message['content']}"
    return message


def _called(rng: random.Random) -> list[dict[str, Any]]:
    """Some calls and their results."""
    message: dict[str, Any] = {"role": "assistant", "content": rng.choice((None, None, "", _text(rng)))}
    if rng.random() < 0.2:
        del message["content"]
    if rng.random() < 0.3:
        message["reasoning_content"] = _text(rng, THOUGHTS)
    message["tool_calls"] = [_call(rng) for _ in range(rng.choice((1, 1, 2)))]
    results = [
        {"role": "tool", "content": _content(rng), "tool_call_id": call["id"]}
        | ({"name": call["function"]["name"]} if rng.random() < 0.5 else {})
        for call in message["tool_calls"]
    ]
    return [message, *results]


def _call(rng: random.Random) -> dict[str, Any]:
    id = "".join(rng.choices("abcdefXYZ0123456789", k=9))
    separators = rng.choice((None, (",", ":")))
    arguments = json.dumps(rng.choice(ARGUMENTS), ensure_ascii=False, separators=separators)
    return {"id": id, "type": "function", "function": {"name": rng.choice(("tide", "weather")), "arguments": arguments}}
