"""Rule: where the answer is held to a schema, a call that the model may write instead is one that its format's parser
reads, of an offered function, with arguments by its schema; or the answer follows its own."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from grammar_driver import allowed, compiler, draw, vocabulary

from minivllm.serve.chat import beside_calls
from minivllm.serve.protocol import Function
from minivllm.serve.tools import TOOL_PARSERS
from minivllm.serve.tools.ask import ToolUse
from minivllm.serve.tools.forms import Writing
from minivllm.serve.tools.reader import Arguments, CallBegin, CallEnd
from minivllm.structured.params import StructuredParams

CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "weather_in": {"type": "object", "properties": {"places": {"type": "array", "items": CITY, "maxItems": 2}}},
    "now": None,
}
USE = ToolUse("auto", tuple(Function(name=name, parameters=schema) for name, schema in SCHEMAS.items()))
ANSWER = StructuredParams(choice=["yes", "no"])
SPECIALS = [i for i, token in enumerate(vocabulary().tokens) if not token and i not in vocabulary().eos_ids]


def nothing_special(text: str) -> None:
    return None


def has_form(name: str) -> bool:
    return any(len(form) > 1 for form in TOOL_PARSERS.get(name).forms(Writing(USE, lambda text: (text,))))


FORMATS = [name for name in TOOL_PARSERS.names() if has_form(name)]
ONCE = list({TOOL_PARSERS.get(name): name for name in FORMATS}.values())  # without other names of a format


def params_of(name: str, use: ToolUse = USE, special=nothing_special) -> StructuredParams:
    return beside_calls(ANSWER, use, TOOL_PARSERS.get(name), special)


def read(name: str, text: str) -> tuple[list[tuple[str, str]], list]:
    """The calls of a text, and what else it has."""
    parser, calls, others = TOOL_PARSERS.get(name)(USE.schemas), [], []
    for event in [*parser.push(text), *parser.end()]:
        match event:
            case CallBegin(called):
                calls.append((called, ""))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case CallEnd(None):
                pass
            case other:
                others.append(other)
    return calls, others


def check(name: str, text: str) -> list[str]:
    """The names of the functions that are called."""
    calls, others = read(name, text)
    assert calls and not others, text
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), USE.schemas[called])
    return [called for called, _ in calls]


def test_the_formats_of_json_have_a_form():
    assert set(TOOL_PARSERS.names()) - set(FORMATS) == {
        "qwen3_coder", "qwen3_xml", "glm45", "glm47", "deepseek_v32", "deepseek_v4", "pythonic", "llama4_pythonic",
        "openai",
    }  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_what_is_drawn_is_an_answer_or_calls_that_parse(name):
    compiled, found, in_a_row = compiler().compile(params_of(name)), set(), False
    for seed in range(300):
        text, ended = draw(compiled.start(), random.Random(seed), 600)
        if ended and text not in (b"yes", b"no"):
            called = check(name, text.decode())
            found, in_a_row = found | set(called), in_a_row or len(called) > 1
        if seed > 12 and found == set(SCHEMAS) and in_a_row:
            return
    pytest.fail(f"never drawn: {set(SCHEMAS) - found or 'calls in a row'}")


@pytest.mark.parametrize("name", ONCE)
def test_one_call_at_most_without_parallel_calls(name):
    compiled = compiler().compile(params_of(name, ToolUse("auto", USE.functions, parallel=False)))
    for seed in range(12):
        text, ended = draw(compiled.start(), random.Random(seed), 600)
        assert not ended or text in (b"yes", b"no") or len(check(name, text.decode())) == 1


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3"])
def test_markers_may_be_special_tokens(name):
    parser = TOOL_PARSERS.get(name)
    ids = dict(zip(parser.markers, SPECIALS, strict=False))
    texts = {token: marker for marker, token in ids.items()}
    grammar, rng, text = compiler().compile(params_of(name, special=ids.get)).start(), random.Random(3), ""
    assert grammar.accept(ids[parser.begins[0]])
    text += parser.begins[0]
    while not grammar.is_terminated and len(text) < 4000:
        token = int(rng.choice(np.flatnonzero(allowed(grammar))))
        assert grammar.accept(token)
        text += texts.get(token) or vocabulary().tokens[token].decode("latin-1")
    check(name, text)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_a_mask_is_what_is_taken_and_rolling_back_leads_to_where_it_was(name):
    for seed in range(4):
        rng, grammar, masks = random.Random(seed), compiler().compile(params_of(name)).start(), []
        for _ in range(40):
            masks.append(allowed(grammar))
            if grammar.is_terminated:
                break
            for token in rng.sample(range(len(vocabulary())), 40):
                taken = grammar.accept(token)
                assert taken == masks[-1][token]
                grammar.rollback(int(taken))
            assert grammar.accept(int(rng.choice(np.flatnonzero(masks[-1]))))
        num = len(masks) - 1
        back = rng.randrange(1, num + 1)
        if not grammar.is_terminated:
            grammar.rollback(1)
        grammar.rollback(back)
        assert (allowed(grammar) == masks[num - back]).all()


def test_a_schema_that_no_backend_holds_leaves_the_arguments_an_object():
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    use = ToolUse("auto", (Function(name="odd", parameters=odd),))
    text, ended = draw(compiler().compile(params_of("hermes", use)).start(), random.Random(2), 3000)
    assert ended and (text in (b"yes", b"no") or b'{"name": "odd", "arguments": {' in text)
