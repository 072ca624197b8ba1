"""Rule: of any schema an output fits, as jsonschema judges, or the request was refused with a reason, or the output was
cut. `make fuzz` goes on with 50,000 more (tests/fuzz/schemas.py)."""

from __future__ import annotations

import json
import random
from collections import Counter
from decimal import Decimal
from itertools import combinations

import pytest
from grammar_driver import BACKENDS
from random_schemas import SNIPPETS, draw, exact, judge, schema

from minivllm.structured.schema import KEYWORDS

NUM_DRAWS = 300  # of each backend
NUM_TRIPLES = 200
FOUND = [  # by runs of `make fuzz`
    {"const": 2**53 + 1},
    {"enum": [2**64 + 1, [1, "a"], []]},
    {"type": "integer", "minimum": 2**63, "maximum": 2**63},
    {"type": "object", "minProperties": 2},
    {"type": "object", "properties": {}, "additionalProperties": {}, "minProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^[ab]$": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    {"properties": {"p": {"$ref": "#"}, "a": {"type": "string"}}, "required": ["p", "a"]},
    {"minimum": 2**63 - 1, "maximum": 2**63},
    {
        "type": "object",
        "unevaluatedProperties": False,
        "if": {"properties": {"m": {"type": "null"}}},
        "else": {"properties": {"l": {}}},
    },
    {"oneOf": [{"enum": [{"a": 1}, 99]}, {"const": -2.5}], "unevaluatedProperties": False},
    {"type": "number", "minimum": -1e300, "maximum": 5e-324},
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_fits_its_schema_or_the_request_was_refused(backend):
    found: Counter[str] = Counter()
    for seed in range(NUM_DRAWS):
        drawn = draw(schema(random.Random(seed)), backend, random.Random(seed))
        found[drawn.outcome] += 1
        assert drawn.outcome != "wrong", f"{seed}: {drawn.detail}\n{json.dumps(schema(random.Random(seed)))}"
    assert found["fits"] > 0.3 * NUM_DRAWS and found["cut"] < 0.05 * NUM_DRAWS, found


def beside(snippets: tuple[dict, ...], wrap: bool) -> dict:
    """One schema that says all, in one place; or in several, which two that speak of one keyword must."""
    keywords = [key for snippet in snippets for key in snippet if key != "$defs"]
    definitions = {name: s for snippet in snippets for name, s in snippet.get("$defs", {}).items()}
    if wrap or len(set(keywords)) < len(keywords):
        return {"allOf": list(snippets), "$defs": definitions}
    return {key: value for snippet in snippets for key, value in snippet.items()} | {"$defs": definitions}


def several() -> list[tuple[dict, ...]]:
    """All pairs, and some triples."""
    rng = random.Random(0)
    triples = [tuple(rng.sample(SNIPPETS, 3)) for _ in range(NUM_TRIPLES)]
    return [*combinations(SNIPPETS, 2), *triples]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keywords_beside_one_another_all_hold_or_one_of_them_is_refused_by_name(backend):
    found: Counter[str] = Counter()
    for seed, snippets in enumerate(several()):
        wanted = beside(snippets, wrap=bool(seed % 2))
        drawn = draw(wanted, backend, random.Random(seed))
        found[drawn.outcome] += 1
        assert drawn.outcome != "wrong", f"{json.dumps(wanted)}: {drawn.detail}"
        reasons = ("no value fits", "any value is allowed", "an enumerated", *KEYWORDS)
        assert drawn.outcome != "refused" or any(reason in drawn.detail for reason in reasons), drawn.detail
    assert found["fits"] > 0.2 * found.total(), found


@pytest.mark.parametrize("schema", FOUND)
def test_what_was_found_once_stays_right(schema):
    drawn = [draw(schema, backend, random.Random(seed)) for backend in BACKENDS for seed in range(30)]
    assert not [each for each in drawn if each.outcome == "wrong"]


@pytest.mark.parametrize(
    "schema, text, fits",
    [
        ({"type": "integer"}, "1.0", True), ({"type": "integer"}, "1.5", False), ({"type": "integer"}, "true", False),
        ({"multipleOf": 0.1}, "0.3", True), ({"multipleOf": 0.01}, "1.005", False), ({"multipleOf": 5}, "1e1", True),
        ({"minimum": 2**53 + 1}, str(2**53), False), ({"maximum": 2**64}, str(2**64 + 1), False),
        ({"const": 2**53 + 1}, str(2**53), False), ({"enum": [0.1]}, "0.10", True), ({"const": 1}, "true", False),
    ],
)  # fmt: skip
def test_the_judge_reads_numbers_as_they_are_written(schema, text, fits):
    assert judge(schema).is_valid(exact(text)) == fits


def test_a_number_that_no_double_is_is_no_exact_one():
    assert exact("1e400") == float("inf") and exact("1e-400") == 0.0 and exact("0.1") == Decimal("0.1")


def test_random_schemas_have_keywords_beside_one_another_and_bounds_beyond_2_53():
    texts = [json.dumps(schema(random.Random(seed))) for seed in range(500)]
    for keyword in (
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "patternProperties",
        "dependentRequired",
        "multipleOf",
        "not",
        "if",
    ):
        assert any(f'"{keyword}"' in text for text in texts), keyword
    assert any(str(2**53 + 1) in text for text in texts) and any("%" in text for text in texts)
