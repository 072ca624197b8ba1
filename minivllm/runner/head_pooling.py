"""PoolingHead: a prompt's hidden states become one vector, or a score, with which the request ends.

Each request of a batch is a whole prompt, so that all of its hidden states are here. What they become is decided when
the head is made: Pool takes the mean, last or first, or a classification head's output, and an activation ends it: unit
length, or a sigmoid. What one request asks for beside that, fewer dimensions or no activation, it says when it joins.
The vectors of a step are one copy to the host, which may arrive while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.batch import InputBatch
from minivllm.plan import NOT_FINITE, AsyncOutput, Join, StepOutput, StepPlan
from minivllm.pooling.pool import cut
from minivllm.runner.prompt_logprobs import Send, read_at_once
from minivllm.upload import upload

# (hidden [T, hidden] of texts back to back, lengths [B] int64) -> [B, width] fp32
Pool = Callable[[Tensor, Tensor], Tensor]


class Activation(NamedTuple):
    """What may be done with what a Pool gives."""

    of: Callable[[Tensor], Tensor]  # [B, width] fp32, each row by itself
    by_default: bool


class Asked(NamedTuple):
    dimensions: int | None
    is_activated: bool


class PoolingHead:
    """A Head, and a RowState."""

    lookahead = 0

    def __init__(self, pool: Pool, activation: Activation, send: Send = read_at_once):
        self._pool, self._activate, self._send = pool, activation.of, send
        self._usual = Asked(None, activation.by_default)
        self._asked: dict[int, Asked] = {}  # by row, of who asked for something else

    def join(self, row: int, join: Join) -> None:
        asked, usual = join.pooling, self._usual
        is_activated = usual.is_activated if asked.use_activation is None else asked.use_activation
        if (own := Asked(asked.dimensions, is_activated)) != usual:
            self._asked[row] = own

    def leave(self, row: int) -> None:
        self._asked.pop(row, None)

    def __call__(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> StepOutput | AsyncOutput[StepOutput]:
        lengths = upload(batch.seq_lens.astype(np.int64), hidden.device)
        asked = [self._asked.get(row, self._usual) for row in batch.rows.tolist()]
        vectors = self._activated(self._pool(hidden, lengths), [own.is_activated for own in asked])

        output = self._send([vectors]).then(partial(self._report, batch.req_ids, asked))
        return output.result() if output.is_ready() else output

    def _activated(self, pooled: Tensor, which: Sequence[bool]) -> Tensor:
        if not any(which):
            return pooled
        if all(which):
            return self._activate(pooled)
        return torch.where(upload(np.array(which)[:, None], pooled.device), self._activate(pooled), pooled)

    def _report(self, req_ids: Sequence[str], asked: Sequence[Asked], arrays: Sequence[np.ndarray]) -> StepOutput:
        (vectors,), out = arrays, StepOutput()
        are_finite = np.isfinite(vectors).all(axis=1).tolist()
        for req_id, vector, own, is_finite in zip(req_ids, vectors, asked, are_finite, strict=True):
            if is_finite:
                out.pooled[req_id] = cut(vector, own.dimensions, normalized=own.is_activated)
            else:  # JSON would write NaN as null, and a client would sort by it
                out.errors[req_id] = NOT_FINITE
        return out
