"""Whether the alternatives of a oneOf exclude each other, as far as it can be seen.

oneOf asks that exactly one alternative fits. A grammar writes a value by one alternative and does not look at the
others, so it keeps the promise only if no value fits two. That is seen here from types, from constants, and from a
property that all alternatives require with different constants (a discriminator). What is not seen counts as
overlapping: backends then refuse the schema by name, and anyOf remains.

References let a few kilobytes name the same two schemas in 12^7 ways: each pair is compared once at each depth. That
is polynomial, and the work of a document has a limit besides.
"""

from __future__ import annotations

from itertools import chain, combinations, product
from typing import Any

from minivllm.structured.schema import TYPES, References, Schema, SchemaError, fits_types, key_of, types_of

MAX_DEPTH = 8  # of properties inside properties, and of references
MAX_WORK = 200_000  # comparisons of two schemas, and values looked at, in one document: about a second


class Alternatives:
    """Of one document. Nothing of it may change meanwhile: schemas are known by their ids."""

    def __init__(self, references: References):
        self.references = references
        self.work = 0
        self._found: dict[int, tuple[list[Schema], tuple[int, int] | None]] = {}  # by a oneOf, which is kept alive
        self._disjoint_pairs: dict[tuple[int, int, int], bool] = {}  # by two schemas and the depth that is left
        self._keys: dict[int, frozenset[str] | None] = {}  # of the values of a schema
        self._required: dict[int, frozenset[str]] = {}

    def overlapping(self, alternatives: list[Schema]) -> tuple[int, int] | None:
        """Two alternatives that may both fit some value, by their numbers. Raises SchemaError beyond MAX_WORK."""
        if id(alternatives) not in self._found:
            self._found[id(alternatives)] = alternatives, self._first_pair(alternatives)
        return self._found[id(alternatives)][1]

    def _first_pair(self, alternatives: list[Schema]) -> tuple[int, int] | None:
        constants: dict[str, int] = {}  # value -> the alternative that it is of: thousands of constants are no pairs
        others = []
        for i, alternative in enumerate(alternatives):
            followed = self._follow(alternative, MAX_DEPTH)
            keys = self._keys_of(followed) if _is_plain(followed) else None
            if keys is None:
                others.append(i)
            elif twice := constants.keys() & keys:
                return constants[min(twice)], i
            else:
                constants |= dict.fromkeys(keys, i)
        plain = sorted(set(constants.values()))
        pairs = chain(combinations(others, 2), product(others, plain))
        return next((tuple(sorted(pair)) for pair in pairs if not self._excluded(alternatives, *pair)), None)

    def _excluded(self, alternatives: list[Schema], i: int, j: int) -> bool:
        return self._disjoint(alternatives[i], alternatives[j], MAX_DEPTH)

    def _disjoint(self, a: Schema, b: Schema, depth: int) -> bool:
        pair = id(a), id(b), depth
        if pair not in self._disjoint_pairs:
            self._disjoint_pairs[pair] = self._compare(a, b, depth)
        return self._disjoint_pairs[pair]

    def _compare(self, a: Schema, b: Schema, depth: int) -> bool:
        self._spend(1)
        if a is False or b is False:
            return True
        if a is True or b is True or not depth:
            return False
        parts_a, parts_b = self._parts(a, depth), self._parts(b, depth)
        self._spend(len(parts_a) * len(parts_b))
        if any(self._apart(one, other) for one in parts_a for other in parts_b):
            return True
        for parts, whole in ((parts_a, b), (parts_b, a)):
            choices = (part[key] for part in parts for key in ("anyOf", "oneOf") if key in part)
            if any(all(self._disjoint(inner, whole, depth - 1) for inner in choice) for choice in choices):
                return True
        types = set.intersection(*map(_types, (*parts_a, *parts_b)))
        return not types or types == {"object"} and self._told_apart(parts_a, parts_b, depth)

    def _apart(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        """By their own types and values."""
        if not (_types(a) & _types(b)):
            return True
        keys_a, keys_b = self._keys_of(a), self._keys_of(b)
        if keys_a is not None and keys_b is not None:
            self._spend(min(len(keys_a), len(keys_b)))
            return not (keys_a & keys_b)
        for one, other in ((a, b), (b, a)):
            if (values := _values(one)) is not None:
                self._spend(len(values))
                if not any(fits_types(v, types_of(other)) for v in values):
                    return True
        return False

    def _told_apart(self, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int) -> bool:
        """A property that both require and that no value fits for both; or one requires what the other forbids."""
        required_a, required_b = (frozenset().union(*map(self._required_of, parts)) for parts in (a, b))
        self._spend(len(required_a) + len(required_b))
        for name in required_a & required_b:
            in_a, in_b = ([p["properties"][name] for p in parts if name in p.get("properties", ())] for parts in (a, b))
            if any(self._disjoint(one, other, depth - 1) for one in in_a for other in in_b):
                return True
        return any(_forbids(part, required) for parts, required in ((a, required_b), (b, required_a)) for part in parts)

    def _parts(self, schema: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """What must hold for its values, each by its own keywords."""
        found, pending = [], [(schema, depth)]
        for part, left in pending:  # grows while it is read
            if isinstance(part, dict):
                found.append(part)
                inner = [self.references(part["$ref"])] if "$ref" in part else []
                pending += [(s, left - 1) for s in (*inner, *part.get("allOf", ())) if left]
                self._spend(1)
        return found

    def _follow(self, schema: Schema, depth: int) -> Schema:
        for _ in range(depth):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.references(schema["$ref"])
        return True if isinstance(schema, dict) and "$ref" in schema else schema

    def _keys_of(self, schema: dict[str, Any]) -> frozenset[str] | None:
        if id(schema) not in self._keys:
            values = _values(schema)
            self._keys[id(schema)] = None if values is None else frozenset(map(key_of, values))
        return self._keys[id(schema)]

    def _required_of(self, schema: dict[str, Any]) -> frozenset[str]:
        if id(schema) not in self._required:
            self._required[id(schema)] = frozenset(schema.get("required", ()))
        return self._required[id(schema)]

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise SchemaError(f"whether the alternatives of oneOf overlap takes over {MAX_WORK:,} steps: use anyOf")


def _forbids(schema: dict[str, Any], names: frozenset[str]) -> bool:
    closes = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return closes and bool(names - schema.get("properties", {}).keys())


def _is_plain(schema: Schema) -> bool:
    """Its values say all."""
    return isinstance(schema, dict) and _values(schema) is not None and not {"anyOf", "oneOf", "type"} & schema.keys()


def _types(schema: dict[str, Any]) -> set[str]:
    """All types that a value of the schema may have; a number that is whole is an integer too."""
    found = set(types_of(schema)) or set(TYPES)
    return found | {"integer"} if "number" in found else found


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")
