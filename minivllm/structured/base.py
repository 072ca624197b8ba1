"""The seams of structured output: a vocabulary of bytes, a backend that compiles, a grammar that follows one request.

A grammar is a language over bytes. A token is allowed where its bytes keep the output a prefix of some text of the
language; a token that ends the sequence is allowed where the output is a text of the language. Masks have one bit a
token id, as int32 words, the lowest bit first: bit i of word w is token 32 * w + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from minivllm.errors import BadRequest
from minivllm.structured import regex
from minivllm.structured.bounds import nested_bounds
from minivllm.structured.params import StructuredParams
from minivllm.structured.trie import TokenTrie

MAX_COPIES = 100_000  # of a piece of a grammar, by bounds inside bounds


class Unsupported(BadRequest):
    """A specification that may be right, and that this backend cannot hold the output to. Another one may."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a token adds to the text: b"" for those that add none (special tokens, ids that no text has)."""

    tokens: Sequence[bytes]
    eos_ids: tuple[int, ...]  # any of them ends a sequence; at least one

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return -(-len(self.tokens) // 32)

    @cached_property
    def trie(self) -> TokenTrie:
        return TokenTrie(self.tokens)

    @cached_property
    def spelled(self) -> np.ndarray:
        """[256] bool: the bytes that some token holds."""
        found = np.zeros(256, bool)
        found[list(set(b"".join(self.tokens)))] = True
        return found

    @cached_property
    def by_first_byte(self) -> dict[int, list[int]]:
        """Ids of tokens, by the first byte that they add."""
        found: dict[int, list[int]] = {}
        for i, token in enumerate(self.tokens):
            if token:
                found.setdefault(token[0], []).append(i)
        return found

    @cached_property
    def eos_mask(self) -> np.ndarray:
        """[num_words] int32."""
        return self.mask_of(self.eos_ids)

    def mask_of(self, ids: Sequence[int]) -> np.ndarray:
        """[num_words] int32 with the bits of `ids`."""
        bits = np.zeros(32 * self.num_words, bool)
        bits[list(ids)] = True
        return pack(bits)


class Grammar(Protocol):
    """Where one request stands. Not thread-safe."""

    @property
    def is_terminated(self) -> bool:
        """An end-of-sequence token has been accepted."""

    def accept(self, token: int) -> bool:
        """Follow one token. False, and nothing has changed: it is not allowed here."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens that were accepted."""

    def fill_mask(self, out: np.ndarray) -> None:
        """out [num_words] int32: the tokens allowed next; once terminated, the end-of-sequence tokens alone. None where
        no token leads on and the output is no text of the language: the request must end with an error."""


class CompiledGrammar(Protocol):
    """Thread-safe, shared by all requests of one specification."""

    num_bytes: int  # about, without other grammars that it is made of and that are kept by themselves

    def start(self) -> Grammar: ...


class GrammarBackend(Protocol):
    """Built as cls(vocabulary), on the first request that needs it. Thread-safe.

    Both methods raise BadRequest for a specification that is wrong or too large, Unsupported for one that the backend
    cannot enforce."""

    requires: ClassVar[str | None]  # the package that must be installed

    def translate(self, params: StructuredParams) -> bytes:
        """All that is read and found out in Python, as what `build` needs: the library's notation, or a table. Where
        clients are strangers this happens in a child (trial.py), and so does a first `build`."""

    def build(self, params: StructuredParams, source: bytes) -> CompiledGrammar:
        """source: what `translate` gave for these params."""


def read_regex(params: StructuredParams) -> regex.Node:
    """The tree of the request's expression. Raises BadRequest for what is none."""
    try:
        return regex.parse(params.regex)
    except regex.RegexError as e:
        raise params.error(f"regex: {e}") from None


def read_grammar(params: StructuredParams) -> str:
    """The request's grammar. Raises BadRequest for one whose nested bounds stand for too many copies."""
    if nested_bounds(params.grammar) > MAX_COPIES:
        raise params.error(f"grammar: its bounds inside bounds stand for over {MAX_COPIES:,} copies")
    return params.grammar


def pack(bits: np.ndarray) -> np.ndarray:
    """bits [32 * words] bool -> [words] int32."""
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack(mask: np.ndarray, num_tokens: int) -> np.ndarray:
    """mask [..., words] int32 -> [..., num_tokens] bool."""
    return np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little")[..., :num_tokens].astype(bool)
