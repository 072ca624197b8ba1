"""What all backends need to know of a JSON Schema before they read it: is it one, and what does it ask for?

`check` refuses what is no schema, naming the place, so that a misspelt type is an error here and not a grammar that
lets anything through. `resolve` follows local references. Nothing is fetched: a reference points into its own document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_DEPTH = 64  # subschemas inside subschemas
MAX_COUNT = 10**9 - 1  # of characters, items, properties
MAX_NUMBER = sys.float_info.max
MAX_NAME = 100  # characters of a property's name that a place shows
ANNOTATIONS = frozenset(  # and OpenAI's `strict`, which clients also put inside a schema: each is held to it anyway
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id")
    + ("$comment", "$anchor", "$defs", "definitions", "contentMediaType", "contentEncoding", "strict")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
Schema = dict[str, Any] | bool


class SchemaError(ValueError):
    """Not a JSON Schema, or one with a reference that leads nowhere. The message names the place."""


class Place(NamedTuple):
    path: str  # "#/properties/name"
    schema: Schema


def load(text: str) -> Schema:
    """Raises SchemaError for what is no schema."""
    try:
        schema = json.loads(text, parse_float=_finite_float, parse_constant=_finite_float)
    except (ValueError, RecursionError) as e:
        raise SchemaError(f"not valid JSON: {e}") from None
    places = list(subschemas(schema))
    for place in places:
        check(place, schema)
    _check_reference_chains(places, schema)
    if not _Needs(schema).can_be_met():
        raise SchemaError("#: no value fits, since each would have to hold another one of its kind")
    return schema


def subschemas(schema: Schema, path: str = "#", depth: int = 0) -> Iterator[Place]:
    """This schema and all inside it. A reference is not followed."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"{path[:60]}...: nested over {MAX_DEPTH} deep")
    yield Place(path, schema)
    if not isinstance(schema, dict):
        return
    for key, inner in children(schema):
        yield from subschemas(inner, f"{path}/{key}", depth + 1)


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Schema]]:
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from ((f"{key}/{_escaped(name)}", inner) for name, inner in value.items())
        elif key in _LISTS and isinstance(value, list) or key == "items" and isinstance(value, list):
            yield from ((f"{key}/{i}", inner) for i, inner in enumerate(value))
        elif key in _SINGLES:
            yield key, value


def check(place: Place, root: Schema) -> None:
    """One schema without those inside it. Raises SchemaError."""
    path, schema = place
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(f"{path}: a schema is an object, true or false, not {_shown(schema)}")

    def expect(key: str, right: bool, what: str) -> None:
        if key in schema and not right:
            raise SchemaError(f"{path}/{key} must be {what}, not {_shown(schema[key])}")

    for name in types_of(schema):
        if name not in TYPES:
            raise SchemaError(f"{path}/type: no type {_shown(name)}. Types: {', '.join(TYPES)}")
    for key in _MAPS:
        expect(key, isinstance(schema.get(key), dict), "an object of schemas")
    for key in _LISTS:
        expect(key, isinstance(schema.get(key), list) and bool(schema.get(key)), "a list of schemas")
    for key in _COUNTS:
        expect(key, _is_count(schema.get(key)), f"a count, {MAX_COUNT:,} at most")
    for key in _NUMBERS:
        expect(key, _is_number(schema.get(key)), "a number that a double can be")
    expect("enum", isinstance(schema.get("enum"), list) and bool(schema.get("enum")), "a list of values")
    expect("pattern", isinstance(schema.get("pattern"), str), "a string")
    expect("format", isinstance(schema.get("format"), str), "a string")
    required = schema.get("required")
    expect("required", isinstance(required, list) and all(isinstance(r, str) for r in required), "a list of names")
    expect("$ref", isinstance(schema.get("$ref"), str), "a string")
    if "$ref" in schema:
        resolve(schema["$ref"], root, path)


def resolve(reference: str, root: Schema, path: str = "#") -> Schema:
    """What a local reference points to."""
    if reference != "#" and not reference.startswith("#/"):
        raise SchemaError(f'{path}/$ref: "{reference}" is not in this document ("#/..."), and nothing is fetched')
    at: Any = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~").replace("%25", "%")
        if isinstance(at, list) and part.isdecimal() and int(part) < len(at):
            at = at[int(part)]
        elif isinstance(at, dict) and part in at:
            at = at[part]
        else:
            raise SchemaError(f'{path}/$ref: "{reference}" leads nowhere')
    if not isinstance(at, dict | bool):
        raise SchemaError(f'{path}/$ref: "{reference}" leads to no schema')
    return at


def types_of(schema: dict[str, Any]) -> tuple[Any, ...]:
    """The types that `type` names; () if it is not there."""
    types = schema.get("type", ())
    return tuple(types) if isinstance(types, list | tuple) else (types,)


def type_of(value: Any) -> str:
    """Of a JSON value; a whole number is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or isinstance(value, float) and value.is_integer():
        return "integer"
    return {float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def fits_types(value: Any, types: tuple[str, ...]) -> bool:
    """Whether `type` admits a value; () admits all."""
    found = type_of(value)
    return not types or found in types or (found == "integer" and "number" in types)


def assertions(schema: dict[str, Any]) -> set[str]:
    """The keywords that say something about an instance."""
    return set(schema) - ANNOTATIONS


def _check_reference_chains(places: list[Place], root: Schema) -> None:
    """A schema that is itself, without anything in between, means nothing (and no backend would ever end). Each schema
    is entered once, however many refer to it."""
    paths = {id(place.schema): place.path for place in reversed(places) if isinstance(place.schema, dict)}
    entered: set[int] = set()
    for place in places:
        chain: dict[int, Iterator[Schema]] = {}  # the schemas that led here, each with where else it leads
        pending = [place.schema]
        while pending:
            schema = pending.pop()
            if id(schema) in chain:
                raise SchemaError(f"{paths.get(id(schema), '#')}: a schema that refers to itself and to nothing else")
            if isinstance(schema, dict) and id(schema) not in entered:
                entered.add(id(schema))
                chain[id(schema)] = iter(_direct(schema, root))
            while chain and not pending:
                last = next(reversed(chain))
                if (following := next(chain[last], None)) is None:
                    del chain[last]
                else:
                    pending.append(following)


def _direct(schema: dict[str, Any], root: Schema) -> list[Schema]:
    """What a value of the schema must be as well, or may be."""
    found = [resolve(schema["$ref"], root)] if "$ref" in schema else []
    return found + [s for key in ("anyOf", "oneOf", "allOf") for s in schema.get(key, ())]


class _Needs:
    """Whether some value of finite size fits a schema. Only recursion is looked at: what a schema needs, its required
    properties and its first items, must lead out of it.

    Each schema has conditions, each met by any of some schemas. One whose conditions are all met is finite, and meets
    those of others: as many steps as there are conditions (unit resolution of Horn clauses, Dowling and Gallier 1984).
    """

    def __init__(self, root: Schema):
        self.root = root

    def can_be_met(self) -> bool:
        unmet: dict[int, int] = {}  # schema (by id) -> how many of its conditions are not met
        meets: dict[int, list[tuple[int, int]]] = {}  # schema -> (whose, which) conditions it meets
        pending, finite = [self.root], []
        while pending:
            schema = pending.pop()
            if id(schema) in unmet:
                continue
            conditions = self._conditions(schema)
            unmet[id(schema)] = len(conditions)
            if not conditions:
                finite.append(id(schema))
            for which, others in enumerate(conditions):
                for other in others:
                    meets.setdefault(id(other), []).append((id(schema), which))
                pending += others
        met: set[tuple[int, int]] = set()
        for found in finite:  # grows while it is read
            for condition in meets.get(found, ()):
                if condition not in met:
                    met.add(condition)
                    unmet[condition[0]] -= 1
                    if not unmet[condition[0]]:
                        finite.append(condition[0])
        return not unmet[id(self.root)]

    def _conditions(self, schema: Schema) -> list[list[Schema]]:
        if not isinstance(schema, dict):
            return []
        return [[need] for need in self._needs(schema)] + [schema[key] for key in ("anyOf", "oneOf") if key in schema]

    def _needs(self, schema: dict[str, Any]) -> list[Schema]:
        needs = [resolve(schema["$ref"], self.root)] if "$ref" in schema else []
        needs += schema.get("allOf", [])
        types = types_of(schema) or [t for t, key in (("object", "properties"), ("array", "items")) if key in schema]
        if tuple(types) == ("object",):
            properties = schema.get("properties", {})
            needs += [properties[name] for name in schema.get("required", ()) if name in properties]
        if tuple(types) == ("array",) and schema.get("minItems"):
            first = schema.get("prefixItems", [])[: int(schema["minItems"])]
            needs += first
            if len(first) < schema["minItems"] and isinstance(schema.get("items"), dict):
                needs.append(schema["items"])
        return needs


def _escaped(name: str) -> str:
    """As part of a place. A long name would stand in the place of each schema inside."""
    return (name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}...").replace("~", "~0").replace("/", "~1")


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and -MAX_NUMBER <= value <= MAX_NUMBER


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MAX_COUNT and value == int(value)


def _finite_float(text: str) -> float:
    """What JSON's grammar or a double's range lacks (NaN, Infinity, 1e400) would be a number that is none."""
    value = float(text)
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError(f"{text[:40]} is no number that a double can be")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."
