"""Every format, read whole and in pieces. The rule: how a text is cut on its way makes no difference."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.serve.tools import TOOL_PARSERS
from minivllm.serve.tools.answer import ToolAnswer
from minivllm.serve.tools.parsers import ArgumentsParser, ArrayParser
from minivllm.serve.tools.reader import Arguments, CallBegin, CallEnd, Content

NAMES = ("get_weather", "add", "now")
ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "add"', '"add"', *'ab<{}[]";, \n']
WORDS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def dumps(value, **kwargs):
    return json.dumps(value, ensure_ascii=False, **kwargs)


def hermes(calls, before, after):
    written = [f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    return before + "\n".join(written) + after


def llama(calls, before, after):
    return "; ".join(dumps({"name": n, "parameters": a}, indent=1) for n, a in calls)


def mistral(calls, before, after):
    return before + "[TOOL_CALLS] " + dumps([{"name": n, "arguments": a} for n, a in calls]) + after


def mistral_v11(calls, before, after):
    return before + "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls) + after


def array(calls, before, after):
    return dumps([{"name": n, "parameters": a} for n, a in calls])


FORMATS = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama),
    "mistral": ("mistral", mistral),
    "mistral v11": ("mistral", mistral_v11),
    "array": (ArrayParser, array),
}


def make(parser):
    return (TOOL_PARSERS.get(parser) if isinstance(parser, str) else parser)(NAMES)


def whole(parser, text):
    answer = ToolAnswer(make(parser))
    message = answer.message(text)
    return message.content, [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]


def streamed(parser, pieces):
    """What a client has who adds up the deltas: (content, calls)."""
    answer = ToolAnswer(make(parser))
    content, calls = "", []
    deltas = [delta for piece in pieces for delta in answer.deltas(piece, finished=False)]
    for delta in deltas + answer.deltas("", finished=True):
        content += delta.content or ""
        for part in delta.tool_calls or ():
            if part.index == len(calls):
                calls.append([part.function.name, ""])
            assert part.index == len(calls) - 1, "calls come one after the other"
            calls[part.index][1] += part.function.arguments
    return content or None, [tuple(call) for call in calls]


def cut(text, places):
    places = sorted({p % (len(text) + 1) for p in places})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, before=WORDS, after=WORDS, places=st.lists(st.integers(0, 10**6), max_size=20))
def test_a_stream_adds_up_to_the_whole_message(name, calls, before, after, places):
    parser, write = FORMATS[name]
    if parser == "mistral":
        before, after = before.replace("[", ""), after.replace("[", "")
    text = write(calls, before.replace("<", ""), after.replace("<", ""))
    content, found = whole(parser, text)
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls
    assert streamed(parser, cut(text, places)) == (content, found)
    assert streamed(parser, list(text)) == (content, found)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
@settings(max_examples=150, deadline=None)
@given(text=WORDS)
def test_what_holds_no_call_is_content_to_the_letter(parser, text):
    assert whole(parser, text) == (text, [])
    assert streamed(parser, list(text)) == (text or None, [])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(calls=CALLS, place=st.integers(0, 10**6), wrong=st.sampled_from(["", "}", '"', "'", "\n", "x", "[", "\\"]))
def test_a_spoiled_text_loses_no_letter_and_makes_no_call_of_broken_json(name, calls, place, wrong):
    parser, write = FORMATS[name]
    text = write(calls, "", "")
    place %= len(text)
    spoiled = text[:place] + wrong + text[place + 1 :]
    content, found = whole(parser, spoiled)
    for called, arguments in found:
        assert called in NAMES and isinstance(json.loads(arguments), dict)
    if not found:
        assert content == spoiled
    some, told = streamed(parser, list(spoiled))
    letters = re.sub(r"\s", "", (some or "") + "".join(n + a for n, a in told))
    assert len(letters) <= len(re.sub(r"\s", "", spoiled)) + sum(len(n) for n, _ in told)
    assert [call for call in told if call in found] == found  # a stream has the good ones and may have begun others


GOOD = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', None, '{"a": 1}'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', None, '{"a": 1}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', None, '{"a": 1}'),
    ("hermes", '<tool_call>{"name": "add", "parameters": {}}</tool_call>', None, "{}"),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, "{}"),
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}', None, '{"a": 1}'),  # no closing tag
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', None, '{"a": 1}'),  # no last brace
    ("hermes", 'So:\n<tool_call>{"name": "add", "arguments": {}}</tool_call>\nDone.', "So:\n\nDone.", "{}"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}</tool_call>\nDone.', "Done.", "{}"),
    ("hermes", 'a < b <<tool_call>{"name": "add", "arguments": {}}</tool_call>', "a < b <", "{}"),
    ("llama3_json", '  {"name": "add", "parameters": {"a": [1, {"b": null}]}}\n', None, '{"a": [1, {"b": null}]}'),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', None, "{}"),
    ("llama3_json", 'Well: <|python_tag|>{"name": "add", "parameters": {}}', "Well:", "{}"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', None, '{"a": 1}'),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', None, '{"a": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "arguments"), GOOD)
def test_calls_as_models_write_them(parser, text, content, arguments):
    assert whole(parser, text) == (content, [("add", arguments)])
    assert streamed(parser, list(text)) == (content, [("add", arguments)])


NONE = [
    ("hermes", "<tool_call>call add</tool_call>"),
    ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {\'a\': 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {oops}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>'),  # was not offered
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "arguments"'[:35]),  # cut by max_tokens
    ("hermes", "<tool_call>" + '{"name": "add", "arguments": ' + "[" * 500),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", " <tool_cal"),
    ("llama3_json", '{"name": "Ada", "parameters": {}}'),
    ("llama3_json", '{"city": "Paris", "name": "add"}'),
    ("llama3_json", '{"name": "add"}'),
    ("llama3_json", 'Call {"name": "add", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>add.call(a="1")'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]subtract{}"),
    ("mistral", "[TOOL"),
    (ArrayParser, '{"name": "add"}'),
]


@pytest.mark.parametrize(("parser", "text"), NONE)
def test_what_is_no_call_is_content(parser, text):
    assert whole(parser, text) == (text, [])
    assert streamed(parser, list(text)) == (text, [])


def test_a_call_that_breaks_inside_its_arguments_is_content_unless_it_has_been_sent():
    text = 'Hm. <tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call> bye'
    assert whole("hermes", text) == (text, [])
    answer = ToolAnswer(make("hermes"))
    deltas = answer.deltas(text, finished=True)
    assert [d.tool_calls[0].function.arguments for d in deltas if d.tool_calls] == ["", '{"a": 1,']
    assert answer.finish_reason("stop") == "stop"


def test_of_calls_where_only_one_is_wanted_the_first_is_taken():
    text = hermes([("add", {"a": 1}), ("now", {})], "", "ok")
    answer = ToolAnswer(make("hermes"), parallel=False)
    assert [call.function.name for call in answer.message(text).tool_calls] == ["add"]
    deltas = ToolAnswer(make("hermes"), parallel=False).deltas(text, finished=True)
    assert {part.index for d in deltas for part in d.tool_calls or ()} == {0}


def test_pieces_come_as_soon_as_they_can_and_no_piece_of_a_tag_does():
    parser = make("hermes")
    assert parser.push("Let me see. <tool_") == [Content("Let me see.")]
    assert parser.push('call>{"name": "get_wea') == []
    assert parser.push('ther", "arguments": {') == []
    assert parser.push('"city": "Pa') == [CallBegin("get_weather"), Arguments('{"city": "Pa')]
    assert parser.push('ris"}') == [Arguments('ris"}')]
    assert parser.push("}</tool_call") == [CallEnd()]
    assert parser.push(">") == parser.end() == []


def test_the_arguments_of_a_named_function_are_the_whole_text():
    parser = ArgumentsParser(["add"])
    assert parser.push("") == []
    assert parser.push('{"a"') == [CallBegin("add"), Arguments('{"a"')]
    assert parser.push(": 1}") + parser.end() == [Arguments(": 1}"), CallEnd()]


def test_ids_look_as_the_models_templates_want_them():
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", TOOL_PARSERS.get("hermes").new_id())
    assert re.fullmatch(r"[A-Za-z0-9]{9}", TOOL_PARSERS.get("mistral").new_id())


def test_a_long_call_is_read_in_little_time():
    text = hermes([("add", {"a": ["x" * 50] * 4000})], "", "")
    parser = make("hermes")
    events = [event for piece in cut(text, range(0, len(text), 7)) for event in parser.push(piece)]
    assert sum(len(event.text) for event in events if isinstance(event, Arguments)) > 200_000
