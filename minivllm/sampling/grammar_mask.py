"""GrammarMask: the logits of tokens that a request's grammar does not allow become -inf, before anything else.

The grammar of a row follows the row's output, so it is always at the position whose logits come next. Masks of all rows
are one array of bits; applying it costs a fixed number of tensor operations, however many rows there are.

How it meets other parameters:
- a token that ends the sequence is allowed exactly where the output is complete; so are the request's stop_token_ids,
  beside where they are text of the grammar;
- min_tokens holds as long as the grammar lets the text go on. Where nothing but the end is allowed, the grammar wins,
  and end-of-sequence tokens, which add no text, fill up the number;
- ignore_eos does the same up to max_tokens;
- allowed_token_ids, bad_words and logit_bias apply as well. If they leave nothing, the request ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.request import SamplingParams
from minivllm.sampling.processors import NEG_INF
from minivllm.structured.base import Grammar, unpack
from minivllm.structured.compiler import GrammarCompiler


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    stop_mask: np.ndarray  # [words] int32: the request's stop tokens
    end_mask: np.ndarray  # [words] int32: those, and the end-of-sequence tokens
    remaining: int  # tokens until min_tokens


class GrammarMask:
    """Does what MinTokens does for its rows too: it alone knows what else there is."""

    keeps_argmax = False

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, max_rows: int):
        self.compiler = compiler
        self.vocab_size = vocab_size
        self.states: dict[int, _Row] = {}

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.structured is None:
            return False
        output = token_ids[num_prompt_tokens:]
        vocabulary = self.compiler.vocabulary
        assert len(vocabulary) == self.vocab_size
        grammar = self.compiler.compile(params.structured).start()
        stop_mask = vocabulary.mask_of(params.stop_token_ids)
        state = _Row(grammar, stop_mask, stop_mask | vocabulary.eos_mask, params.min_tokens)
        self.states[row] = state
        for token in output:  # a request that resumes after a preemption
            self.observe(row, token)
        return True

    def leave(self, row: int) -> None:
        self.states.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """A token that the grammar does not take (a stop token, or the placeholder of a row that had no distribution)
        is the request's last."""
        state = self.states[row]
        state.grammar.accept(token)
        state.remaining -= 1

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        return apply_masks(logits, *self.fill(rows))

    def fill(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> which of `rows` [S] have a grammar [N] int64, and their masks [N, words] int32."""
        users = [(i, self.states[row]) for i, row in enumerate(rows.tolist()) if row in self.states]
        masks = np.empty((len(users), self.compiler.vocabulary.num_words), np.int32)
        for mask, (_, state) in zip(masks, users, strict=True):
            state.grammar.fill_mask(mask)
            self._end(mask, state)
        return np.array([i for i, _ in users], np.int64), masks

    def _end(self, mask: np.ndarray, state: _Row) -> None:
        """What min_tokens and stop_token_ids change of a mask, in place."""
        if state.remaining > 0:
            going_on = mask & ~state.end_mask
            if going_on.any():
                mask[:] = going_on
        elif (mask & self.compiler.vocabulary.eos_mask).any():  # the output is complete
            mask |= state.stop_mask


def apply_masks_slowly(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> Tensor:
    """The twin of apply_masks: one comparison for every logit."""
    allowed = unpack(masks, logits.shape[1])
    for row, bits in zip(rows.tolist(), allowed, strict=True):
        logits[row, torch.from_numpy(~bits).to(logits.device)] = NEG_INF
    return logits


def apply_masks(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> Tensor:
    """logits [S, V], changed in place; rows [N] int64, distinct; masks [N, words] int32.

    Most masks allow either nearly nothing (a comma) or nearly everything (inside a string). So only the rarer kind of
    token is looked at: a row with few allowed ones is cleared and gets those back, of the others the few forbidden
    ones are cleared. Rows in between (rare) are written whole. logits must be contiguous.
    """
    if not len(rows):
        return logits
    vocab_size = logits.shape[1]
    inside = np.full(masks.shape[1], -1, np.int32)  # the bits that are tokens
    if spare := 32 * masks.shape[1] - vocab_size:
        inside[-1] = (1 << (32 - spare)) - 1
    num_allowed = np.bitwise_count((masks & inside).view(np.uint32)).sum(
        1, dtype=np.int64
    )  # of signed: of the magnitude
    few = num_allowed * 8 <= vocab_size
    many = num_allowed * 8 >= 7 * vocab_size
    on_cpu = logits.device.type == "cpu"  # where numpy's indexing is up to 100 times as fast as torch's
    table = logits.numpy() if on_cpu else logits
    flat = table.reshape(-1)  # a view: logits are contiguous

    def index(ids: np.ndarray) -> np.ndarray | Tensor:
        return ids if on_cpu else torch.from_numpy(ids).to(logits.device)

    if few.any():
        allowed = index(_set_bits(masks[few] & inside, rows[few] * vocab_size))
        kept = flat[allowed]
        table[index(rows[few])] = NEG_INF
        flat[allowed] = kept
    if many.any():
        flat[index(_set_bits(~masks[many] & inside, rows[many] * vocab_size))] = NEG_INF
    between = ~(few | many)
    return apply_masks_slowly(logits, rows[between], masks[between]) if between.any() else logits


def _set_bits(masks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """-> offsets[i] + t for every bit t that is set in masks[i]: int64, in no order.

    Bit by bit of all words at once, the lowest first; few words have many.
    """
    at, words = np.nonzero(masks)
    left = masks[at, words].view(np.uint32)
    base = offsets[at] + 32 * words
    found = []
    while len(left):
        rest = left & (left - np.uint32(1))  # without the lowest bit
        found.append(base + np.bitwise_count((left ^ rest) - np.uint32(1)))
        more = rest != 0
        left, base = rest[more], base[more]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def make_grammar_mask(compiler: GrammarCompiler) -> Callable[[int, int], GrammarMask]:
    """As the sampler builds its processors: from (vocab_size, max_rows)."""
    return lambda vocab_size, max_rows: GrammarMask(compiler, vocab_size, max_rows)
