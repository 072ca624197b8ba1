"""Every format, read whole and in pieces. The rule: how a text is cut on its way makes no difference."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.serve.protocol import Function
from minivllm.serve.tools import TOOL_PARSERS
from minivllm.serve.tools.answer import ToolAnswer
from minivllm.serve.tools.ask import ToolUse
from minivllm.serve.tools.forms import Writing
from minivllm.serve.tools.parsers import ArgumentsParser, ArrayParser
from minivllm.serve.tools.reader import Arguments, CallBegin, CallEnd, Content
from tests.serve.call_forms import FORMS, array, cohere, deepseek, granite, granite_20b, harmony, hermes, kimi

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": ["integer", "null"]},
    "scale": {"type": "number"},
    "hourly": {"type": "boolean"},
    "tags": {"type": "array"},
    "place": {"$ref": "#/$defs/place"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
FUNCTIONS = {
    "get_weather": {"type": "object", "properties": PROPERTIES, "$defs": {"place": {"type": "object"}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "now": {},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), ANYTHING, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(FUNCTIONS)), ARGUMENTS), min_size=1, max_size=3)
# For formats that write a value as plain text or Python: arguments of the types that the schema has.
TYPED = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text() | st.sampled_from(["5", "null", "{}", "</b>", "<parameter", '"', "a\n\nb", "\n", " x "]),
        "days": st.integers() | st.none(),
        "scale": st.floats(allow_nan=False, allow_infinity=False),
        "hourly": st.booleans(),
        "tags": st.lists(ANYTHING, max_size=3),
        "place": st.dictionaries(st.text(max_size=5), ANYTHING, max_size=3),
        "note": st.none() | st.sampled_from(["Grüße <b>", "a, (b)=[c", 'it\'s "so"']),
    },
)
CALL = st.tuples(st.just("get_weather"), TYPED) | st.just(("now", {})) | st.just(("add", {"a": -5}))
TYPED_CALLS = st.lists(CALL, min_size=1, max_size=3)
PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<｜tool▁calls▁begin｜>"]
PIECES += ["<|tool_call|>", "<|action_start|>", "functools", "Action:", "<|START_ACTION|>", "```json", "[add("]
PIECES += ['{"name": "absent"', '"add"', *'ab<{}[]";, \n']
WORDS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
PLAIN = WORDS.map(lambda text: re.sub(r"[<\[]|functools|Action:", "", text))


FORMATS = {name: (form.parser, form.write) for name, form in FORMS.items()}
JSON = {name: FORMATS[name] for name, form in FORMS.items() if form.is_json}
PARSERS = sorted({parser for parser, _ in FORMATS.values() if isinstance(parser, str)})


def make(parser):
    return (TOOL_PARSERS.get(parser) if isinstance(parser, str) else parser)(FUNCTIONS)


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


def calls_of(name):
    return CALLS if name in JSON else TYPED_CALLS


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), before=PLAIN, after=PLAIN, places=st.lists(st.integers(0, 10**6), max_size=20))
def test_a_stream_adds_up_to_the_whole_message(name, data, before, after, places):
    parser, write = FORMATS[name]
    calls = data.draw(calls_of(name))
    text = write(calls, before, after)
    content, found = whole(parser, text)
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls
    assert streamed(parser, cut(text, places)) == (content, found)
    assert streamed(parser, list(text)) == (content, found)


SAID = [("get_weather", {"city": 'a "b"\n<c> ü', "days": 3, "place": {"x": [1, None]}}), ("now", {})]


@pytest.mark.parametrize("name", FORMATS)
def test_wherever_a_text_is_cut_the_events_are_the_same(name):
    parser, write = FORMATS[name]
    text = write(SAID, "So", "Well")
    expected = events(parser, [text])
    assert [event.name for event in expected if isinstance(event, CallBegin)] == ["get_weather", "now"]
    for place in range(len(text)):
        assert events(parser, [text[:place], text[place:]]) == expected


def events(parser, pieces):
    """Neighbours of a kind are one: how much text an event has depends on the cut alone."""
    parser, made = make(parser), []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.end():
        if made and isinstance(event, Content | Arguments) and type(event) is type(made[-1]):
            event = type(event)(made.pop().text + event.text)
        made.append(event)
    return made


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=60, deadline=None)
@given(text=WORDS)
def test_what_holds_no_call_is_content_to_the_letter(parser, text):
    assert whole(parser, text) == (text, [])
    assert streamed(parser, list(text)) == (text or None, [])


WRONG = ["", "}", '"', "'", "\n", "x", "[", "\\", "<", ">"]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), place=st.integers(0, 10**6), wrong=st.sampled_from(WRONG))
def test_a_forced_answer_has_no_content_wherever_it_breaks_and_its_stream_adds_up(data, place, wrong):
    text = array(data.draw(calls_of("array")), "", "")
    place %= len(text)
    spoiled = text[:place] + wrong + text[place + 1 :]
    content, found = whole(ArrayParser, spoiled)
    assert not content and {called for called, _ in found} <= FUNCTIONS.keys()
    assert streamed(ArrayParser, list(spoiled)) == (None, found)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "array"])  # the test above is its own
@settings(max_examples=30, deadline=None)
@given(data=st.data(), place=st.integers(0, 10**6), wrong=st.sampled_from(WRONG))
def test_a_spoiled_text_loses_no_letter_and_makes_no_call_of_broken_json(name, data, place, wrong):
    parser, write = FORMATS[name]
    text = write(data.draw(calls_of(name)), "", "")
    place %= len(text)
    spoiled = text[:place] + wrong + text[place + 1 :]
    content, found = whole(parser, spoiled)
    for called, arguments in found:
        assert called in FUNCTIONS and isinstance(json.loads(arguments), dict)
    if not found and parser != "openai":  # whose tags around messages are no content
        assert content == spoiled
    some, told = streamed(parser, list(spoiled))
    assert [call for call in told if call in found] == found  # a stream has the good ones and may have begun others
    if name in JSON:
        letters = re.sub(r"\s", "", (some or "") + "".join(n + a for n, a in told))
        assert len(letters) <= len(re.sub(r"\s", "", spoiled)) + sum(len(n) for n, _ in told)


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
    ("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", None, '{"a": 1}'),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", None, '{"a": 1}'),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>one</parameter></function>", None, '{"a": "one"}'),
    ("glm45", "<tool_call>add\n</tool_call>", None, "{}"),
    ("granite", ' [{"name": "add", "arguments": {}}]', None, "{}"),
    ("granite", 'Well:<tool_call>[{"name": "add", "arguments": {}}]', "Well:", "{}"),
    ("pythonic", '[add(a="1",)]', None, '{"a": 1}'),
    ("pythonic", "[add(a=-1)]<|python_end|>", None, '{"a": -1}'),
    ("cohere_command", "<|START_RESPONSE|>Hi<|END_RESPONSE|>" + cohere([("add", {})], "", ""), "Hi", "{}"),
    ("openai", '<|channel|>commentary to=functions.add<|message|>{"a": 1}', None, '{"a": 1}'),
    ("openai", harmony([("add", {})], "One.", "Two."), "One.\nTwo.", "{}"),
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
    ("llama3_json", '<|python_tag|>subtract.call(a="1")'),
    ("llama3_json", "<|python_tag|>import add\nadd.call(a=1)"),
    ("llama3_json", "<function=subtract>{}</function>"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]subtract{}"),
    ("mistral", "[TOOL"),
    ("qwen3_coder", "<tool_call>\n<function=subtract>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>subtract\n</tool_call>"),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>"),
    ("deepseek_v3", deepseek([("subtract", {})], "", "")),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
    ("kimi_k2", kimi([("subtract", {})], "", "")),
    ("kimi_k2", kimi([("add", {})], "", "").replace(":0", "")),
    ("openai", "<|channel|>commentary to=functions.subtract<|message|>{}"),
    ("openai", "<|channel|>commentary to=python<|message|>1"),
    ("cohere_command", "Action: add"),
    ("cohere_command", cohere([("subtract", {})], "", "")),
    ("granite", granite([("subtract", {})], "", "")),
    ("granite", "[1, 2]"),
    ("granite-20b-fc", granite_20b([("subtract", {})], "", "")),
    ("internlm", '<|action_start|><|interpreter|>{"name": "add", "parameters": {}}<|action_end|>'),
    ("phi4_mini_json", "import functools"),
    ("pythonic", "[subtract(a=1)]"),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "So: [add(a=1)]"),
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
    parser = ArgumentsParser({"add": {}})
    assert parser.push("") == []
    assert parser.push('{"a"') == [CallBegin("add"), Arguments('{"a"')]
    assert parser.push(": 1}") + parser.end() == [Arguments(": 1}"), CallEnd()]


CUT = [
    (ArgumentsParser, "<", []),  # the beginning of <think>
    (ArgumentsParser, '\n{"a', [("add", '{"a')]),
    (ArrayParser, "<", []),
    (ArrayParser, "[", []),
    (ArrayParser, '[{"name": "ad', []),
    (ArrayParser, '[{"name": "add", "parameters": ', []),
    (ArrayParser, '[{"name": "add", "parameters": {"a', [("add", '{"a')]),
    (ArrayParser, '[{"name": "add", "parameters": {}}', [("add", "{}")]),
    (ArrayParser, '[{"name": "add", "parameters": {}}, {"name": "add", "parameters":', [("add", "{}")]),
]


@pytest.mark.parametrize(("parser", "text", "calls"), CUT)
def test_a_forced_call_that_is_cut_has_what_came_of_its_arguments_and_no_content(parser, text, calls):
    message = ToolAnswer(parser({"add": {}})).message(text)
    found = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert (found, message.content or "") == (calls, "")
    answer, told = ToolAnswer(parser({"add": {}})), []
    pieces = [(char, False) for char in text] + [("", True)]
    for delta in (delta for piece in pieces for delta in answer.deltas(*piece)):
        assert not delta.content
        told += [(part.function.name, part.function.arguments) for part in delta.tool_calls or ()]
    assert [name for name, _ in told if name] == [name for name, _ in calls]
    assert "".join(arguments for _, arguments in told) == "".join(arguments for _, arguments in calls)


def test_ids_look_as_the_models_templates_want_them():
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", TOOL_PARSERS.get("hermes").new_id())
    assert re.fullmatch(r"[A-Za-z0-9]{9}", TOOL_PARSERS.get("mistral").new_id())


def test_a_mistral_calls_id_is_the_models_own_but_never_twice_and_in_the_models_form():
    text = "".join(
        f"[TOOL_CALLS]now[CALL_ID]{id}[ARGS]{{}}" for id in ("a1B2c3D4e", "a1B2c3D4e", "call_1", "b1B2c3D4e")
    )
    first, second, third, fourth = (call.id for call in ToolAnswer(make("mistral")).message(text).tool_calls)
    assert (first, fourth) == ("a1B2c3D4e", "b1B2c3D4e") and first != second
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in (second, third))


def test_a_kimi_calls_id_is_the_models_own_but_never_twice():
    written = kimi([("add", {}), ("add", {}), ("now", {})], "", "").replace("add:1", "add:0")
    first, second, third = (call.id for call in ToolAnswer(make("kimi_k2")).message(written).tool_calls)
    assert (first, third) == ("functions.add:0", "functions.now:2") and second.startswith("call_")


@pytest.mark.parametrize("name", [name for name in FORMATS if isinstance(FORMATS[name][0], str)])
def test_a_call_begins_as_the_forms_of_its_format_do(name):
    """forms are how structured output knows that an answer is a call."""
    parser, write = FORMATS[name]
    use = ToolUse("auto", tuple(Function(name=each) for each in FUNCTIONS))
    forms = TOOL_PARSERS.get(parser).forms(Writing(use, lambda text: (text,)))
    if name.endswith("bare"):
        return  # a grammar forgets nothing
    if parser != "openai" or name.endswith("role"):  # with a recipient in the channel, it is no text to tell it by
        assert write(SAID, "", "").lstrip("\n").startswith(tuple(text for texts, *_ in forms for text in texts))


def test_a_long_string_in_xml_comes_as_it_is_written():
    parser = make("qwen3_coder")
    assert parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nPa")[-1].text.endswith('"Pa')
    assert parser.push("ris\n") == [Arguments("ris")]
    assert parser.push("</parameter>\n</function>\n") == [Arguments('"}'), CallEnd()]


def test_a_long_call_is_read_in_little_time():
    text = hermes([("add", {"a": ["x" * 50] * 4000})], "", "")
    parser = make("hermes")
    events = [event for piece in cut(text, range(0, len(text), 7)) for event in parser.push(piece)]
    assert sum(len(event.text) for event in events if isinstance(event, Arguments)) > 200_000
