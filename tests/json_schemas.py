"""200 JSON Schemas of rising difficulty, made by hand and by parameters. Each has instances of finite size."""

from __future__ import annotations

from typing import Any

STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))


def obj(_required: str | None = None, _open: Any = None, **properties: Any) -> dict:
    """An object; all properties are required unless _required names (space-separated) which are."""
    required = list(properties) if _required is None else _required.split()
    schema = {"type": "object", "properties": properties, "required": required}
    return schema if _open is None else schema | {"additionalProperties": _open}


def arr(items: Any, low: int | None = None, high: int | None = None) -> dict:
    bounds = {"minItems": low, "maxItems": high}
    return {"type": "array", "items": items} | {k: v for k, v in bounds.items() if v is not None}


def ref(name: str) -> dict:
    return {"$ref": f"#/$defs/{name}"}


def integer(low: int | None = None, high: int | None = None, exclusive: bool = False) -> dict:
    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    return {"type": "integer"} | {n: v for n, v in zip(names, (low, high), strict=True) if v is not None}


SCALARS = [
    *(STRING, INTEGER, NUMBER, BOOLEAN, NULL),
    *({"type": types} for types in (["string", "null"], ["integer", "boolean"], ["number", "string", "null"])),
    *({"const": value} for value in (1, -2.5, "x", "", True, None, 'é\n"\\/', "日本", [1, "a"], {"k": [None, {}]})),
    *({"enum": values} for values in ([1, 2, 3], ["a", "ab", "abc"], [None, True, 0, "0"], ["😀", "\t"], [[], {}, ""])),
    {"type": "string", "enum": ["red", "green"]},
    {"type": "integer", "enum": [10, 100]},
]
LENGTHS = [
    {"type": "string"} | bounds
    for bounds in (
        {"minLength": 3},
        {"maxLength": 4},
        {"minLength": 2, "maxLength": 5},
        {"minLength": 1, "maxLength": 1},
    )
] + [{"type": "string", "maxLength": 0}, {"type": "string", "minLength": 20, "maxLength": 40}]
PATTERNS = [
    {"type": "string", "pattern": p}
    for p in (
        r"^[a-z]+$", r"^\d{4}-\d{2}-\d{2}$", r"^(foo|bar)(-(foo|bar))*$", r"^[A-Z]{2}\d{3,5}$", r"^#[0-9a-f]{6}$",
        r"^\+?[0-9]{3,10}$", r"^[^@\s\"\\]{1,8}@[a-z]{1,8}\.(com|org)$", r"^$|^x+$", r"^[äöü]{1,3}$", r"^日{2}本?$",
        r"[0-9]", r"^abc", r"[a-z]$", r"^.{2,4}$", r"^(\.|-|_){3}$", r"^(a|b)*c$",
    )
]  # fmt: skip
INTEGERS = [
    *(integer(*bounds) for bounds in ((0, 9), (0, None), (None, 0), (-5, 5), (10, 99), (7, 1234), (-1000, -10))),
    *(integer(*bounds) for bounds in ((99, 101), (1, 1), (-3, None), (None, 250), (0, 1_000_000))),
    *(integer(*bounds, exclusive=True) for bounds in ((0, 10), (-1, 1), (99, 1001))),
]
ARRAYS = [
    *(arr(items) for items in (STRING, INTEGER, BOOLEAN, {"enum": ["a", "b"]}, arr(INTEGER), obj(x=INTEGER))),
    *(arr(INTEGER, *bounds) for bounds in ((1, None), (2, 4), (0, 3), (3, 3), (0, 0), (5, 6))),
    arr(arr(BOOLEAN, 1, 2), 1, 2),
    {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [BOOLEAN, NULL, INTEGER], "items": False, "minItems": 1},
    {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 1},
    {"type": "array", "prefixItems": [STRING, STRING], "items": BOOLEAN, "minItems": 3, "maxItems": 4},
]
OBJECTS = [
    obj(a=INTEGER),
    obj(name=STRING, age=integer(0, 150), ok=BOOLEAN),
    *(obj(required, a=INTEGER, b=BOOLEAN, c={"enum": ["x"]}) for required in ("", "a", "b", "c", "a c", "b c", "a b")),
    obj(_open=False, a=STRING, b=NUMBER),
    obj("", _open=False, a=STRING, b=NULL, c=BOOLEAN, d=INTEGER),
    {"properties": {"a": INTEGER}, "required": ["a"], "type": "object", "title": "T", "description": "d"},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "additionalProperties": INTEGER},
    {"type": "object", "additionalProperties": arr(BOOLEAN)},
    obj(
        **{"naïve": STRING, "日本": INTEGER, "😀": BOOLEAN, "a b": NULL, 'q"q': NULL, "back\\slash": INTEGER, "": NULL}
    ),
    obj(a=obj(b=obj(c=obj(d=obj(e=INTEGER))))),
    obj(**{f"p{i}": BOOLEAN for i in range(20)}),
    obj("p3 p7", **{f"p{i}": integer(0, 9) for i in range(10)}),
    obj(
        meta=obj(tags=arr(STRING, 0, 3), score=NUMBER),
        items=arr(obj(id=integer(1, 99), kind={"enum": ["x", "y"]}), 1, 2),
    ),
]
CHOICES = [
    *(
        {"anyOf": list(options)}
        for options in ((STRING, NULL), (INTEGER, BOOLEAN, arr(INTEGER)), (obj(a=NULL), obj(b=NULL)))
    ),
    {"anyOf": [integer(0, 5), integer(3, 9)]},
    {"anyOf": [{"const": 1}, {"enum": ["one", "uno"]}, arr({"const": 1}, 1, 1)]},
    *({"oneOf": list(options)} for options in ((STRING, INTEGER), (NULL, obj(a=STRING)), (arr(STRING), BOOLEAN))),
    {"oneOf": [obj(kind={"const": "cat"}, lives=integer(0, 9)), obj(kind={"const": "dog"}, good=BOOLEAN)]},
    {"oneOf": [obj(t={"enum": ["a", "b"]}), obj(t={"enum": ["c"]}, n=INTEGER), obj(t={"const": "d"}, s=STRING)]},
    {"oneOf": [{"const": 1}, {"const": "1"}, {"enum": [2, "2"]}]},
    {"oneOf": [obj(_open=False, a=INTEGER), obj(_open=False, b=INTEGER)]},
    obj(value={"anyOf": [STRING, NUMBER, NULL]}, unit={"oneOf": [{"const": "m"}, {"const": "s"}]}),
    arr({"anyOf": [INTEGER, arr(INTEGER, 0, 2)]}, 1, 4),
    obj(shape={"oneOf": [obj(type={"const": "circle"}, r=NUMBER), obj(type={"const": "box"}, w=NUMBER, h=NUMBER)]}),
    {"anyOf": [{"anyOf": [NULL, {"anyOf": [BOOLEAN, {"const": "deep"}]}]}, arr(NULL, 1, 2)]},
]
REFERENCES = [
    ref("a") | {"$defs": {"a": INTEGER}},
    obj(x=ref("p"), y=ref("p")) | {"$defs": {"p": obj(v=NUMBER)}},
    {"definitions": {"n": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/definitions/n"}, "maxItems": 3},
    ref("a") | {"$defs": {"a": ref("b"), "b": ref("c"), "c": obj(z=BOOLEAN)}},
    obj(a=STRING, b={"$ref": "#/properties/a"}),
    ref("odd~1name~0x") | {"$defs": {"odd/name~x": arr(NULL, 1, 2)}},
    {"anyOf": [ref("a"), ref("b")], "$defs": {"a": integer(0, 3), "b": {"const": "b"}}},
    obj(home=ref("address"), work=ref("address"))
    | {
        "$defs": {
            "address": obj("street city", street=STRING, city=STRING, zip={"type": "string", "pattern": "^\\d{5}$"})
        }
    },
]
RECURSION = [
    ref("list") | {"$defs": {"list": obj("value", value=INTEGER, next=ref("list"))}},
    ref("tree") | {"$defs": {"tree": obj(label={"enum": ["n"]}, children=arr(ref("tree"), 0, 2))}},
    {"anyOf": [NULL, arr({"$ref": "#"}, 0, 2)]},
    ref("e") | {"$defs": {"e": {"anyOf": [integer(0, 9), obj(op={"enum": ["+", "*"]}, args=arr(ref("e"), 2, 2))]}}},
    ref("a") | {"$defs": {"a": obj("n", n=INTEGER, b=ref("b")), "b": obj("s", s=BOOLEAN, a=ref("a"))}},
    obj(text=STRING, replies=arr({"$ref": "#"}, 0, 2)),
    {"type": "object", "additionalProperties": {"anyOf": [INTEGER, {"$ref": "#"}]}},
    ref("v") | {"$defs": {"v": {"anyOf": [NULL, BOOLEAN, INTEGER, arr(ref("v"), 0, 2), obj(v=ref("v"))]}}},
]
# What only llguidance of the three enforces.
STRICT = [
    *({"type": "number"} | b for b in ({"minimum": 0}, {"minimum": -1.5, "maximum": 2.5}, {"exclusiveMinimum": 0})),
    *({"type": "integer", "multipleOf": m} for m in (3, 10)),
    {"allOf": [integer(3), integer(None, 12)]},
    {"allOf": [obj(a=INTEGER), obj(b=BOOLEAN)]},
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": INTEGER},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    obj(_open=STRING, a=INTEGER),
    {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": integer(0)}},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 2},
]


def _nested(depth: int) -> dict:
    inner: dict = {"enum": ["leaf", depth]}
    for level in range(depth):
        inner = arr(inner, 1, 2) if level % 2 else obj("v" if level % 4 else "", v=inner, w=BOOLEAN)
    return inner


def _record(i: int) -> dict:
    """Records that mix everything, more of it as i grows."""
    parts = [
        ("id", integer(i, i + 37)),
        ("name", {"type": "string", "minLength": 1, "maxLength": 6 + i}),
        ("tags", arr({"enum": [f"t{k}" for k in range(i + 2)]}, i % 2, 3)),
        ("ref", ref("node")),
        ("kind", {"oneOf": [{"const": f"k{i}"}, integer(0, i), NULL]}),
        ("Größe", {"anyOf": [NUMBER, {"const": "unbekannt"}]}),
        ("code", {"type": "string", "pattern": rf"^[A-Z]{{1,{i + 1}}}-\d{{2}}$"}),
        ("matrix", arr(arr(integer(-i, i), 1, 2), 1, 2)),
        ("flags", {"type": "object", "additionalProperties": BOOLEAN}),
    ]
    chosen = dict(parts[: 3 + i % 7])
    required = " ".join(name for k, name in enumerate(chosen) if (k + i) % 3)
    return obj(required, **chosen) | {"$defs": {"node": obj("v", v={"enum": [i, str(i)]}, next=ref("node"))}}


MIXED = [_nested(depth) for depth in range(1, 13)] + [_record(i) for i in range(1, 43)]
SCHEMAS: list[Any] = [
    *(*SCALARS, *LENGTHS, *PATTERNS, *INTEGERS, *ARRAYS, *OBJECTS),
    *(*CHOICES, *REFERENCES, *RECURSION, *STRICT, *MIXED),
]
