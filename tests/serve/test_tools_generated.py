"""Each form of each family, on random calls: what a writer that knows nothing of our parsers has written is read back.

The gate tries a few cases of each form. `python -m tests.serve.test_tools_generated 2000` tries as many as it says.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import pytest

from minivllm.serve.tools import TOOL_PARSERS
from minivllm.serve.tools.answer import ToolAnswer
from minivllm.serve.tools.parsers import ArrayParser
from tests.serve.call_forms import FORMS, Form

TYPED: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": ["integer", "null"]},
    "scale": {"type": "number"},
    "hourly": {"type": "boolean"},
    "tags": {"type": "array"},
    "place": {"type": "object"},
}
FUNCTIONS = {name: {"type": "object", "properties": TYPED} for name in ("tide", "get-weather", "f", "mcp__a__b_2")}
CLOSING = ("</parameter>", "</arg_value>", "</｜DSML｜parameter>")  # no text in such a tag can hold it
PIECES = [
    *"ab 5-.,:;=[](){}<>|/'\"\\\n\t\r", "é", "日本", "😀", "\u2028", "\x00", "null", "true", "None", '"}', "}}", "```",
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<function=f>",
    "</function>", "<|call|>", "<|end|>", "<|channel|>final", "<|message|>", "functools[", "<think>", "</think>",
    "<arg_key>", "<｜tool▁call▁end｜>", "<｜DSML｜invoke", "<|tool_call_end|>", "Action:", "<|END_ACTION|>", *CLOSING,
]  # fmt: skip


def a_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(7)))


def a_value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8 if depth < 3 else 5):
        case 0:
            return rng.choice([None, True, False])
        case 1:
            return rng.randrange(-(10**12), 10**12)
        case 2:
            return rng.choice([0.5, -1e-9, 1e300, 3.0])
        case 3 | 4:
            return a_text(rng)
        case 5 | 6:
            return {a_text(rng): a_value(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            return [a_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def typed_value(rng: random.Random, key: str) -> Any:
    """Without what would end a plain text before its end, and without the one line end that layout is."""
    match key:
        case "city":
            text = a_text(rng)
            for tag in CLOSING:
                text = text.replace(tag, "")
            return text
        case "days":
            return rng.choice([None, rng.randrange(-99, 99)])
        case "scale":
            return rng.choice([0.25, -2.5e-7, 4.0])
        case "hourly":
            return rng.random() < 0.5
        case "tags":
            return [a_number(rng) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice("xyz"): [a_number(rng), {"a": None}] for _ in range(rng.randrange(3))}


def a_number(rng: random.Random) -> Any:
    return rng.choice([1, -2.5, True, None, "a 'b' \"c\"", "日本\\n"])


def some_calls(rng: random.Random, is_json: bool) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for _ in range(rng.randrange(1, 4)):
        if is_json:
            arguments = {a_text(rng): a_value(rng) for _ in range(rng.randrange(4))}
        else:
            keys = rng.sample(sorted(TYPED), rng.randrange(4))
            arguments = {key: typed_value(rng, key) for key in keys}
        calls.append((rng.choice(sorted(FUNCTIONS)), arguments))
    return calls


def make(form: Form) -> ToolAnswer:
    kind = TOOL_PARSERS.get(form.parser) if isinstance(form.parser, str) else form.parser
    return ToolAnswer(kind(FUNCTIONS))


def whole(form: Form, text: str) -> tuple[str, list[tuple[str, str]]]:
    message = make(form).message(text)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", calls


def streamed(form: Form, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    answer = make(form)
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    deltas = [delta for piece in pieces for delta in answer.deltas(piece, finished=False)]
    for delta in deltas + answer.deltas("", finished=True):
        content.append(delta.content or "")
        for part in delta.tool_calls or ():
            if part.id:
                calls.append((part.function.name, []))
            calls[-1][1].append(part.function.arguments)
    return "".join(content), [(name, "".join(arguments)) for name, arguments in calls]


def cut(rng: random.Random, text: str) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def check(form: Form, seed: int, at_each_character: bool) -> None:
    rng = random.Random(seed)
    calls = some_calls(rng, form.is_json)
    text = form.write(calls, rng.choice(["", "So: "]), "")
    content, found = whole(form, text)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls, (seed, text)
    assert content.strip() in ("", "So:"), (seed, text)
    assert streamed(form, cut(rng, text)) == (content, found), (seed, text)
    if at_each_character:
        assert streamed(form, list(text)) == (content, found), (seed, text)
    if form.parser == "openai" or not isinstance(form.parser, str):
        return  # a header that is cut is nobody's text, and a forced call that is cut is a call
    prefix = text[: rng.randrange(len(text))]
    shown, known = whole(form, prefix)
    assert known == found[: len(known)], (seed, prefix)
    assert known or shown == prefix, (seed, prefix)


@pytest.mark.parametrize("name", FORMS)
def test_random_calls_in_each_form_are_read_back_whole_cut_and_begun(name):
    for seed in range(60):
        check(FORMS[name], seed, at_each_character=seed % 4 == 0)


def test_a_text_cut_at_each_place_never_gives_a_call_that_the_whole_has_not():
    for name, form in FORMS.items():
        calls = some_calls(random.Random(name), form.is_json)
        text = form.write(calls[:1], "", "")
        _, found = whole(form, text)
        for place in range(len(text)):
            assert streamed(form, [text[:place], text[place:]])[1] == found, (name, place)
            known = whole(form, text[:place])[1]
            assert known == found[: len(known)] or form.parser is ArrayParser, (name, place)


if __name__ == "__main__":
    for name, form in FORMS.items():
        begin = time.perf_counter()
        for seed in range(int(sys.argv[1])):
            check(form, seed, at_each_character=False)
        print(f"{name}: {time.perf_counter() - begin:.1f} s")
