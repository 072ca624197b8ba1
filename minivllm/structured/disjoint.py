"""Whether the alternatives of a oneOf exclude each other, as far as it can be seen.

oneOf asks that exactly one alternative fits. A grammar writes a value by one alternative and does not look at the
others, so it keeps the promise only if no value fits two. That is seen here from types, from constants, and from a
property that all alternatives require with different constants (a discriminator). What is not seen counts as
overlapping: backends then refuse the schema by name, and anyOf remains.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from minivllm.structured.schema import TYPES, Schema, fits_types, resolve, types_of

MAX_DEPTH = 8  # of properties inside properties, and of references


def overlapping(alternatives: list[Schema], root: Schema) -> tuple[int, int] | None:
    """Two alternatives that may both fit some value, by their numbers."""
    for (i, a), (j, b) in combinations(enumerate(alternatives), 2):
        if not _disjoint(a, b, root, MAX_DEPTH):
            return i, j
    return None


def _disjoint(a: Schema, b: Schema, root: Schema, depth: int) -> bool:
    a, b = (_follow(s, root, depth) for s in (a, b))
    if a is False or b is False:
        return True
    if a is True or b is True or not depth:
        return False
    if not (_types(a) & _types(b)):
        return True
    for one, other in ((a, b), (b, a)):
        for key in ("anyOf", "oneOf"):
            if key in one:
                return all(_disjoint(inner, other, root, depth - 1) for inner in one[key])
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not ({_key(v) for v in values_a} & {_key(v) for v in values_b})
    for values, other in ((values_a, b), (values_b, a)):
        if values is not None and not any(fits_types(v, types_of(other)) for v in values):
            return True
    if _types(a) & _types(b) == {"object"}:
        return _told_apart(a, b, root, depth)
    return False


def _told_apart(a: dict[str, Any], b: dict[str, Any], root: Schema, depth: int) -> bool:
    """A property that both require and that no value fits for both; or one requires what the other forbids."""
    in_a, in_b = a.get("properties", {}), b.get("properties", {})
    required_a, required_b = set(a.get("required", ())), set(b.get("required", ()))
    for name in required_a & required_b & set(in_a) & set(in_b):
        if _disjoint(in_a[name], in_b[name], root, depth - 1):
            return True
    forbids_a, forbids_b = (s.get("additionalProperties") is False and "patternProperties" not in s for s in (a, b))
    return bool(forbids_b and required_a - set(in_b) or forbids_a and required_b - set(in_a))


def _follow(schema: Schema, root: Schema, depth: int) -> Schema:
    for _ in range(depth):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = resolve(schema["$ref"], root)
    return True if isinstance(schema, dict) and "$ref" in schema else schema


def _types(schema: dict[str, Any]) -> set[str]:
    """All types that a value of the schema may have; a number that is whole is an integer too."""
    found = set(types_of(schema)) or set(TYPES)
    return found | {"integer"} if "number" in found else found


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _key(value: Any) -> str:
    """Equal for values that JSON Schema holds equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
