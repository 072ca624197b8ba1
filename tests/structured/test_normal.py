"""Rule: keywords beside one another all hold, wherever in the document they stand, or the schema is refused by name."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from grammar_driver import BACKENDS, compiler, draw, vocabulary
from json_schemas import BOOLEAN, INTEGER, NULL, STRING, arr, obj

from minivllm.errors import BadRequest
from minivllm.structured import instances, normal
from minivllm.structured.params import StructuredParams
from minivllm.structured.schema import SchemaError

NUM_DRAWS = 10


def outputs(schema, names: tuple[str, ...] = ()) -> list:
    """What came of some draws, each an instance."""
    compiled = compiler(*names).compile(StructuredParams(json=schema))
    found = []
    for seed in range(NUM_DRAWS):
        out, is_done = draw(compiled.start(), random.Random(seed))
        if is_done:
            found.append(json.loads(out))
            jsonschema.Draft202012Validator(schema).validate(found[-1])
    assert len(found) > NUM_DRAWS // 2
    return found


BASE = {"$defs": {"base": obj(id=INTEGER), "more": obj(size=BOOLEAN)}}
BASE_REF, MORE = {"$ref": "#/$defs/base"}, {"$ref": "#/$defs/more"}
SEVERAL = {  # of one object: the names that each output has
    "anyOf": (obj(a=INTEGER) | {"anyOf": [obj(b=NULL), obj(c=BOOLEAN)]}, [{"a", "b"}, {"a", "c"}]),
    "oneOf": (
        obj(a=INTEGER) | {"oneOf": [obj(k={"const": 1}), obj(k={"const": 2}, c=NULL)]},
        [{"a", "k"}, {"a", "k", "c"}],
    ),
    "oneOf of names": (
        obj("", a=NULL, b=NULL, c=NULL) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
        [{"a"}, {"b"}, {"c"}],
    ),
    "oneOf of $ref and more": (
        BASE | {"oneOf": [BASE_REF | obj(k={"const": "x"}), {"allOf": [BASE_REF, obj(k={"const": "y"}, c=NULL)]}]},
        [{"id", "k"}, {"id", "k", "c"}],
    ),
    "allOf": (obj(a=INTEGER) | {"allOf": [obj(b=NULL), obj(c=BOOLEAN)]}, [{"a", "b", "c"}]),
    "$ref": (BASE | BASE_REF | obj(a=NULL), [{"id", "a"}]),
    "$ref and anyOf": (BASE | BASE_REF | {"anyOf": [obj(b=NULL), MORE]}, [{"id", "b"}, {"id", "size"}]),
    "allOf of $ref": (BASE | {"allOf": [BASE_REF, MORE, obj(a=NULL)]}, [{"id", "size", "a"}]),
    "two anyOf": (
        {"allOf": [{"anyOf": [obj(a=NULL), obj(b=NULL)]}, {"anyOf": [obj(c=NULL), obj(d=NULL)]}]},
        [{"a", "c"}, {"a", "d"}, {"b", "c"}, {"b", "d"}],
    ),
    "anyOf inside": (
        obj(a=NULL) | {"anyOf": [obj(b=NULL) | {"anyOf": [obj(c=NULL), obj(d=NULL)]}, obj(e=NULL)]},
        [{"a", "b", "c"}, {"a", "b", "d"}, {"a", "e"}],
    ),
    "required": (
        obj("", a=NULL, b=NULL) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a"}, {"b"}, {"a", "b"}],
    ),
    "dependentRequired": (
        obj("c", a=NULL, b=NULL, c=NULL) | {"dependentRequired": {"a": ["b"]}},
        [{"c"}, {"b", "c"}, {"a", "b", "c"}],
    ),
    "dependentSchemas": (obj("", a=NULL) | {"dependentSchemas": {"a": obj(b=NULL)}}, [set(), {"a", "b"}, {"b"}]),
    "unevaluatedProperties": ({"allOf": [obj(a=NULL), obj(b=NULL)], "unevaluatedProperties": False}, [{"a", "b"}]),
    "if and else": (
        obj("k", k={"enum": ["a", "b"]}, a=NULL, b=NULL)
        | {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["a"]}, "else": {"required": ["b"]}},
        [{"k", "a"}, {"k", "b"}, {"k", "a", "b"}],
    ),
    "if of a name": (
        obj("", a=NULL, b=NULL) | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        [set(), {"b"}, {"a", "b"}],
    ),
    "not both": (obj("", a=NULL, b=NULL) | {"not": {"required": ["a", "b"]}}, [set(), {"a"}, {"b"}]),
    "minProperties": (obj("", a=NULL, b=NULL) | {"minProperties": 2}, [{"a", "b"}]),
    "maxProperties": (obj("a", a=NULL, b=NULL) | {"maxProperties": 1}, [{"a"}]),
    "propertyNames": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": NULL, "required": ["y"]},
        [{"y"}, {"x", "y"}],
    ),
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("which", SEVERAL)
def test_an_object_described_in_several_places_has_all_of_them(which, backend):
    schema, names = SEVERAL[which]
    found = [set(output) for output in outputs(schema, () if backend == "auto" else (backend,))]
    assert all(some in names for some in found), found


OVERLAPPING = {
    "a pattern of its own name": {
        "type": "object",
        "properties": {"level": {"type": "integer", "multipleOf": 5}},
        "required": ["level"],
        "patternProperties": {"^level$": {"minimum": 0, "maximum": 20, "type": "integer"}},
        "additionalProperties": False,
    },
    "patterns that meet several names": {
        **obj(ab={"minimum": 3}, b={"type": "integer"}, c=STRING),
        "patternProperties": {"b$": {"type": "integer", "maximum": 4}, "^c$": {"maxLength": 2}},
    },
    "patterns of two schemas": {
        "allOf": [
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "required": ["ab"]},
            {"patternProperties": {"^ab$": {"minimum": 5}}, "properties": {"ab": True}, "additionalProperties": False},
        ]
    },
}


@pytest.mark.parametrize("schema", OVERLAPPING.values(), ids=list(OVERLAPPING))
def test_a_name_that_several_keywords_meet_is_held_to_all_of_them(schema):
    assert all(outputs(schema))


@pytest.mark.parametrize(
    "schema, text, takes",
    [
        (obj(a=INTEGER, _open=STRING), '{"a": 1, "b": "x"}', True),
        (obj(a=INTEGER, _open=STRING), '{"a": 1, "ab": "x", "": "y"}', True),
        (obj(a=INTEGER, _open=STRING), '{"a": 1, "a": "x"}', False),
        (obj(a=INTEGER, _open=STRING), '{"a": 1, "\\u0061": "x"}', False),
        (obj("", a=INTEGER, abc=INTEGER, _open=STRING), '{"ab": "x", "abcd": "y", "b": "z"}', True),
        (obj("", a=INTEGER, abc=INTEGER, _open=STRING), '{"abc": "x"}', False),
        (obj("", a=INTEGER, abc=INTEGER, _open=STRING), '{"ab\\u0063": "x"}', False),
        (obj("", **{"a\n": INTEGER}, _open=STRING), '{"a\\n": "x"}', False),
        (obj("", **{"a\n": INTEGER}, _open=STRING), '{"a\\u000a": "x"}', False),
        ({"type": "object", "patternProperties": {"^a": INTEGER}}, '{"ab": 1}', True),
        ({"type": "object", "patternProperties": {"^a": INTEGER}}, '{"ab": "x"}', False),
        ({"type": "object", "patternProperties": {"^a": INTEGER}}, '{"\\u0061b": "x"}', False),
    ],
)
def test_a_name_is_told_from_others_however_json_spells_it(schema, text, takes):
    grammar = compiler("llguidance").compile(StructuredParams(json=schema, disable_any_whitespace=True)).start()
    tokens = vocabulary().tokens
    taken = all(grammar.accept(tokens.index(bytes([byte]))) for byte in text.encode())
    assert (taken and grammar.accept(vocabulary().eos_ids[0])) == takes


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(
    "schema, fitting",
    [
        ({"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 4.5}, {"exclusiveMinimum": 3}]}, [4]),
        ({"type": "integer", "minimum": 1, "maximum": 11, "multipleOf": 4, "allOf": [{"multipleOf": 6}, {}]}, None),
        ({"type": "number", "minimum": 7, "maximum": 8.5, "multipleOf": 2.5}, [7.5]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, [2**53 + 1]),
        ({"type": ["integer", "string"], "enum": [1, 1.5, "a", None], "not": {"const": 1}}, ["a"]),
        ({"enum": [[1], [1, 2], [2, 2], []], "minItems": 1, "uniqueItems": True, "contains": {"const": 2}}, [[1, 2]]),
        ({"enum": [{"a": 1}, {"a": "x"}, {"b": 1}], "if": {"required": ["a"]}, "then": obj(a=STRING)},
         [{"a": "x"}, {"b": 1}]),
        ({"const": 3, "type": "string"}, None),
        ({"enum": ["abc", "ab", "b"], "pattern": "^a", "maxLength": 2}, ["ab"]),
        ({"enum": ["cat", "dog"], "oneOf": [{"pattern": "^c"}, {"maxLength": 3}]}, ["dog"]),
        ({"anyOf": [{"const": 1}, {"const": "a"}], "type": "string"}, ["a"]),
        ({"oneOf": [{"type": "integer", "minimum": 3}, {"maximum": 4}], "enum": [2, 3, 4, 5, "x"]}, [2, 5, "x"]),
        ({"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 4}], "minimum": 2, "maximum": 5}, [2, 5]),
        ({"enum": [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {}], "dependentRequired": {"a": ["b"]}, "minProperties": 1},
         [{"b": 2}, {"a": 1, "b": 2}]),
        ({"anyOf": [{"enum": [{"a": 1}, {"b": 2}]}], "dependentRequired": {"a": ["b"]}}, [{"b": 2}]),
        ({"anyOf": [{"enum": [{"a": 1}, {"b": 2}]}, {"const": {"a": 3}}], "dependentRequired": {"a": ["b"]}},
         [{"b": 2}]),
        ({"type": "integer", "minimum": 1, "not": {"anyOf": [{"minimum": 4}, {"maximum": 2}]}}, [3]),
        ({"type": ["boolean", "null", "string"], "not": {"type": ["boolean", "string"]}}, [None]),
        ({"type": "string", "minLength": 1, "not": {"allOf": [{"minLength": 1}, {"type": "string"}]}}, None),
        ({"prefixItems": [INTEGER, True], "items": False, "minItems": 2, "allOf": [{"items": {"const": 7}}]}, [[7, 7]]),
        ({"type": "array", "prefixItems": [{"const": 1}, False, {"const": 2}], "minItems": 1}, [[1]]),
        ({"$ref": "#/$defs/a", "maxLength": 0, "$defs": {"a": {"type": ["string", "null"]}}, "type": "string"}, [""]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_bounds_and_values_that_meet_leave_what_fits_all(schema, fitting, backend):
    """None: nothing does, and that is what is said."""
    names = () if backend == "auto" else (backend,)
    if fitting is None:
        with pytest.raises(BadRequest, match="no value fits"):
            outputs(schema, names)
        return
    try:
        found = outputs(schema, names)
    except BadRequest as e:
        assert backend == "llguidance" and "beyond 9,007,199,254,740,992" in str(e)
    else:
        assert all(output in fitting for output in found)


@pytest.mark.parametrize(
    "schema, name",
    [
        ({"type": "string", "not": {"pattern": "^a"}}, "#/not"),
        ({"type": "string", "not": {"const": "a"}}, "#/not"),
        ({"type": "number", "not": {"type": "integer"}}, "#/not"),
        ({"type": "string", "if": {"pattern": "^a"}, "then": {"maxLength": 3}}, "#/if"),
        (obj(k=STRING) | {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["b"]}}, "k/not"),
        (arr(INTEGER) | {"uniqueItems": True}, "#/uniqueItems"),
        (arr(INTEGER) | {"contains": {"const": 1}}, "#/contains"),
        (obj(a=arr(INTEGER) | {"unevaluatedItems": False}), "#/properties/a/unevaluatedItems"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "#/dependencies"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"type": "integer", "nullable": True}, "#/nullable"),
        ({"type": "string", "minLenght": 3}, "Did you mean minLength"),
        ({"type": "array", "items": [INTEGER]}, "items as a list"),
        ({"type": "object", "patternProperties": {"^a": INTEGER, "b$": STRING}}, "a name may meet both"),
        ({"allOf": [obj(a=NULL), {"unevaluatedProperties": False, **obj(b=NULL)}]}, "unevaluatedProperties"),
        ({"type": "object", "unevaluatedProperties": {"type": "null"}}, "#/unevaluatedProperties"),
        ({"type": "string", "allOf": [{"format": "date"}, {"format": "uuid"}]}, "format"),
        ({"type": "string", "enum": ["a"], "format": "date"}, "format"),
        ({"type": "object", "propertyNames": {"format": "date"}}, "#/propertyNames"),
        ({"oneOf": [{"type": "string"}, {"pattern": "a"}], "minLength": 1}, "#/oneOf"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
@pytest.mark.parametrize("names", [(), *((name,) for name in BACKENDS)], ids=str)
def test_what_is_not_held_is_refused_by_name(schema, name, names):
    with pytest.raises(BadRequest) as e:
        compiler(*names).compile(StructuredParams(json=schema))
    assert name in str(e.value)


TARGET = {"type": "string", "enum": ["x"]}
REFERENCES = {
    "#/$defs/a~1b": {"$defs": {"a/b": TARGET}},
    "#/$defs/m~0n": {"$defs": {"m~n": TARGET}},
    "#/$defs/m~01n": {"$defs": {"m~1n": TARGET}},
    "#/$defs/p%25q": {"$defs": {"p%q": TARGET}},
    "#/$defs/p%2525q": {"$defs": {"p%25q": TARGET}},
    "#/%24defs/a%7E1b": {"$defs": {"a/b": TARGET}},
    "#/$defs/caf%C3%A9": {"$defs": {"café": TARGET}},
    "#/$defs/café": {"$defs": {"café": TARGET}},
    "#/$defs/a%20b%22": {"$defs": {'a b"': TARGET}},
    "#/$defs/": {"$defs": {"": TARGET}},
    "#/$defs/a/anyOf/1": {"$defs": {"a": {"anyOf": [{"type": "null"}, TARGET]}}},
    "#/$defs/0": {"$defs": {"0": TARGET}},
    "#/components/schemas/A": {"components": {"schemas": {"A": TARGET}}},
    "#named": {"$defs": {"any": {"$anchor": "named", **TARGET}}},
    "https://example.org/s#/$defs/a": {"$id": "https://example.org/s", "$defs": {"a": TARGET}},
    "s#/$defs/a": {"$id": "https://example.org/s", "$defs": {"a": TARGET}},
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_leads_to_where_rfc_6901_says(reference):
    assert outputs({"$ref": reference} | REFERENCES[reference])[0] == "x"
    assert outputs(obj(a={"$ref": reference}) | REFERENCES[reference])[0] == {"a": "x"}


@pytest.mark.parametrize(
    "reference, why",
    [
        ("#/$defs/b", 'leads nowhere: there is no "b"'), ("#/$defs/a/anyOf/2", 'there is no "2"'), ("#/$defs/a~", "~"),
        ("#/$defs/a/anyOf/01", 'there is no "01"'), ("#/$defs/a/anyOf/-", 'there is no "-"'), ("#/$defs/a~2b", "~"),
        ("#/$defs/a/anyOf/١", "there is no"), ("#/$defs/%", "a % that begins no escape"), ("#/$defs/%FF", "UTF-8"),
        ("#nowhere", "no schema has this \\$anchor"), ("other.json", "nothing is fetched"),
        ("https://example.org/s", "nothing is fetched"), ("http://[", "nothing is fetched"),
        ("#/$defs/a/type", "no schema"), ("#/x/type/0", "no schema"), ("#/bad", '#/bad/type: no type "strng"'),
    ],
)  # fmt: skip
def test_a_reference_that_leads_nowhere_is_named(reference, why):
    schema = {"$ref": reference, "$defs": {"a": {"anyOf": [NULL, STRING], "type": "string"}}}
    schema |= {"x": {"type": ["null"]}, "bad": {"type": "strng"}}
    with pytest.raises(BadRequest, match=why) as e:
        compiler().compile(StructuredParams(json=schema))
    assert (
        reference.encode("unicode_escape").decode() in str(e.value) or reference in str(e.value) or "bad" in reference
    )


def test_references_inside_of_a_schema_with_an_id_are_refused_by_name():
    inner = {"$id": "https://example.org/inner", "type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": NULL}}
    with pytest.raises(BadRequest, match=r"#/properties/a/\$id"):
        compiler().compile(StructuredParams(json=obj(a=inner) | {"$defs": {"x": STRING}}))


def test_recursion_beside_other_keywords_ends():
    tree = obj("v", v=INTEGER, left={"$ref": "#/$defs/t", "required": ["left", "v"]}) | {
        "anyOf": [{}, {"maxProperties": 1}]
    }
    found = normal.normal(json.dumps({"$ref": "#/$defs/t", "properties": {"w": NULL}, "$defs": {"t": tree}}))
    assert len(json.dumps(found.schema)) < 5_000
    outputs(
        {
            "anyOf": [{"$ref": "#/$defs/t"}],
            "$defs": {"t": obj("v", v=INTEGER, next={"$ref": "#/$defs/t", "minProperties": 1})},
        }
    )


@pytest.mark.parametrize("step", [99991, 2**31, 1009, 1e-7 * 10007])
def test_a_step_of_many_remainders_is_refused_by_name(step):
    with pytest.raises(BadRequest, match="#/multipleOf is not enforced beyond 1,000"):
        compiler("llguidance").compile(StructuredParams(json={"type": "number", "multipleOf": step}))
    assert outputs({"type": "integer", "multipleOf": 5_000_000, "minimum": 1, "maximum": 10**8})
    assert outputs({"type": "number", "multipleOf": 0.01, "minimum": 0})
    assert outputs({"type": "integer", "multipleOf": 1000, "minimum": 17, "maximum": 10**7 - 1})


def choices(num: int, width: int = 2) -> dict:
    names = [[f"{letter}{i}" for letter in "abcdefgh"[:width]] for i in range(num)]
    return {"allOf": [{"anyOf": [obj(**{name: NULL}) for name in some]} for some in names]}


def test_alternatives_that_multiply_beyond_measure_are_refused_by_name():
    with pytest.raises(
        SchemaError, match="anyOf, oneOf or dependencies that hold at once have over 1,000 combinations"
    ):
        normal.normal(json.dumps(choices(10)))
    needs = {f"p{i}": ["q"] for i in range(30)}
    with pytest.raises(SchemaError, match="combinations"):
        normal.normal(json.dumps({"type": "object", "dependentRequired": needs}))
    assert normal.normal(json.dumps(choices(3)))


def levels(num: int, width: int) -> dict:
    """Each level's properties are the next level's twice, in schemas of their own: sets of schemas that grow."""
    defs = {}
    for i in range(num):
        inner = [
            {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{(i + 1 + j) % num}"}]} for j in range(width)
        ]
        defs[f"d{i}"] = {"type": "object", "properties": {f"p{j}": s for j, s in enumerate(inner)}}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{num}": {"type": "object"}}}


def test_what_a_hostile_schema_costs_is_bounded(monkeypatch):
    """By the limit of nodes and of work, whichever comes first; never by its power set."""
    for make, limit in ((levels(30, 12), "over 20,000 schemas|takes over 500,000"), (levels(3, 3), None)):
        if limit is None:
            assert normal.normal(json.dumps(make))
        else:
            with pytest.raises(SchemaError, match=limit):
                normal.normal(json.dumps(make))
    monkeypatch.setattr(instances, "MAX_WORK", 100)
    with pytest.raises(SchemaError, match="enumerated values and names fit takes over 100 steps"):
        normal.normal(json.dumps({"enum": list(range(200)), "allOf": [{"type": "integer"}]}))


def test_a_value_that_nests_too_deeply_is_refused():
    deep = json.loads("[" * 900 + "]" * 900)
    with pytest.raises(SchemaError, match="nested too deeply"):
        normal.normal(json.dumps({"enum": [deep], "type": "array"}))


def test_an_ordinary_schema_is_taken_as_it_is_written():
    schema = obj(name=STRING, tags=arr({"enum": ["a", "b"]}, 1, 3), kind={"anyOf": [NULL, INTEGER]}, _open=False)
    assert normal.normal(json.dumps(schema)).schema == schema


def test_the_normal_form_of_a_thousand_alternatives_is_linear():
    sizes = []
    for num in (200, 400):
        schema = {"type": "object", "properties": {"a": NULL}, "anyOf": [obj(**{f"p{i}": NULL}) for i in range(num)]}
        graph_work = normal.normal(json.dumps(schema)).schema
        sizes.append(len(json.dumps(graph_work)))
    assert sizes[1] < 2.2 * sizes[0]
