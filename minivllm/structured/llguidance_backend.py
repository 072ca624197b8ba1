"""llguidance (Microsoft's guidance): lazy automata and an Earley parser, with masks in tens of microseconds.

Strict where XGrammar is lenient: a keyword that it does not enforce is an error, and allOf, patternProperties,
multipleOf, bounds of numbers and many formats are enforced. It limits its own work while compiling and while masking.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np

from minivllm.structured import schema as schemas
from minivllm.structured.base import Unsupported, Vocabulary, read_grammar, read_regex
from minivllm.structured.instances import exactly
from minivllm.structured.json_text import other_names, plain
from minivllm.structured.normal import Normal, normal
from minivllm.structured.params import MAX_WHITESPACE, StructuredParams
from minivllm.structured.regex import RegexError, parse_search, render

# Where only one text can follow, it would allow that text's usual tokens alone; here every token that fits is allowed,
# as with the other backends.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
MAX_STEP = 1_000  # it follows the remainder as a state: with 99,991 of them it does not come back
MAX_INTEGER = 2**53  # of a value that stands for itself: beyond, llguidance writes the nearest double's digits


class LLGuidanceBackend:
    requires: ClassVar[str | None] = "llguidance"

    def __init__(self, vocabulary: Vocabulary):
        import llguidance

        self.vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=len(vocabulary),
            eos_token=list(vocabulary.eos_ids),
        )

    def translate(self, params: StructuredParams) -> bytes:
        return self._lark(params).encode()

    def build(self, params: StructuredParams, source: bytes) -> CompiledLLGuidance:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_lark(_OPTIONS + source.decode())
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise Unsupported(f"{params.field}: {params.kind}: {reason[:500]}", params.field)
        return CompiledLLGuidance(matcher, len(source), self.vocabulary)

    def _lark(self, params: StructuredParams) -> str:
        """The specification in llguidance's own notation."""
        from llguidance import regex_to_lark

        if params.kind == "json_object":
            return f"start: %json {_schema({'type': 'object'}, params)}"
        if params.kind == "json":
            try:
                return f"start: %json {_schema(_readable(normal(params.json)), params)}"
            except schemas.SchemaError as e:
                raise params.error(f"json: {e}") from None
            except _Unheld as e:
                raise Unsupported(f"{params.field}: json: {e}", params.field) from None
        if params.kind == "regex":
            return f"start: /{regex_to_lark(render(read_regex(params)), '')}/"
        if params.kind == "choice":
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return _from_any_notation(params)


def _schema(root: schemas.Schema, params: StructuredParams) -> str:
    options = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    options = options if params.disable_any_whitespace else {"whitespace_pattern": rf"[ \t\r\n]{{0,{MAX_WHITESPACE}}}"}
    return json.dumps({**({} if root is True else root), "x-guidance": options})


class _Unheld(ValueError):
    """What llguidance would read as something else; the message begins with the place."""


def _readable(found: Normal) -> schemas.Schema:
    """In words that llguidance reads as they are meant: patterns in our notation of expressions, where they are such,
    and no bounds that its doubles cannot hold."""
    for path, schema in list(found.subschemas()):
        if not isinstance(schema, dict):
            continue
        if "pattern" in schema:
            schema["pattern"] = _pattern(schema["pattern"])
        if _digits(schema.get("multipleOf", 1)) > MAX_STEP:
            raise _Unheld(f"{path}/multipleOf is not enforced beyond {MAX_STEP:,}")
        if schema.get("minProperties", 0) > len(schema.get("required", ())) + 1 and schemas.is_open(schema):
            raise _Unheld(f"{path}/minProperties is not enforced where a name could come twice")
        if schema.get("type") == "object":
            _spell_names_once(schema, path)
        if schemas.largest([schema.get("enum"), schema.get("const")]) > MAX_INTEGER:
            raise _Unheld(f"{path}: an enumerated integer beyond {MAX_INTEGER:,} is not enforced")
        if schema.get("type") in ("integer", "number"):
            _narrow(schema, path)
    return found.schema


def _spell_names_once(schema: dict[str, Any], path: str) -> None:
    """A name that JSON writes as `\\u0061` is "a", which llguidance does not see where it tells names from others. So
    names that are not listed have no escapes, which are fewer than the schema admits."""
    patterns, others = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    if patterns and others not in (True, False):
        raise _Unheld(f"{path}/additionalProperties is not enforced beside patternProperties")
    spelled = {}
    for text, inner in patterns.items():
        tree = plain(parse_search(text))
        if tree is None:
            raise _Unheld(f"{path}/patternProperties needs characters that JSON escapes")
        spelled[f"^(?:{render(tree)})$"] = inner
    if schema.get("properties") and not patterns and others is not False:
        spelled = {f"^(?:{render(other_names(schema['properties']))})$": others}
    if spelled:
        schema |= {"patternProperties": spelled, "additionalProperties": False}


def _pattern(text: str) -> str:
    try:
        return f"^(?:{render(parse_search(text))})$"
    except RegexError:  # llguidance knows more of them (\\p{L}), and refuses others
        return text


def _digits(step: int | float) -> int:
    """Of a step, without its point."""
    return int(f"{Decimal(repr(step)):f}".removesuffix(".0").replace(".", ""))


def _narrow(schema: dict[str, Any], path: str) -> None:
    """Bounds that are doubles, which is all that llguidance reads, and of integers such as fit 64 bits. Of numbers it
    takes a double's shortest digits as they stand."""
    read = int if schema["type"] == "integer" else exactly
    for key, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        if key in schema and schemas.largest(schema[key]) > MAX_INTEGER:
            bound = float(schema[key])
            while sign * read(bound) < sign * schema[key]:
                bound = math.nextafter(bound, sign * math.inf)
            if read is int and abs(bound) >= 2.0**63:
                raise _Unheld(f"{path}/{key} is beyond 64 bits, which is not supported")
            schema[key] = int(bound) if read is int else bound
    if schema.get("minimum", -math.inf) > schema.get("maximum", math.inf):
        raise _Unheld(f"{path}: no double lies between minimum and maximum, which is not supported")


def _from_any_notation(params: StructuredParams) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = read_grammar(params)
    try:
        return any_to_lark(grammar)
    except Exception as e:  # the converter raises whatever its parsing runs into
        raise Unsupported(f"{params.field}: grammar: {e}", params.field) from None


class _Tokens:
    """What LLTokenizer reads of a tokenizer. Token ids are chosen by the model alone, so it need not encode."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = [i for i, token in enumerate(vocabulary.tokens) if not token]
        # A special token's bytes begin with 0xFF, which no text has.
        self.tokens = [token or b"\xff<|%d|>" % i for i, token in enumerate(vocabulary.tokens)]

    def __call__(self, text: bytes) -> list[int]:
        return []


class CompiledLLGuidance:
    def __init__(self, matcher: Any, num_bytes: int, vocabulary: Vocabulary):
        """num_bytes: of its notation. What the matcher finds out of it is made as a request goes on, and is its own."""
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self) -> LLGuidance:
        return LLGuidance(self._matcher.deep_copy(), self._vocabulary)


class LLGuidance:
    def __init__(self, matcher: Any, vocabulary: Vocabulary):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_ended = 0  # end-of-sequence tokens accepted; the matcher never sees them

    @property
    def is_terminated(self) -> bool:
        return self._num_ended > 0

    def accept(self, token: int) -> bool:
        if token in self._vocabulary.eos_ids:
            ended = self._num_ended > 0 or self._matcher.is_accepting()
            self._num_ended += ended
            return ended
        if self._num_ended or not self._vocabulary.tokens[token]:
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, num_tokens: int) -> None:
        ended = min(num_tokens, self._num_ended)
        self._num_ended -= ended
        if num_tokens > ended and not self._matcher.rollback(num_tokens - ended):
            raise ValueError(self._matcher.get_error())

    def fill_mask(self, out: np.ndarray) -> None:
        if self._num_ended:
            out[:] = self._vocabulary.eos_mask
        elif self._matcher.is_stopped():  # at an end, or where its grammar leads nowhere
            out[:] = self._vocabulary.eos_mask if self._matcher.is_accepting() else 0
        else:
            assert out.flags.c_contiguous
            self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
            if not (out & ~self._vocabulary.eos_mask).any() and not self._matcher.is_accepting():
                out[:] = 0  # it gives the end where its grammar leads nowhere, too
