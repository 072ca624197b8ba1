"""What a schema is not, as alternatives: for `not`, and for `else` behind an `if`.

A value is no instance where one keyword does not hold, so each keyword has alternatives of its own. Together they are
all that it rules out: what has no such alternatives (a pattern, or "a number that is no integer") cannot be said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.structured.schema import Schema, assertions, types_of

TYPES = ("null", "boolean", "number", "string", "array", "object")
ABSENT = "\0absent"  # keywords of our own: names that must not come,
ADDED = "\0added"  # `properties` that close no object to others,
ONLY = "\0only"  # no names but those that all schemas of one place list: its unevaluatedProperties are false
Negate = Callable[[Schema], Schema]
_OPPOSITE = {  # keyword -> the type that it is about, the keyword that says what it rules out
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    **{f"min{what}": (type_, f"max{what}", -1) for what, type_ in (("Length", "string"), ("Items", "array"))},
    **{f"max{what}": (type_, f"min{what}", 1) for what, type_ in (("Length", "string"), ("Items", "array"))},
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_WITHOUT_EFFECT = {"then", "else"}  # where there is no `if`


def negated(schema: Schema, negate: Negate) -> list[Schema] | None:
    """Alternatives, of which each value that is no instance fits one; None: that cannot be said. negate: of schemas
    inside, later."""
    if isinstance(schema, bool):
        return [] if schema else [True]
    found: list[Schema] = []
    for key in schema:
        if key in assertions(schema) - _WITHOUT_EFFECT:
            alternatives = _of_keyword(key, schema, negate)
            if alternatives is None:
                return None
            found += alternatives
    return found


def _of_keyword(key: str, schema: dict[str, Any], negate: Negate) -> list[Schema] | None:
    given = schema[key]
    if key == "type":
        types = types_of(schema)
        if "integer" in types and "number" not in types:
            return None
        others = [name for name in TYPES if name not in types]
        return [{"type": others}] if others else []
    if key in _OPPOSITE:
        type_, opposite, more = _OPPOSITE[key]
        return [{"type": type_, opposite: given + more}] if given + more >= 0 or type_ == "number" else []
    if key == "required":
        return [{"type": "object", ABSENT: [name]} for name in given]
    if key == "properties":
        inner = {name: negate(value) for name, value in given.items()}
        return [{"type": "object", "required": [n], "properties": {n: s}, ADDED: True} for n, s in inner.items()]
    if key == "not":
        return [given]
    if key == "allOf":
        return [negate(inner) for inner in given]
    if key == "anyOf":
        return [{"allOf": [negate(inner) for inner in given]}]
    return None
