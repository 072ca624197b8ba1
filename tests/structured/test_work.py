"""Rule: what a specification costs to read grows with its length, by a power that is known, whatever it says. Work is
counted in steps, so that nothing here depends on how busy the machine is."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations

import pytest
from grammar_driver import compiler
from json_schemas import SCHEMAS

from minivllm.errors import BadRequest
from minivllm.structured import disjoint, regex, schema
from minivllm.structured.automaton import compile_tree
from minivllm.structured.bounds import MOST, nested_bounds
from minivllm.structured.disjoint import Alternatives
from minivllm.structured.normal import normal
from minivllm.structured.params import StructuredParams
from minivllm.structured.schema import References, SchemaError


def levels(num_levels: int, width: int = 12) -> dict:
    """Two alternatives that differ nowhere, each of whose properties leads to the next level: width^levels paths."""
    defs = {}
    for side in "ab":
        for level in range(num_levels):
            names = [f"p{i}" for i in range(width)]
            inner = {"$ref": f"#/$defs/{side}{level + 1}"}
            defs[f"{side}{level}"] = {"type": "object", "properties": dict.fromkeys(names, inner), "required": names}
        defs[f"{side}{num_levels}"] = {"type": "string"}
    return {"oneOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}], "$defs": defs}


def test_alternatives_are_compared_in_as_many_steps_as_they_have_pairs(monkeypatch):
    work = []
    for num_levels in (3, 6):
        root = levels(num_levels)
        known = Alternatives(References(root))
        assert known.overlapping(root["oneOf"]) == (0, 1)
        work.append(known.work)
    assert work[1] < 3 * work[0], "a level more costs as much as the one before, not twelve times as much"
    monkeypatch.setattr(disjoint, "MAX_WORK", 100)
    with pytest.raises(BadRequest, match="over 100 steps: use anyOf"):
        compiler().compile(StructuredParams(json=levels(7)))


def test_thousands_of_constants_are_no_pairs():
    known = Alternatives(References(True))
    constants = [{"const": i} for i in range(7500)]
    assert known.overlapping(constants) is None
    assert known.overlapping([*constants, {"type": "string"}]) is None
    assert known.overlapping([{"type": "null"}, *constants, {"const": 7.0}]) == (8, 7501)
    assert known.overlapping([*constants, {"type": ["integer", "null"]}]) == (0, 7500)
    assert known.work < 20 * 7500


@cache
def pieces() -> list:
    found = [inner for whole in SCHEMAS for _, inner in schema.subschemas(whole) if "$ref" not in json.dumps(inner)]
    return random.Random(0).sample(found, 120)


def slowly_disjoint(known: Alternatives, a, b) -> bool:
    """As it was before anything was remembered: a document of their own for each two."""
    return Alternatives(known.references).overlapping([a, b]) is None


def test_what_is_remembered_changes_no_answer():
    known = Alternatives(References(True))
    for a, b in combinations(pieces(), 2):
        assert (known.overlapping([a, b]) is None) == slowly_disjoint(known, a, b)
        known.work = 0
    for begin in range(0, 120, 4):
        several = pieces()[begin : begin + 4]
        pairs = [(i, j) for (i, a), (j, b) in combinations(enumerate(several), 2) if not slowly_disjoint(known, a, b)]
        found = known.overlapping(several)
        assert found in pairs if pairs else found is None


def test_a_chain_of_references_is_followed_once(monkeypatch):
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "null"}}
    calls = []
    resolve = References.__call__
    monkeypatch.setattr(References, "__call__", lambda *args: calls.append(1) or resolve(*args))
    schema.load(json.dumps({"$ref": "#/$defs/d0", "$defs": defs}))
    assert len(calls) < 4 * 3000
    defs["d3000"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d1500"}]}
    with pytest.raises(SchemaError, match=r"#/\$defs/d\d+.*: a schema that refers to itself"):
        schema.load(json.dumps({"$ref": "#/$defs/d0", "$defs": defs}))


def test_a_need_that_leads_out_is_found_however_long_the_way():
    """Nothing gives up after some patience, nothing recurses."""
    defs = {f"d{i}": {"type": "object", "properties": {"p": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}
    for name in defs:
        defs[name]["required"] = ["p"]
    ends = {"anyOf": [{"$ref": "#/$defs/d7"}, {"type": "null"}]}
    normal(json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {"d2000": ends}}))
    with pytest.raises(SchemaError, match="no value fits"):
        normal(json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {"d2000": {"$ref": "#/$defs/d7"}}}))


def test_the_place_of_a_schema_is_short_however_long_the_names():
    long = {"properties": {"n" * 60_000: {"properties": {f"p{i}": {} for i in range(1000)}}}}
    assert sum(len(place.path) for place in schema.subschemas(long)) < 400_000


@pytest.mark.parametrize("pattern", ["(?:){1000000000}", "((?:){999999999}){999999999}a", "(?:a{0}){999999999}"])
def test_what_reads_nothing_is_not_written_out(pattern):
    pattern = pattern.replace("1000000000", "999999999")
    assert len(compile_tree(regex.parse(pattern)).table) <= 4


@pytest.mark.parametrize(
    "given, why",
    [
        ({"json": '{"type": "string", "maxLength": 1e400}'}, "1e400 is no number that a double can be"),
        ({"json": '{"type": "array", "minItems": 1e308}'}, "a count, 999,999,999 at most"),
        ({"json": '{"type": "array", "maxItems": 1%s}' % ("0" * 4000)}, "a count, 999,999,999 at most"),
        ({"json": '{"type": "integer", "minimum": 1%s}' % ("0" * 4299)}, "a number that a double can be"),
        ({"json": '{"type": "integer", "exclusiveMaximum": -1e999}'}, "no number that a double can be"),
        ({"json": '{"type": "integer", "maximum": 1%s}' % ("0" * 5000)}, "not valid JSON"),
        ({"json": '{"const": NaN}'}, "no number that a double can be"),
        ({"json": '{"enum": [1, -1e400]}'}, "no number that a double can be"),
        ({"json": '{"pattern": "a{%s}"}' % ("9" * 5000)}, "a bound of over 9 digits|regex parse error"),
        ({"regex": "a{%s}" % ("9" * 5000)}, "a bound of over 9 digits at position 1"),
        ({"regex": "a{1,%s}" % ("9" * 5000)}, "a bound of over 9 digits"),
    ],
    ids=lambda given: str(given)[:50],
)  # fmt: skip
@pytest.mark.parametrize("names", [(), ("dfa",), ("llguidance",)], ids=str)
def test_a_number_that_is_too_large_is_refused_by_name(given, why, names):
    with pytest.raises(BadRequest, match=why):
        compiler(*names).compile(StructuredParams(**given))


DEEP = 'root ::= a{1,1000}\na ::= b{1,1000}\nb ::= c{1,1000}\nc ::= "x"{1,1000}'


@pytest.mark.parametrize(
    "grammar, copies",
    [
        ('root ::= "a" b*\nb ::= [{}9]', 1),
        ('root ::= "a"{3} b{2,5}', 5),
        ('root ::= ("a"{3} | b{7}){2,}', 14),
        ('root ::= (("a"{10}){10}){10} "b"{20}', 1000),
        ('root ::= x\nx ::= y{2,3}\ny ::= ("a" z){4}\nz ::= [a-z]{5,6}', 72),
        ('root ::= a b\na ::= b{9}\nb ::= "x"', 9),
        ('root ::=\n  (a)\n{ 7 , }\na\n::= "x"{ 6 }', 42),
        ('root ::= "{9}" [{9}] "\\"{9}" # {9}\n', 1),
        ('root ::= a{5}\na ::= "(" root{7} ")" | "x"', 35),  # how often it comes back is no number
        ('start: item~3..5\nitem.1: "a"~2 | /(b{3}){4}/\nOTHER[x]: "c"~9', 60),
        ("start: a{20}\na: /[b]{3}/ // {900}\n", 60),
        (DEEP, MOST),
        ("root ::= a{%s}" % ("9" * 5000), MOST),
        ("((((({1000", 1), ("}{{9}){8}(", 1), ('a ::= "', 1), ("[\\", 1), ("", 1),
    ],
)  # fmt: skip
def test_bounds_inside_bounds_multiply_over_groups_and_rules(grammar, copies):
    assert nested_bounds(grammar) == copies


@pytest.mark.parametrize(
    "text", ["(" * 65_000, "a[" * 32_000, '"\\' * 32_000, "a{1,2}" * 10_000, "a::=a{2}b\n" * 6_000]
)
def test_a_text_that_is_no_grammar_is_read_once(text):
    nested_bounds(text)


@pytest.mark.parametrize("names", [(), ("xgrammar",), ("llguidance",)], ids=str)
@pytest.mark.parametrize(
    "grammar", [DEEP, 'root ::= (((("x"{1,1000}){1,1000}){1,1000}){1,1000})', "start: /((a{99}){99}){99}/"]
)
def test_a_grammar_whose_bounds_multiply_beyond_measure_is_refused_by_name(grammar, names):
    with pytest.raises(BadRequest, match="stand for over 100,000 copies") as e:
        compiler(*names).compile(StructuredParams(grammar=grammar, field="guided_grammar"))
    assert e.value.param == "guided_grammar"
