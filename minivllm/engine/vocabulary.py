"""A tokenizer as structured output sees it: the bytes of each token, and which tokens end a sequence."""

from __future__ import annotations

from pathlib import Path

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.structured.base import Vocabulary


def load_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """Raises BadRequest for a tokenizer whose output cannot be constrained token by token."""
    return make_vocabulary(TextTokenizer.load(folder), vocab_size)


def make_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> Vocabulary:
    """vocab_size: of the model. Ids that the tokenizer lacks, special tokens and those that end a sequence have no
    bytes, so that no grammar admits them as text."""
    if not tokenizer.has_bytes:
        raise BadRequest("structured output needs a tokenizer whose tokens are fixed bytes", "structured")
    if not tokenizer.eos_token_ids:
        raise BadRequest("structured output needs an end-of-sequence token, and this model has none", "structured")
    silent = tokenizer.special_ids.union(tokenizer.eos_token_ids)
    tokens = [b"" if i in silent else tokenizer.token_bytes(i) for i in range(vocab_size)]
    return Vocabulary(tokens, tokenizer.eos_token_ids)
