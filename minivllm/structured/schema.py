"""What all backends need to know of a JSON Schema before they read it: is it one, and what does it ask for?

`check` refuses what is no schema, naming the place, so that a misspelt type is an error here and not a grammar that
lets anything through. References (RFC 6901 in a URI's fragment, or an anchor) point into their own document: nothing is
fetched. A keyword that no draft of JSON Schema has is an annotation (2020-12, 6.5), unless it is nearly one that is.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_DEPTH = 64  # subschemas inside subschemas
MAX_COUNT = 10**9 - 1  # of characters, items, properties
MAX_NUMBER = sys.float_info.max
MAX_NAME = 100  # characters of a property's name that a place shows
ANNOTATIONS = frozenset(  # and OpenAI's `strict`, which clients also put inside a schema: each is held to it anyway
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id")
    + ("$comment", "$anchor", "$defs", "definitions", "contentMediaType", "contentEncoding", "contentSchema", "strict")
    + ("$vocabulary", "id")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KEYWORDS = frozenset(  # that say something about an instance, in any draft, or in OpenAPI's
    (*_LISTS, *_SINGLES, *_COUNTS, *_NUMBERS, "type", "enum", "const", "pattern", "format", "required", "uniqueItems")
    + ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies", "minContains")
    + ("maxContains", "$ref", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "nullable")
)
_NEARLY = 0.85  # how alike a misspelt keyword is (difflib)
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # of a list, in a pointer
_NO_ESCAPE = re.compile(r"~(?![01])")
_NO_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
Schema = dict[str, Any] | bool


class SchemaError(ValueError):
    """Not a JSON Schema, or one with a reference that leads nowhere. The message names the place."""


class Place(NamedTuple):
    path: str  # "#/properties/name"
    schema: Schema


def load(text: str) -> tuple[Schema, References]:
    """A schema's text, and what its references lead to. Raises SchemaError for what is no schema."""
    try:
        root = json.loads(text, parse_float=_finite_float, parse_constant=_finite_float)
    except (ValueError, RecursionError) as e:
        raise SchemaError(f"not valid JSON: {e}") from None
    references, starts, places = References(root), [Place("#", root)], {}
    for start in starts:  # grows while it is read: a reference may lead to where no keyword's schema is
        for place in subschemas(start.schema, start.path) if id(start.schema) not in places else ():
            check(place)
            if isinstance(place.schema, dict):
                places.setdefault(id(place.schema), place)
                if place.path != "#" and "$id" in place.schema and _has_references(place.schema):
                    raise SchemaError(f"{place.path}/$id: references inside of a schema with an $id are not supported")
                if "$ref" in place.schema:
                    starts.append(Place(place.schema["$ref"], references(place.schema["$ref"], place.path)))
    _check_reference_chains(places, references)
    return root, references


def _has_references(schema: Schema) -> bool:
    return any(isinstance(place.schema, dict) and "$ref" in place.schema for place in subschemas(schema))


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
            yield from ((f"{key}/{escaped(name)}", inner) for name, inner in value.items())
        elif key in _LISTS and isinstance(value, list) or key == "items" and isinstance(value, list):
            yield from ((f"{key}/{i}", inner) for i, inner in enumerate(value))
        elif key in _SINGLES:
            yield key, value


def check(place: Place) -> None:
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
    needs = schema.get("dependentRequired")
    is_right = isinstance(needs, dict) and all(isinstance(names, list) for names in needs.values())
    expect("dependentRequired", is_right, "an object of lists of names")
    for key in ("$ref", "$anchor", "$id"):
        expect(key, isinstance(schema.get(key), str), "a string")
    expect("uniqueItems", isinstance(schema.get("uniqueItems"), bool), "true or false")
    for key in schema.keys() - KEYWORDS - ANNOTATIONS:
        if nearly := get_close_matches(key[:MAX_NAME], KEYWORDS, 1, _NEARLY):
            raise SchemaError(f"{path}/{escaped(key)} is no keyword. Did you mean {nearly[0]}?")


class References:
    """What the references of one document lead to."""

    def __init__(self, root: Schema):
        self.root = root
        self._found: dict[str, Schema] = {}

    def __call__(self, reference: str, path: str = "#") -> Schema:
        """path: of the schema that holds it. Raises SchemaError."""
        if reference not in self._found:
            try:
                self._found[reference] = self._resolve(reference)
            except _LeadsNowhere as e:
                raise SchemaError(f'{path}/$ref: "{reference[:MAX_NAME]}" {e}') from None
        return self._found[reference]

    def _resolve(self, reference: str) -> Schema:
        document, _, fragment = reference.partition("#")
        own = self.root.get("$id", "") if isinstance(self.root, dict) else ""
        if document and _joined(own, document) != own.partition("#")[0]:
            raise _LeadsNowhere('is not in this document ("#/..."), and nothing is fetched')
        if _NO_PERCENT.search(fragment):
            raise _LeadsNowhere("has a % that begins no escape")
        try:
            pointer = unquote(fragment, errors="strict")
        except UnicodeDecodeError:
            raise _LeadsNowhere("has escapes that are no UTF-8") from None
        if pointer and not pointer.startswith("/"):
            if pointer not in self._anchors:
                raise _LeadsNowhere("leads nowhere: no schema has this $anchor")
            return self._anchors[pointer]
        return self._at(pointer)

    def _at(self, pointer: str) -> Schema:
        """By RFC 6901."""
        if _NO_ESCAPE.search(pointer):
            raise _LeadsNowhere("has a ~ that begins no escape (~0 is ~, ~1 is /)")
        at: Any = self.root
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and _INDEX.fullmatch(part) and int(part) < len(at):
                at = at[int(part)]
            elif isinstance(at, dict) and part in at:
                at = at[part]
            else:
                raise _LeadsNowhere(f"leads nowhere: there is no {json.dumps(part[:MAX_NAME])}")
        if not isinstance(at, dict | bool):
            raise _LeadsNowhere("leads to no schema")
        return at

    @cached_property
    def _anchors(self) -> dict[str, Schema]:
        schemas = (place.schema for place in subschemas(self.root) if isinstance(place.schema, dict))
        return {s["$anchor"]: s for s in schemas if isinstance(s.get("$anchor"), str)}


class _LeadsNowhere(ValueError):
    """The message goes on behind the reference."""


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


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
    return schema.keys() & KEYWORDS


def _check_reference_chains(places: dict[int, Place], references: References) -> None:
    """A schema that is itself, without anything in between, means nothing (and no backend would ever end). Each schema
    is entered once, however many refer to it. places: by the ids of their schemas."""
    entered: set[int] = set()
    for place in places.values():
        chain: dict[int, Iterator[Schema]] = {}  # the schemas that led here, each with where else it leads
        pending = [place.schema]
        while pending:
            schema = pending.pop()
            if id(schema) in chain:
                raise SchemaError(f"{places[id(schema)].path}: a schema that refers to itself and to nothing else")
            if isinstance(schema, dict) and id(schema) not in entered:
                entered.add(id(schema))
                chain[id(schema)] = iter(_direct(schema, references))
            while chain and not pending:
                last = next(reversed(chain))
                if (following := next(chain[last], None)) is None:
                    del chain[last]
                else:
                    pending.append(following)


def _direct(schema: dict[str, Any], references: References) -> list[Schema]:
    """What a value of the schema must be as well, or may be, or is compared with."""
    found = [references(schema["$ref"])] if "$ref" in schema else []
    found += [s for key in ("anyOf", "oneOf", "allOf") for s in schema.get(key, ())]
    found += [schema[key] for key in ("not", "if", "then", "else") if key in schema]
    return found + list(schema.get("dependentSchemas", {}).values())


def is_open(schema: dict[str, Any]) -> bool:
    """Whether an object may have other properties than those that it lists."""
    return schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))


def key_of(value: Any) -> str:
    """Equal for values that JSON Schema holds equal: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def largest(value: Any) -> int:
    """The largest integer of a JSON value, without its sign; 0 if there is none."""
    if isinstance(value, list | dict):
        return max(map(largest, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int) else 0


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def escaped(name: str) -> str:
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
