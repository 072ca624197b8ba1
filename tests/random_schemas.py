"""JSON Schemas at random, keywords beside one another, and the judge of what comes of them.

`schema(rng)` composes what users write, and what stands beside it: most draws have some value that fits, many have
keywords that meet, some have none that any grammar holds. `judge` is jsonschema by Draft 2020-12, with numbers as they
are written (an integer of any size, a decimal fraction exactly).
"""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote

import jsonschema
import numpy as np
from grammar_driver import BACKENDS

from minivllm.errors import BadRequest
from minivllm.structured.base import Vocabulary, unpack
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.params import StructuredParams

NAMES = ("a", "b", "kind", "level", "x-y", "a/b", "m~n", "p%q", "é", "")
PATTERNS = ("^[a-c]{1,3}$", "^a", "b$", "[0-9]", "^(foo|bar)+$", "^.{2,4}$", "^[^a]*$", '^["\\\\\\\\]{1,2}$', "^$|^x+$")
NAME_PATTERNS = ("^a", "^[a-c]$", "^level$", "^x-", "^p_[0-9]$", "l$", "^(a|b)$")
FORMATS = ("date", "uuid", "ipv4", "date-time", "email", "time")
NUMBERS = (0, 1, -1, 5, 10, 99, 0.5, -2.5, 1.0, 1e3, 0.1, 1e-7, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**53 + 3)
NUMBERS += (-(2**53) - 1, 2**63 - 1, -(2**63), 2**63, 2**64 + 1, 10**19 + 1, 1e300, -1e300, 4.5e15 + 0.5, 5e-324)
STEPS = (1, 2, 3, 5, 7, 10, 0.5, 0.1, 0.25, 1.5, 0.01, 100, 2**53 + 1, 1e10)
VALUES = (
    *NUMBERS[:8],
    2**53 + 1,
    2**64 + 1,
    "a",
    "abc",
    "",
    'é"\\\n',
    "日本",
    None,
    True,
    False,
    [],
    [1, "a"],
    {},
    {"a": 1},
)


# What one keyword may say; `$defs` beside it where it needs some.
SNIPPETS: tuple[dict[str, Any], ...] = (
    *(
        {"type": kind}
        for kind in ("null", "integer", "number", "string", "array", "object", ["string", "array", "null"])
    ),
    *({"enum": values} for values in ([1, "ab", None, [1], {"a": 1}], [2**53 + 1, 0.5, True], [[], {}, ""])),
    *({"const": value} for value in (5, "ab", [1], {"a": "x"}, 1.0)),
    *({"minimum": 3}, {"minimum": 2**53 + 1}, {"maximum": 7.5}, {"maximum": -(2**53) - 1}, {"exclusiveMinimum": 4}),
    *({"exclusiveMaximum": 6}, {"exclusiveMinimum": 0.1}, {"multipleOf": 5}, {"multipleOf": 0.25}),
    *({"minLength": 2}, {"maxLength": 3}, {"maxLength": 0}, {"pattern": "^a"}, {"pattern": "b$"}, {"format": "date"}),
    *(
        {"properties": p}
        for p in ({"a": {"type": "integer"}, "b": {"maxLength": 2}}, {"a": {"minimum": 3}}, {"b": False})
    ),
    *({"required": names} for names in (["a"], ["c"], ["a", "b"])),
    *({"additionalProperties": s} for s in (False, True, {"type": "integer"})),
    *({"patternProperties": p} for p in ({"^a$": {"maximum": 9}}, {"^[bc]$": {"type": "string"}}, {"a|b": {}})),
    *({"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 1}, {"maxProperties": 0}),
    *({"propertyNames": s} for s in ({"enum": ["a", "c"]}, {"pattern": "^[ab]$"}, {"maxLength": 1}, False)),
    *({"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"required": ["c"]}}}),
    *({"items": s} for s in ({"type": "integer"}, {"const": 1}, False)),
    *({"prefixItems": p} for p in ([{"type": "integer"}, {"type": "string"}], [{"enum": [1, 2]}], [True, False])),
    *({"contains": {"const": 1}}, {"minItems": 2}, {"maxItems": 2}, {"uniqueItems": True}, {"uniqueItems": False}),
    *({key: [{"type": "string"}, {"type": "object", "required": ["a"]}]} for key in ("anyOf", "oneOf")),
    *({key: [{"type": "integer"}, {"minimum": 5}]} for key in ("anyOf", "oneOf", "allOf")),
    *({"anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"properties": {"c": {}}, "required": ["c"]}]},),
    *({"allOf": [{"properties": {"c": {"type": "null"}}}, {"required": ["c"]}]}, {"not": {"type": "string"}}),
    *({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"unevaluatedProperties": False}),
    {"$ref": "#/$defs/d", "$defs": {"d": {"type": "object", "properties": {"d": {"type": "null"}}, "required": ["d"]}}},
    {"$ref": "#/$defs/e~1f%25", "$defs": {"e/f%": {"type": ["string", "integer"]}}},
    *({"title": "T", "default": 3}, {"x-order": 1}),
)


class Composer:
    def __init__(self, rng: random.Random):
        self.rng = rng
        self.definitions: dict[str, Any] = {}
        self.open: str | None = None
        self.inside = 0  # objects and arrays

    def root(self) -> Any:
        rng = self.rng
        self.definitions = {}
        for name in rng.sample(NAMES[:-1], rng.choice((0, 0, 1, 2))):
            self.open = name  # which may be referred to inside of its own properties and items
            self.definitions[name] = self.schema(2)
            self.open = None
        found = self.schema(rng.choice((1, 2, 3)))
        if isinstance(found, dict) and self.definitions:
            found["$defs"] = self.definitions
        return found

    def schema(self, depth: int) -> Any:
        rng = self.rng
        if rng.random() < 0.04:
            return rng.choice((True, True, {}, False))
        kinds = [self.scalar, self.scalar, self.values]
        if depth:
            kinds += [self.object, self.object, self.object, self.array, self.choice, self.choice]
        if self.definitions:
            kinds += [self.reference, self.reference]
        if self.inside and rng.random() < 0.05:
            kinds = [self.back]
        found = rng.choice(kinds)(depth)
        while depth and rng.random() < 0.25:  # something more beside it, of the same type or not
            other = rng.choice([*(kind for kind in kinds if kind != self.values), *[self.same] * 6])
            more = other(depth - 1) if other != self.same else self.same(depth - 1, found)
            if rng.random() < 0.3:
                found.setdefault("allOf", []).append(more)
            else:
                found |= {key: value for key, value in more.items() if key not in found}
        if rng.random() < 0.1:
            found |= {"title": "T", "description": "d", "default": 3}
        return found

    def same(self, depth: int, beside: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = (beside or {}).get("type", "object")
        if kind == "object":
            return self.object(depth)
        return self.array(depth) if kind == "array" else self.scalar(depth)

    def number(self) -> int | float:
        return self.rng.choice(NUMBERS) if self.rng.random() < 0.5 else self.rng.randrange(-20, 120)

    def scalar(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choice(("string", "string", "integer", "integer", "number", "boolean", "null", "mixed"))
        found: dict[str, Any] = {"type": kind}
        if kind == "mixed":
            found["type"] = rng.sample(["string", "integer", "number", "null", "boolean"], rng.randint(1, 3))
        if kind in ("string", "mixed"):
            low, high = sorted((rng.randrange(6), rng.randrange(9)))
            found |= self.some(minLength=low, maxLength=high, odds=0.25)
            found |= self.some(pattern=rng.choice(PATTERNS), odds=0.25) | self.some(
                format=rng.choice(FORMATS), odds=0.05
            )
        if kind in ("integer", "number", "mixed"):
            low, high = self.number(), self.number()
            if rng.random() < 0.9:
                low, high = sorted((low, high))
            elif rng.random() < 0.5:
                low = high
            found |= self.some(minimum=low, maximum=high, odds=0.3)
            found |= self.some(exclusiveMinimum=low, exclusiveMaximum=high, odds=0.1)
            found |= self.some(multipleOf=rng.choice(STEPS), odds=0.12)
        if rng.random() < 0.05:
            found.pop("type")
        return found

    def some(self, odds: float = 0.5, **keywords: Any) -> dict[str, Any]:
        return {key: value for key, value in keywords.items() if self.rng.random() < odds}

    def values(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.5:
            return {"const": rng.choice(VALUES)}
        return {"enum": rng.sample(VALUES, rng.randint(1, 5))}

    def object(self, depth: int) -> dict[str, Any]:
        self.inside += 1
        found = self._object(depth)
        self.inside -= 1
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        rng, inner = self.rng, max(depth - 1, 0)
        names = rng.sample(NAMES, rng.randint(0, 4))
        found: dict[str, Any] = {"type": "object"} if rng.random() < 0.95 else {}
        if names or rng.random() < 0.5:
            found["properties"] = {name: self.schema(inner) for name in names}
            found["required"] = [name for name in names if rng.random() < 0.5]
        if rng.random() < 0.1:
            found["required"] = [*found.get("required", []), rng.choice([n for n in NAMES if n not in names])]
        if rng.random() < 0.3:
            found["additionalProperties"] = rng.choice((False, False, True, None)) or self.schema(inner)
        if rng.random() < 0.15:
            patterns = rng.sample(NAME_PATTERNS, rng.randint(1, 2))
            found["patternProperties"] = {pattern: self.schema(inner) for pattern in patterns}
        found |= self.some(minProperties=rng.randrange(3), maxProperties=rng.randrange(1, 5), odds=0.06)
        if rng.random() < 0.06:
            kinds = ({"pattern": rng.choice(NAME_PATTERNS)}, {"maxLength": 3}, {"minLength": 1, "maxLength": 4})
            found["propertyNames"] = rng.choice((*kinds, {"enum": list(NAMES[:4])}))
        if len(names) > 1 and rng.random() < 0.08:
            found["dependentRequired"] = {names[0]: [names[1]]}
        if names and rng.random() < 0.05:
            found["dependentSchemas"] = {names[0]: self.object(inner)}
        return found | self.some(unevaluatedProperties=False, odds=0.02)

    def array(self, depth: int) -> dict[str, Any]:
        self.inside += 1
        found = self._array(depth)
        self.inside -= 1
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        rng, inner = self.rng, max(depth - 1, 0)
        low, high = sorted((rng.randrange(3), rng.randrange(1, 5)))
        found: dict[str, Any] = {"type": "array"} | self.some(minItems=low, maxItems=high, odds=0.4)
        found |= self.some(items=self.schema(inner), odds=0.8)
        if rng.random() < 0.2:
            found["prefixItems"] = [self.schema(inner) for _ in range(rng.randint(1, 3))]
        found |= self.some(uniqueItems=rng.random() < 0.5, odds=0.04)
        return found | self.some(contains=self.schema(inner), odds=0.02)

    def choice(self, depth: int) -> dict[str, Any]:
        rng, inner = self.rng, max(depth - 1, 0)
        key = rng.choice(("anyOf", "anyOf", "oneOf", "allOf", "discriminated", "not", "if"))
        if key == "discriminated":
            kinds = rng.sample(("cat", "dog", "cow"), rng.randint(2, 3))
            alternatives = [self.object(inner) for _ in kinds]
            for kind, alternative in zip(kinds, alternatives, strict=True):
                alternative.setdefault("properties", {})["kind"] = {"const": kind}
                alternative["required"] = list(dict.fromkeys(["kind", *alternative.get("required", ())]))
            return {"oneOf": alternatives}
        if key == "not":
            return self.object(depth) | {"not": self.object(0)} if rng.random() < 0.6 else {"not": self.schema(inner)}
        if key == "if":
            return (
                self.object(depth)
                | {"if": self.object(0), "then": self.object(0)}
                | self.some(**{"else": self.object(0)})
            )
        return {key: [self.schema(inner) for _ in range(rng.randint(1, 3))]}

    def reference(self, depth: int) -> dict[str, Any]:
        return self.to(self.rng.choice(list(self.definitions)))

    def back(self, depth: int) -> dict[str, Any]:
        return {"$ref": "#"} if self.open is None else self.to(self.open)

    def to(self, name: str) -> dict[str, Any]:
        rng = self.rng
        pointer = name.replace("~", "~0").replace("/", "~1")
        if rng.random() < 0.3:
            pointer = "".join(f"%{byte:02X}" for byte in pointer.encode())
        else:
            pointer = pointer.replace("%", "%25")
        return {"$ref": f"#/$defs/{pointer}"}


def schema(rng: random.Random) -> Any:
    return Composer(rng).root()


def _is_integer(checker: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) or isinstance(value, float) and value.is_integer()


def _is_multiple(validator: Any, step: Any, value: Any, schema: Any) -> Any:
    if validator.is_type(value, "number") and (value in (math.inf, -math.inf) or Fraction(value) % Fraction(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
_Judge = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _is_multiple}, type_checker=_TYPES
)


def exact(text: str | bytes) -> Any:
    return json.loads(text, parse_float=_exact_number)


def _exact_number(text: str) -> Decimal | float:
    """What no double is need not be known exactly."""
    return Decimal(text) if 0 < abs(float(text)) < math.inf else float(text)


def judge(schema: Any) -> Any:
    return _Judge(exact(json.dumps(schema)))


# ------------------------------------------------------------------------------------------------------------- drawing

WORDS = ('{"', '":', '", "', "true", "null", "ab", "foo", "12", "00", '"}', "}}", "]}", ", ", '"a"', "kind", "\\u00")
WORDS += ('"\\u0061"', '"a": ', '"b": ', '"level": ', '"\\u006cevel": ', '"a', "\\u0061", "1e", "5", "null, ")
VOCABULARY = Vocabulary((b"", *(bytes([i]) for i in range(256)), *(word.encode() for word in WORDS)), (0,))
_WORDS = np.array([len(token) > 1 for token in VOCABULARY.tokens])
_CLOSING = np.array([token[:1] in (b'"', b"}", b"]", b"e", b"l") for token in VOCABULARY.tokens])
MAX_TOKENS = 160
NUM_GUESSES = 10


class Draw(NamedTuple):
    """What came of one schema and one backend. Of `refused`, `cut`, `fits` and `wrong` the last is a finding."""

    outcome: str
    detail: str = ""


@cache
def compiler(backend: str) -> GrammarCompiler:
    return GrammarCompiler(lambda: VOCABULARY, [(backend, BACKENDS[backend])])


def draw(schema: Any, backend: str, rng: random.Random) -> Draw:
    params = StructuredParams(json=json.dumps(schema), disable_any_whitespace=rng.random() < 0.7)
    try:
        grammar = compiler(backend).choose(params)[2].start()
    except BadRequest as e:
        return _refused(schema, str(e), rng)
    out = b""
    for _ in range(MAX_TOKENS):
        mask = np.empty(VOCABULARY.num_words, np.int32)
        grammar.fill_mask(mask)
        allowed = unpack(mask, len(VOCABULARY))
        if not allowed.any():
            return Draw("wrong", f"nothing is left after {out!r}")
        token = _chosen(allowed, rng)
        if not grammar.accept(token):
            return Draw("wrong", f"token {token} is allowed and not taken after {out!r}")
        if token == 0:
            return _judged(schema, out)
        out += VOCABULARY.tokens[token]
    return Draw("cut", repr(out))


def _refused(schema: Any, why: str, rng: random.Random) -> Draw:
    """By name of a keyword or another reason; that no value fits is true."""
    if "no value fits" in why:
        for _ in range(NUM_GUESSES):
            value = guess(schema, schema, rng)
            if judge(schema).is_valid(exact(json.dumps(value))):
                return Draw("wrong", f"{value!r} fits, and it is refused: {why}")
    return Draw("refused", why)


def guess(schema: Any, root: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value that may fit."""
    if not isinstance(schema, dict) or depth > 6:
        return rng.choice(VALUES)
    if "$ref" in schema:
        name = unquote(schema["$ref"]).removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~")
        if rng.random() < 0.7:
            return guess(root if name == "#" else root["$defs"][name], root, rng, depth + 1)
    parts = [
        schema,
        *(rng.choice(schema[key]) for key in ("anyOf", "oneOf") if key in schema),
        *schema.get("allOf", ()),
    ]
    parts = [part for part in parts if isinstance(part, dict)]
    if values := [value for part in parts for value in part.get("enum", [part["const"]] if "const" in part else [])]:
        return rng.choice(values)
    types = [
        kind
        for part in parts
        for kind in ([part["type"]] if isinstance(part.get("type"), str) else part.get("type", []))
    ]
    kind = rng.choice(types) if types else rng.choice(("object", "array", "string", "integer"))
    if kind == "object":
        inner = {name: s for part in parts for name, s in part.get("properties", {}).items()}
        required = [name for part in parts for name in part.get("required", ())]
        names = dict.fromkeys([*required, *(name for name in inner if rng.random() < 0.3)])
        return {name: guess(inner.get(name), root, rng, depth + 1) for name in names}
    if kind == "array":
        lengths = [part["minItems"] for part in parts if "minItems" in part] + [rng.randrange(3)] * (rng.random() < 0.5)
        items = [part["items"] for part in parts if "items" in part]
        return [guess(rng.choice(items or [True]), root, rng, depth + 1) for _ in range(max(lengths, default=0))]
    if kind in ("integer", "number"):
        bounds = [part[key] for part in parts for key in ("minimum", "maximum") if key in part]
        return rng.choice([*bounds, rng.choice(NUMBERS), rng.randrange(100)])
    return {"null": None, "boolean": True}.get(kind, rng.choice(("a", "ab", "foo", "x", "", "aabb", "1")))


def _chosen(allowed: np.ndarray, rng: random.Random) -> int:
    """Rather what brings it nearer to its end."""
    if allowed[0] and rng.random() < 0.7:
        return 0
    rather = rng.random()
    ids = np.flatnonzero(allowed & (_CLOSING if rather < 0.5 else _WORDS)) if rather < 0.7 else ()
    return int(rng.choice(ids if len(ids) else np.flatnonzero(allowed)))


def _judged(schema: Any, out: bytes) -> Draw:
    try:
        value = exact(out)
        error = next(iter(judge(schema).iter_errors(value)), None)
    except ValueError as e:
        return Draw("wrong", f"{out!r} is no JSON: {e}")
    return Draw("fits", repr(out)) if error is None else Draw("wrong", f"{out!r} does not fit: {error.message[:200]}")
