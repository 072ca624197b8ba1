"""XGrammar (Dong et al., 2024): pushdown automata whose masks are mostly found when the grammar is compiled.

XGrammar reads a JSON Schema leniently: a keyword that it does not know, or not in this combination, it drops. So a
schema is checked first against what it is known to enforce (the tests draw texts from 200 schemas and validate them),
and anything else is Unsupported, which hands it to the next backend.
"""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

import numpy as np

from minivllm.structured import schema as schemas
from minivllm.structured.base import Unsupported, Vocabulary, read_grammar, read_regex
from minivllm.structured.json_text import plain, string_tree
from minivllm.structured.normal import Normal, normal
from minivllm.structured.params import MAX_WHITESPACE, StructuredParams
from minivllm.structured.regex import RegexError, parse_search, render, size

# Characters of an expression once its counted repetitions are written out. XGrammar counts rather than writes them out,
# but has no limit of its own.
MAX_ATOMS = 1_000_000
MAX_BYTES = 32 << 20  # of a compiled grammar; one of a schema with a hundred objects has 2 MB
TOO_MANY = f"its counted repetitions stand for over {MAX_ATOMS:,} characters"

_OF_TYPE = {
    "string": {"pattern", "minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "number": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set(),
    "null": set(),
}
MAX_INTEGER = 2**63 - 1  # of a bound
_CLOSING = ("/additionalProperties", "/items")  # where false says that there is nothing more
_WHOLE = ("$ref", "enum", "const", "anyOf")


class XGrammarBackend:
    requires: ClassVar[str | None] = "xgrammar"

    def __init__(self, vocabulary: Vocabulary):
        import xgrammar

        self.vocabulary = vocabulary
        info = xgrammar.TokenizerInfo(  # a token without bytes counts as special: it is never allowed
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary),
            stop_token_ids=list(vocabulary.eos_ids),
        )
        threads = min(4, os.cpu_count() or 1)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)

    def translate(self, params: StructuredParams) -> bytes:
        """A schema, an expression, or a grammar in its EBNF."""
        if params.kind == "json":
            return json.dumps(read_schema(params)).encode()
        if params.kind == "json_object":
            return b'{"type":"object"}'
        if params.kind == "regex":
            node = read_regex(params)
            if size(node) > MAX_ATOMS:
                raise Unsupported(f"{params.field}: regex: {TOO_MANY}", params.field)
            return render(node).encode()
        if params.kind == "choice":
            return ("root ::= " + " | ".join(map(_quoted, params.choice))).encode()
        return read_grammar(params).encode()

    def build(self, params: StructuredParams, source: bytes) -> CompiledXGrammar:
        try:
            compiled = CompiledXGrammar(self._compiled(params, source.decode()), self.vocabulary)
        except (RuntimeError, ValueError) as e:  # its message ends with the reason, after the place in its source
            reason = str(e).strip().splitlines()[-1].rpartition("] ")[2]
            raise Unsupported(f"{params.field}: {params.kind}: {reason}", params.field) from None
        if (size := compiled.num_bytes) > MAX_BYTES:
            what = f"it becomes {size / 2**20:.0f} MiB, and {MAX_BYTES >> 20} is the most"
            raise Unsupported(f"{params.field}: {params.kind}: {what}", params.field)
        return compiled

    def _compiled(self, params: StructuredParams, source: str) -> Any:
        if params.kind in ("json", "json_object"):
            free = not params.disable_any_whitespace
            space = {"any_whitespace": free, "max_whitespace_cnt": MAX_WHITESPACE if free else None}
            return self._compiler.compile_json_schema(source, strict_mode=params.kind == "json", **space)
        if params.kind == "regex":
            return self._compiler.compile_regex(source)
        return self._compiler.compile_grammar(source)


class CompiledXGrammar:
    def __init__(self, compiled: Any, vocabulary: Vocabulary):
        self.compiled = compiled
        self.num_bytes: int = compiled.memory_size_bytes
        self.vocabulary = vocabulary

    def start(self) -> XGrammar:
        import xgrammar

        return XGrammar(xgrammar.GrammarMatcher(self.compiled), self.vocabulary)


class XGrammar:
    def __init__(self, matcher: Any, vocabulary: Vocabulary):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._after_end = 0  # end-of-sequence tokens accepted once it had terminated

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        if self._matcher.is_terminated():
            if token not in self._vocabulary.eos_ids:
                return False
            self._after_end += 1
            return True
        return self._matcher.accept_token(token)

    def rollback(self, num_tokens: int) -> None:
        spare = min(num_tokens, self._after_end)
        self._after_end -= spare
        if num_tokens > spare:
            self._matcher.rollback(num_tokens - spare)

    def fill_mask(self, out: np.ndarray) -> None:
        if self._matcher.is_terminated():
            out[:] = self._vocabulary.eos_mask
        else:
            self._matcher.fill_next_token_bitmask(out[None])


class _Unenforced(ValueError):
    """What XGrammar would let through; the message begins with the place."""


def read_schema(params: StructuredParams) -> schemas.Schema:
    """As XGrammar enforces it. Raises BadRequest for what is no schema, Unsupported for what it would let through."""
    try:
        found = normal(params.json)
        for place in found.subschemas():
            closes = place.schema is False and place.path.endswith(_CLOSING)
            if not closes and (why := _unenforced(place.schema)):
                raise _Unenforced(f"{place.path}{why}")
        return _rewritten(found)
    except _Unenforced as e:
        raise Unsupported(f"{params.field}: json: {e}", params.field) from None
    except schemas.SchemaError as e:
        raise params.error(f"json: {e}") from None


def _unenforced(schema: schemas.Schema) -> str:
    """The rest of a message that begins with the schema's place, or ""."""
    if isinstance(schema, bool):
        return ": no value fits false" if schema is False else ""
    keywords = schemas.assertions(schema)
    if schemas.largest([schema.get("enum"), schema.get("const")]) > MAX_INTEGER:
        return f": an enumerated integer beyond {MAX_INTEGER:,} is not enforced"
    if unknown := sorted(keywords - {"type"}.union(_WHOLE, *_OF_TYPE.values())):
        return f"/{unknown[0]} is not enforced"
    if schema.get("type") == "number" and (bounds := sorted(keywords - {"type"})):
        return f"/{bounds[0]} is not enforced on numbers, only on integers"
    if "pattern" in keywords and keywords & {"minLength", "maxLength"}:
        return "/pattern is not enforced beside minLength and maxLength"
    if schema.get("type") == "integer" and any(abs(schema[key]) > MAX_INTEGER for key in keywords - {"type"}):
        return f": a bound beyond {MAX_INTEGER:,} is not enforced"
    if schema.get("properties") and schema.get("additionalProperties") is not False:
        return "/additionalProperties is not enforced beside properties (a name could come twice)"
    return ""


def _rewritten(normal: Normal) -> schemas.Schema:
    """The same schema in words that XGrammar reads right.

    It lets raw quotes into some patterns, and raw control characters into strings of bounded length. So both
    become patterns over JSON's text: a pattern without the characters that JSON escapes, which are fewer strings than
    the schema admits, and a length in characters or escapes."""
    for path, inner in list(normal.subschemas()):
        if isinstance(inner, dict) and not inner.keys().isdisjoint(("pattern", "minLength", "maxLength")):
            try:
                tree = plain(parse_search(inner["pattern"])) if "pattern" in inner else string_tree(inner)
            except RegexError as e:
                raise schemas.SchemaError(f"{path}/pattern: {e}") from None
            if tree is None:
                raise _Unenforced(f"{path}/pattern needs characters that JSON escapes")
            if size(tree) > MAX_ATOMS:
                raise _Unenforced(f"{path}: {TOO_MANY}")
            inner |= {"type": "string", "pattern": f"^{render(tree)}$"}
            inner.pop("minLength", None)
            inner.pop("maxLength", None)
    return normal.schema


def _quoted(text: str) -> str:
    r"""A string of its EBNF: every character as an escape that it reads (\uXXXX, \UXXXXXXXX)."""
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text) + '"'
