"""StructuredParams: what a request's output must look like. Data only; what it means is decided by the backends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from minivllm.errors import BadRequest

# Characters. A specification over its limit is refused before anything looks at it.
MAX_CHARS = {"json": 131_072, "regex": 16_384, "choice": 131_072, "grammar": 65_536}
KINDS = ("json", "json_object", "regex", "choice", "grammar")
DEFAULT_FIELD = "structured"
# Characters in a row between two parts of JSON text: a new line and some indentation. Without a bound a model may fill
# its answer with blank lines up to max_tokens, and small ones do.
MAX_WHITESPACE = 8

Pattern = tuple[str | int, ...]  # texts and ids of tokens without bytes, one after the other


class Prelude(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What comes before the output that is held to something: free text up to one of the `endings` (prelude.py).

    openings: it is there only if the output begins with one of these texts or special tokens; none: always.
    endings: the first is forced when max_tokens have come, after as much of `farewell` as has not come just now.
    leavings: what makes all that follows free, without an ending. before: what stands in front of the output.
    """

    openings: tuple[str | int, ...] = ()
    endings: tuple[Pattern, ...]
    leavings: tuple[Pattern, ...] = ()
    farewell: Pattern = ()
    before: Pattern = ()
    max_tokens: int | None = None  # None: as many as there are


class Spelled(msgspec.Struct, frozen=True, tag="spelled", array_like=True):
    """One of these: texts and special tokens."""

    ways: tuple[Pattern, ...]


class Instance(msgspec.Struct, frozen=True, tag="instance", array_like=True):
    """An object or array of JSON, in one line, by a JSON Schema's text, or by a looser one that is easier to hold."""

    schema: str
    looser: str


class Again(msgspec.Struct, frozen=True, tag="again", array_like=True):
    """Back to part `to` of any form, once one of these has come; or on."""

    ways: tuple[Pattern, ...]
    to: int


Form = tuple[Spelled | Instance | Again, ...]  # parts in a row


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes its tool calls (calls.py)."""

    forms: tuple[Form, ...]


class StructuredParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, weakref=True
):
    """Exactly one of five kinds, or none behind a prelude. Names follow vLLM's StructuredOutputsParams.

    json: a JSON Schema, as an object (true is the schema of any value) or as its text; the output is an instance.
        Properties come in the schema's order. An object that lists `properties` has no others, unless its
        additionalProperties says so.
    json_object: any JSON object.
    regex: the output matches it from beginning to end. `\\d`, `\\w`, `\\s` are ASCII; no look-around, no
        back-references.
    choice: one of these texts.
    grammar: EBNF in llama.cpp's notation (GBNF), starting at the rule `root`; with llguidance also Lark, from `start`.

    disable_any_whitespace: JSON on one line, written as Python's json.dumps does. Otherwise white space is free, up to
        MAX_WHITESPACE in a row.
    escapes: texts, or ids of special tokens, that the output may begin with instead; what follows is free (escape.py).
        A server's, for tool calls beside an answer that is held to something, in formats that have no `calls`.
    calls: tool calls that the output may be instead. A server's, likewise, for formats of JSON.
    prelude: what comes before all that. A server's, for models that think before they answer.
    field: the request's field that all this came from; error messages name it. It makes no difference otherwise.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    escapes: tuple[str | int, ...] = ()
    calls: Calls | None = None
    prelude: Prelude | None = None
    field: str = DEFAULT_FIELD

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False) or self._is_false_schema(kind)]
        if not given and self.prelude is not None:
            return
        if len(given) != 1:
            found = f"got {', '.join(given)}" if given else "got none"
            raise self.error(f"give exactly one of {', '.join(KINDS)}; {found}")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise self.error(f"disable_any_whitespace is for JSON, not for {given[0]}")
        self._normalise(given[0])

    def _is_false_schema(self, kind: str) -> bool:
        return kind == "json" and self.json is False

    def _normalise(self, kind: str) -> None:
        """Everything hashable, so that equal specifications find one compiled grammar."""
        value = getattr(self, kind)
        if kind == "json" and not isinstance(value, str):
            if not isinstance(value, dict | bool):
                raise self.error(f"json must be a JSON Schema (an object, or its text), got {type(value).__name__}")
            try:
                value = msgspec.json.encode(value).decode()
            except (TypeError, ValueError, RecursionError) as e:
                raise self.error(f"json is not a JSON Schema: {e}") from None
        elif kind == "choice":
            if isinstance(value, str) or not all(isinstance(text, str) and text for text in value) or not value:
                raise self.error("choice must be a list of non-empty strings")
            value = tuple(dict.fromkeys(value))
        elif kind != "json_object" and (not isinstance(value, str) or not value):
            raise self.error(f"{kind} must be a non-empty string, got {value!r}")
        if kind == "json_object":
            return
        size = sum(map(len, value)) if kind == "choice" else len(value)
        if size > MAX_CHARS[kind]:
            raise self.error(f"{kind} has {size:,} characters, more than the {MAX_CHARS[kind]:,} that are taken")
        msgspec.structs.force_setattr(self, kind, value)

    @property
    def kind(self) -> str | None:
        """None: what follows the prelude is free."""
        return next((kind for kind in KINDS if getattr(self, kind) not in (None, False)), None)

    @property
    def value(self) -> Any:
        """The schema's text, the expression, the tuple of choices, the grammar's text; True for json_object."""
        return self.kind and getattr(self, self.kind)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal keys: the same language."""
        return self.kind, self.value, self.disable_any_whitespace, self.escapes, self.calls, self.prelude

    def no_text(self) -> BadRequest:
        """What a UnicodeEncodeError means here."""
        return self.error(f"{self.kind} holds half of a surrogate pair, which no text has")

    def error(self, message: str) -> BadRequest:
        """To be raised, with the request's own name for the field."""
        return BadRequest(f"{self.field}: {message}", self.field)
