"""GrammarMask: the logits of tokens that a request's grammar does not allow become -inf, before anything else.

The grammar of a row follows the row's output, so it is always at the position whose logits come next. The masks of all
rows are one array of bits, filled by the grammars and applied in one go.

How it meets other parameters:
- a token that ends the sequence is allowed exactly where the output is complete; so are the request's stop_token_ids,
  beside where they are text of the grammar;
- min_tokens holds as long as the grammar lets the text go on. Where nothing but the end is allowed, the grammar wins,
  and end-of-sequence tokens, which add no text, fill up the number;
- ignore_eos does the same up to max_tokens;
- allowed_token_ids, bad_words and logit_bias apply as well. If they leave nothing, the request ends with an error.

Behind a prelude (structured/prelude.py) it is the answer that is as long as min_tokens, and that a bias towards a token
that ends it makes shorter: in the prelude such a bias is withheld.

A grammar may lead to where no token follows and the output is not complete: a library has not seen that something in
it has no end, or the vocabulary has no token for it. No mask allows the end there, and the request ends with an error.

Grammars are followed in the step that all share, and a library may follow a client's for seconds: the ways to read its
text so far grow with the text. So a request ends with an error when following its last token and finding its mask took
over TOKEN_SECONDS; when the slow ones of a grammar took over STEP_SECONDS in one step (a request has many sequences);
and when following its output again took over RESUME_SECONDS, after a preemption. It is this thread's CPU time: a
machine that is busy with something else ends nobody's request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.cpu import mask as mask_kernel
from minivllm.plan import LEADS_NOWHERE, TOO_SLOW
from minivllm.request import SamplingParams
from minivllm.sampling.processors import NEG_INF
from minivllm.structured.base import CompiledGrammar, Grammar
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.escape import Escape
from minivllm.structured.prelude import PreludeGrammar
from minivllm.upload import upload

# [256, 8]: the largest logit that each of the eight tokens of a mask's byte may have. A minimum has no branches: it
# takes as long for any mask, and less than writing where a bit says so.
_BOUNDS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.inf, -np.inf).astype(np.float32)


ApplyMasks = Callable[[Tensor, np.ndarray, np.ndarray], Tensor]  # see apply_masks_slowly


TOKEN_SECONDS = 0.1
STEP_SECONDS = 0.2
RESUME_SECONDS = 1.0
SLOW_SECONDS = 0.02  # what counts for STEP_SECONDS; the in-house automaton finds a mask of 49,152 tokens in 0.002


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    compiled: CompiledGrammar
    stop_mask: np.ndarray  # [words] int32: the request's stop tokens
    end_mask: np.ndarray  # [words] int32: those, and the end-of-sequence tokens
    min_tokens: int
    prelude: PreludeGrammar | Escape | None  # the same grammar, if it begins behind one
    withheld: dict[int, float]  # by token: bias in the prelude
    num_tokens: int = 0  # of the output
    seconds: float = 0.0  # that following its last token took

    @property
    def num_answered(self) -> int:
        return self.num_tokens if self.prelude is None else self.prelude.num_answered

    @property
    def has_answer(self) -> bool:
        return self.prelude is None or self.prelude.has_answer


class GrammarMask:
    """Does what MinTokens does for its rows too: it alone knows what else there is."""

    keeps_argmax = False
    follows_output = True

    def __init__(
        self,
        compiler: GrammarCompiler,
        vocab_size: int,
        apply_masks: ApplyMasks,
        clock: Callable[[], float] = time.thread_time,
    ):
        self.compiler = compiler
        self.clock = clock
        self.failures: dict[int, str] = {}  # by row: why its request must end
        self._slow: dict[int, float] = {}  # by grammar (its id): the seconds of what was slow since the last masks
        self.apply_masks = apply_masks
        self.vocab_size = vocab_size
        self.states: dict[int, _Row] = {}

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.structured is None:
            return False
        output = token_ids[num_prompt_tokens:]
        vocabulary = self.compiler.vocabulary
        assert len(vocabulary) == self.vocab_size
        compiled = self.compiler.compile(params.structured)
        stop_mask = vocabulary.mask_of(params.stop_token_ids)
        grammar = compiled.start()
        prelude = grammar if params.structured.prelude is not None else None
        assert prelude is None or isinstance(prelude, PreludeGrammar | Escape)
        withheld = {} if prelude is None else params.biases_to_end(params.eos_token_ids)
        masks = stop_mask, stop_mask | vocabulary.eos_mask
        state = self.states[row] = _Row(grammar, compiled, *masks, params.min_tokens, prelude, withheld)
        begin = self.clock()
        for token in output:  # a request that resumes after a preemption
            state.grammar.accept(token)
            state.num_tokens += 1
            if (seconds := self.clock() - begin) > RESUME_SECONDS:
                self._fail(row, f"following what has come of the output took {1e3 * seconds:.0f} ms", RESUME_SECONDS)
                break
        return True

    def leave(self, row: int) -> None:
        self.states.pop(row, None)
        self.failures.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """A token that the grammar does not take (a stop token, or the placeholder of a row that had no distribution)
        is the request's last."""
        state = self.states[row]
        if self._has_failed(row, state):
            return
        begin = self.clock()
        state.grammar.accept(token)
        state.seconds = self._spent(state, self.clock() - begin)
        state.num_tokens += 1

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        logits = self.apply_masks(logits, *self.fill(rows))
        for i, row in enumerate(rows.tolist()):
            state = self.states.get(row)
            if state is not None and state.withheld and not state.has_answer:
                tokens = upload(np.fromiter(state.withheld, np.int64), logits.device)
                bias = upload(np.fromiter(state.withheld.values(), np.float32), logits.device)
                logits[i, tokens] -= bias  # LogitBias adds it
        return logits

    def fill(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> which of `rows` [S] have a grammar [N] int64, and their masks [N, words] int32."""
        users = [(i, row) for i, row in enumerate(rows.tolist()) if row in self.states]
        masks = np.empty((len(users), self.compiler.vocabulary.num_words), np.int32)
        for mask, (_, row) in zip(masks, users, strict=True):
            self._fill_in_time(mask, row)
        self._slow.clear()
        return np.array([i for i, _ in users], np.int64), masks

    def _fill_in_time(self, mask: np.ndarray, row: int) -> None:
        """A row that has failed is allowed nothing: its request ends."""
        state = self.states[row]
        if not self._has_failed(row, state):
            begin = self.clock()
            state.grammar.fill_mask(mask)
            seconds = self._spent(state, self.clock() - begin) + state.seconds
            if seconds <= TOKEN_SECONDS and mask.any():
                return self._end(mask, state)
            if seconds > TOKEN_SECONDS:
                self._fail(row, f"a token took {1e3 * seconds:.0f} ms", TOKEN_SECONDS)
            self.failures.setdefault(row, LEADS_NOWHERE)
        mask[:] = 0

    def _spent(self, state: _Row, seconds: float) -> float:
        if seconds > SLOW_SECONDS:
            grammar = id(state.compiled)
            self._slow[grammar] = self._slow.get(grammar, 0.0) + seconds
        return seconds

    def _has_failed(self, row: int, state: _Row) -> bool:
        seconds = self._slow.get(id(state.compiled), 0.0) if self._slow else 0.0
        if seconds > STEP_SECONDS:
            self._fail(row, f"its sequences took {1e3 * seconds:.0f} ms in one step", STEP_SECONDS)
        return row in self.failures

    def _fail(self, row: int, what: str, most: float) -> None:
        self.failures.setdefault(row, f"{TOO_SLOW}: {what}, and {1e3 * most:.0f} ms is the most")

    def _end(self, mask: np.ndarray, state: _Row) -> None:
        """What min_tokens and stop_token_ids change of a mask, in place."""
        if state.num_answered < state.min_tokens:
            going_on = mask & ~state.end_mask
            if going_on.any():
                mask[:] = going_on
        elif (mask & self.compiler.vocabulary.eos_mask).any():  # the output is complete
            mask |= state.stop_mask


def apply_masks_slowly(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> Tensor:
    """The reference of all that apply masks, one token at a time.

    logits [S, V] float32, changed in place and returned; rows [N] int64, distinct; masks [N, words] int32, whose bits
    beyond V do not count.
    """
    for row, mask in zip(rows.tolist(), masks, strict=True):
        for token in range(logits.shape[1]):
            if not mask[token >> 5] >> (token & 31) & 1:
                logits[row, token] = NEG_INF
    return logits


def apply_masks_by_row(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> Tensor:
    """The same with numpy, on a CPU without a compiler. NaN stays NaN."""
    table, num_tokens = logits.numpy(), logits.shape[1]
    bounds = np.empty((4 * masks.shape[1], 8), np.float32)  # of one row at a time, so that it stays in the cache
    for row, mask in zip(rows.tolist(), masks.view(np.uint8), strict=True):
        np.take(_BOUNDS, mask, axis=0, out=bounds, mode="clip")
        np.minimum(table[row], bounds.reshape(-1)[:num_tokens], out=table[row])
    return logits


def apply_masks_at_once(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> Tensor:
    """The same for a device to which only the bits shall travel."""
    words = upload(masks, logits.device)
    lanes = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (words[:, :, None] >> lanes & 1).flatten(1)[:, : logits.shape[1]] == 0  # [N, V]
    if len(rows) == len(logits) and (rows == np.arange(len(rows))).all():
        return logits.masked_fill_(forbidden, NEG_INF)
    index = upload(rows, logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, NEG_INF)
    return logits


def choose_apply(device: torch.device) -> ApplyMasks:
    """The first choice may compile."""
    if device.type != "cpu":
        return apply_masks_at_once
    return apply_masks_by_row if mask_kernel.unsupported_reason() else mask_kernel.apply_masks


def make_grammar_mask(compiler: GrammarCompiler, device: torch.device) -> Callable[[int, int], GrammarMask]:
    """As the sampler builds its processors: from (vocab_size, max_rows)."""
    apply = choose_apply(device)
    return lambda vocab_size, max_rows: GrammarMask(compiler, vocab_size, apply)
