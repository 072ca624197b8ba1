"""A JSON Schema without recursion as a regular expression over JSON text.

What it knows of what normal.py leaves: type, enum, const, anyOf, $ref; of strings minLength, maxLength, pattern; of
integers their bounds; of arrays items, prefixItems, minItems, maxItems; of objects properties, required,
additionalProperties. Any other keyword is refused by name: a keyword that is not enforced would be a promise broken in
silence. A schema that admits any value is refused too, since values nest without bound.

Properties come in the schema's order. Each may be left out unless it is required.
"""

from __future__ import annotations

import json
from typing import Any

from minivllm.structured import schema as schemas
from minivllm.structured.base import Unsupported
from minivllm.structured.json_text import (
    INTEGER,
    NUMBER,
    QUOTE,
    SPACE,
    STRING_CHAR,
    escaped,
    integers,
    string_tree,
)
from minivllm.structured.normal import Normal, normal
from minivllm.structured.params import StructuredParams
from minivllm.structured.regex import EMPTY, Node, RegexError, Repeat, Seq, alt, chars, literal, optional, seq

MAX_INLINED = 2_000  # subschemas, references written out each time they are used
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {"minimum", "maximum"},
    "number": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set(),
    "null": set(),
}
_WHOLE = ("$ref", "enum", "const", "anyOf")  # each of these says all by itself


def json_tree(params: StructuredParams) -> Node:
    """Raises BadRequest for what is no schema, Unsupported for what is not in this module's list."""
    try:
        found = normal(params.json)
        return _Writer(found, params.disable_any_whitespace).value(found.schema, "#", ())
    except schemas.SchemaError as e:
        raise params.error(f"json: {e}") from None
    except _Refused as e:
        raise Unsupported(f"{params.field}: json: {e}", params.field) from None


class _Refused(ValueError):
    pass


class _Writer:
    def __init__(self, found: Normal, compact: bool):
        self.references, self.places = schemas.References(found.schema), found.places
        self.comma = literal(", ") if compact else seq(SPACE, chars(","), SPACE)
        self.colon = literal(": ") if compact else seq(SPACE, chars(":"), SPACE)
        self.space = EMPTY if compact else SPACE
        self.num_values = 0

    def value(self, schema: schemas.Schema, path: str, inside: tuple[int, ...]) -> Node:
        """inside: the schemas (by id) that this one stands in, references followed."""
        self.num_values += 1
        if self.num_values > MAX_INLINED:
            raise _Refused(f"over {MAX_INLINED:,} subschemas once references are written out")
        if id(schema) in inside:
            raise _Refused(f"{path}: the schema is recursive, which no regular expression is")
        path = self.places.get(id(schema), path)
        keywords = set() if schema is True else schemas.assertions(schema)
        inside = (*inside, id(schema))
        for keyword in _WHOLE:
            if keyword in keywords:
                return self._whole(keyword, schema, path, inside)
        types = () if schema is True else schemas.types_of(schema)
        if not types:
            raise _Refused(f"{path}: any value is allowed, and values nest without bound. Give a type")
        allowed = {"type"}.union(*(_OF_TYPE[name] for name in types))
        if unknown := sorted(keywords - allowed):
            raise _Refused(f"{path}/{unknown[0]} is not supported")
        return alt(*(getattr(self, f"_{name}")(schema, path, inside) for name in types))

    def _whole(self, keyword: str, schema: dict, path: str, inside: tuple[int, ...]) -> Node:
        if keyword == "$ref":
            return self.value(self.references(schema["$ref"]), path, inside)
        if keyword == "anyOf":
            return alt(*(self.value(s, f"{path}/anyOf/{i}", inside) for i, s in enumerate(schema["anyOf"])))
        return alt(*map(self.constant, schema["enum"] if keyword == "enum" else [schema["const"]]))

    def constant(self, value: Any) -> Node:
        if isinstance(value, dict):
            pairs = [seq(self._key(name), self.constant(v)) for name, v in value.items()]
            return self._enclosed("{}", self._joined(pairs))
        if isinstance(value, list):
            return self._enclosed("[]", self._joined([self.constant(v) for v in value]))
        if isinstance(value, str):
            return seq(QUOTE, *(escaped(ord(c)) for c in value), QUOTE)
        return literal(json.dumps(value))

    def _null(self, schema: Any, path: str, inside: tuple) -> Node:
        return literal("null")

    def _boolean(self, schema: Any, path: str, inside: tuple) -> Node:
        return alt(literal("true"), literal("false"))

    def _number(self, schema: Any, path: str, inside: tuple) -> Node:
        return NUMBER

    def _integer(self, schema: dict, path: str, inside: tuple) -> Node:
        low, high = schema.get("minimum"), schema.get("maximum")
        return INTEGER if low is None and high is None else integers(low, high)

    def _string(self, schema: dict, path: str, inside: tuple) -> Node:
        if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
            raise _Refused(f"{path}: minLength and maxLength are not supported beside pattern")
        try:
            return seq(QUOTE, string_tree(schema), QUOTE)
        except RegexError as e:
            raise schemas.SchemaError(f"{path}/pattern: {e}") from None

    def _array(self, schema: dict, path: str, inside: tuple) -> Node:
        prefix, rest = schema.get("prefixItems", ()), schema.get("items", True)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        first = [self.value(s, f"{path}/prefixItems/{i}", inside) for i, s in enumerate(prefix)]
        if rest is False:
            high = len(first) if high is None else min(high, len(first))
        more = None if high is not None and high <= len(first) else self.value(rest, f"{path}/items", inside)
        return self._enclosed("[]", self._items(first[:high], more, low, high))

    def _items(self, first: list[Node], more: Node | None, low: int, high: int | None) -> Node:
        """`first`, each only after those before it, then any number of `more`; low to high of them in all."""
        tail: Node = EMPTY
        num_first = len(first)
        if more is not None:
            left = None if high is None else high - num_first
            if not num_first:
                rest = Repeat(seq(self.comma, more), max(low - 1, 0), None if left is None else left - 1)
                return seq(more, rest) if low else optional(seq(more, rest))
            tail = Repeat(seq(self.comma, more), max(low - num_first, 0), left)
        for i in reversed(range(num_first)):
            item = seq(*((self.comma,) if i else ()), first[i], tail)
            tail = item if i < low else optional(item)
        return tail

    def _object(self, schema: dict, path: str, inside: tuple) -> Node:
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        if properties and others is not False:
            raise _Refused(f"{path}/additionalProperties is not supported beside properties")
        if others is not False:
            name = seq(QUOTE, Repeat(STRING_CHAR, 0, None), QUOTE, self.colon)
            pair = seq(name, self.value(others, f"{path}/additionalProperties", inside))
            return self._enclosed("{}", optional(seq(pair, Repeat(seq(self.comma, pair), 0, None))))
        pairs = [
            (seq(self._key(name), self.value(inner, f"{path}/properties/{name}", inside)), name in required)
            for name, inner in properties.items()
        ]
        return self._enclosed("{}", self._properties(pairs))

    def _properties(self, pairs: list[tuple[Node, bool]]) -> Node:
        """In order, the optional ones there or not; commas between. By which property is the first:"""
        tails: list[Node] = [EMPTY]  # of the properties after each, if some came before
        for pair, is_required in reversed(pairs):
            item = seq(self.comma, pair)
            tails.append(seq(item if is_required else optional(item), tails[-1]))
        tails.reverse()
        starts = []
        for i, (pair, is_required) in enumerate(pairs):
            starts.append(seq(pair, tails[i + 1]))
            if is_required:
                return alt(*starts)
        return alt(*starts, EMPTY)

    def _key(self, name: str) -> Node:
        return seq(self.constant(name), self.colon)

    def _joined(self, items: list[Node]) -> Node:
        return Seq(tuple(part for i, item in enumerate(items) for part in ((self.comma, item) if i else (item,))))

    def _enclosed(self, brackets: str, inner: Node) -> Node:
        return seq(chars(brackets[0]), self.space, inner, self.space, chars(brackets[1]))
