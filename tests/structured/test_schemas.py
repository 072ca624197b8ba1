"""200 JSON Schemas: whatever allowed tokens a model chooses, a finished output parses and is an instance."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from grammar_driver import BACKENDS, compiler, draw
from json_schemas import RECURSION, SCHEMAS, STRICT

from minivllm.errors import BadRequest
from minivllm.structured.params import StructuredParams

NUM_DRAWS = 6
# Schemas that a backend refuses, by name of the reason; the others of the 200 it must take.
MAX_REFUSED = {"xgrammar": len(STRICT) + 1, "llguidance": 0, "dfa": 58}


def numbered():
    return [pytest.param(schema, i, id=f"{i}") for i, schema in enumerate(SCHEMAS)]


def assert_instances(name: tuple[str, ...], schema, seed: int) -> int:
    """How many of the draws ended."""
    params = StructuredParams(json=schema, disable_any_whitespace=bool(seed % 2))
    compiled = compiler(*name).compile(params)
    validator = jsonschema.Draft202012Validator(schema)
    num_done = 0
    for i in range(NUM_DRAWS):
        out, done = draw(compiled.start(), random.Random(1000 * seed + i))
        if done:
            num_done += 1
            validator.validate(json.loads(out))
    return num_done


def test_there_are_200_valid_schemas():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 200
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("schema, seed", numbered())
def test_every_finished_output_is_an_instance(schema, seed):
    """structured.backend=auto takes every one of them."""
    assert assert_instances((), schema, seed) >= NUM_DRAWS - 2


@pytest.mark.parametrize("name", BACKENDS)
def test_openais_strict_inside_a_schema_is_no_keyword(name):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "strict": True}}, "required": ["a"]}
    assert assert_instances((name,), schema | {"strict": True, "additionalProperties": False}, 1) > NUM_DRAWS // 2


@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_alone_keeps_its_promises_or_refuses(name):
    num_refused = num_done = 0
    for seed, schema in enumerate(SCHEMAS):
        try:
            num_done += assert_instances((name,), schema, seed)
        except BadRequest as e:
            num_refused += 1
            assert str(e).startswith("structured: json: ") and f"structured.backend={name}" in str(e)
    assert num_refused <= MAX_REFUSED[name]
    assert num_done > 0.95 * NUM_DRAWS * (len(SCHEMAS) - num_refused)


@pytest.mark.parametrize("schema", RECURSION)
def test_the_automaton_refuses_recursion_by_name(schema):
    with pytest.raises(BadRequest, match="recursive"):
        compiler("dfa").compile(StructuredParams(json=schema))


@pytest.mark.parametrize(
    "schema, why",
    [
        ("{", "not valid JSON"), ('"a"', "a schema is an object"), ({"type": "strng"}, 'no type "strng"'),
        ({"type": ["string", 3]}, "no type 3"), ({"required": "a"}, "required must be"), ({"enum": []}, "enum must be"),
        ({"properties": [1]}, "properties must be"), ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"$ref": "http://x/y"}, "nothing is fetched"), ({"items": 3}, "a schema is an object"),
        ({"minLength": -1}, "must be a count"), ({"minimum": "3"}, "must be a number"), ({"pattern": 3}, "a string"),
        ({"type": "string", "pattern": "(a"}, "without its|unclosed"), ({"$ref": "#"}, "refers to itself"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}, "refers to itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value fits"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no value fits"), (False, "no value fits"),
        (json.loads('{"items":' * 120 + "true" + "}" * 120), "deep"),
        ({"properties": {"a": {"type": 1}}}, "#/properties/a"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("names", [(), *((name,) for name in BACKENDS)], ids=str)
def test_what_is_no_schema_is_refused_with_the_place(schema, why, names):
    params = StructuredParams(json=schema, field="response_format.json_schema.schema")
    with pytest.raises(BadRequest, match=why) as e:
        compiler(*names).compile(params)
    assert e.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    "one_of",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "string"}, {"type": "string", "pattern": "^a"}],
        [{"type": "object", "properties": {"a": {"type": "null"}}}, {"additionalProperties": {"type": "null"}}],
        [{"enum": [1, 2]}, {"enum": [2.0, 3]}],
        [{"minimum": k} for k in range(9)],
    ],
)
def test_alternatives_that_may_overlap_and_have_no_opposites_are_refused(one_of):
    """Nobody would see that a value fits two, which oneOf forbids."""
    with pytest.raises(BadRequest, match="oneOf"):
        compiler().compile(StructuredParams(json={"oneOf": one_of}))
