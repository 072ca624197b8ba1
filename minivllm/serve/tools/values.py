"""Arguments that a format writes as plain text or as Python, as the JSON that their schema asks for.

The type is the schema's: `5` is a number for an integer and a text for a string. Where it allows a string and other
types, what reads as one of the others is that one; where it says nothing, what reads as JSON is JSON. A value that fits
no type that is allowed stays a string, as in vLLM: whoever is called can say what is wrong with it.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minivllm.serve.tools.json_reader import not_json
from minivllm.structured.schema import References, SchemaError

Schema = Mapping[str, Any]
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
TYPES |= {type(None): "null", tuple: "array"}


def types_of(schema: Schema, key: str) -> frozenset[str]:
    """What JSON Schema allows one parameter to be. Empty: anything, as far as is known."""
    properties = schema.get("properties")
    todo = [properties.get(key)] if isinstance(properties, Mapping) else []
    found: set[str] = set()
    followed: set[str] = set()  # references, which may go round in circles
    while todo:
        one = todo.pop()
        if not isinstance(one, Mapping):
            continue
        found.update(said(one))
        for keyword in ("anyOf", "oneOf", "allOf"):
            todo += listed(one.get(keyword))
        if isinstance(reference := one.get("$ref"), str) and reference not in followed:
            followed.add(reference)
            todo.append(referred(reference, schema))
    return frozenset(found)


def said(schema: Schema) -> list[str]:
    if "type" in schema:
        return [kind for kind in listed(schema["type"], schema["type"]) if isinstance(kind, str)]
    literals = [schema["const"]] if "const" in schema else listed(schema.get("enum"))
    return [TYPES[type(value)] for value in literals]


def listed(value: Any, *otherwise: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else otherwise


def referred(reference: str, root: Schema) -> Any:
    try:
        return References(dict(root))(reference)
    except SchemaError:
        return None


def fits(value: Any, types: frozenset[str]) -> bool:
    """types: not empty."""
    kind = TYPES.get(type(value))
    if kind == "number" and value.is_integer():
        return "number" in types or "integer" in types
    return kind in types or (kind == "integer" and "number" in types)


def json_of(value: Any) -> str:
    """Raises ValueError for what JSON has not."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair could not be sent
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return text


def from_text(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that stands there as a template writes it: a string as it is, all else as JSON or Python."""
    for read in (from_json, literal) if types else (from_json,):
        try:
            value = read(text)
            if not types or (not isinstance(value, str) and fits(value, types)):
                return json_of(value)
        except ValueError:
            continue
    return json_of(text)


def from_python(text: str, types: frozenset[str]) -> str:
    """The JSON of a literal. One in quotes may yet be meant as another type. Raises ValueError if it is no literal."""
    try:
        value = literal(text)
    except ValueError:
        value = from_json(text)  # true, false and null
    other = isinstance(value, str) and types and "string" not in types
    return from_text(value, types) if other else json_of(value)


def from_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=not_json)
    except RecursionError:
        raise ValueError("too deep") from None


def literal(text: str) -> Any:
    """Raises ValueError."""
    try:
        with warnings.catch_warnings():  # an escape that Python has not, as in "\\d"
            warnings.simplefilter("ignore")
            return ast.literal_eval(text.strip())
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


class Value:
    """One value in plain text, as it comes. A string is told as it comes, too, any other value in the end.

    frame: what a template writes before and after it, once each, such as a line end.
    """

    def __init__(self, types: frozenset[str], tell: Callable[[str], None], frame: str = ""):
        self.types, self.tell, self.frame = types, tell, frame
        self.streams = types == {"string"}
        self.held, self.at_start = "", True
        self.pieces: list[str] = []
        if self.streams:
            tell('"')

    def add(self, text: str) -> None:
        if not self.streams:
            self.pieces.append(text)
            return
        if self.at_start:
            text = text.removeprefix(self.frame)
            self.at_start = False
        text = self.held + text
        shown = text.removesuffix(self.frame) if self.frame else text
        self.held = text[len(shown) :]
        if shown:
            self.tell(json.dumps(shown, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        if self.streams:
            self.tell('"')
        else:
            text = "".join(self.pieces).removeprefix(self.frame).removesuffix(self.frame)
            self.tell(from_text(text, self.types))
