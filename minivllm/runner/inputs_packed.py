"""PackedInputs: whole prompts back to back, for a model without a cache.

There are no tables and no slots, and no step goes on where another one ended. The shortest prompt comes first, so that
attention pads neighbours of like length (attention/packed.py): the batch's order is its own, not the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from minivllm.batch import BatchKey, InputBatch
from minivllm.plan import Join, StepPlan

NOTHING = np.empty(0, np.int64)


class PackedInputs:
    on_device = False

    def __init__(self, pairs: bool = False):
        """pairs: a prompt may hold two texts, and the model is told which token is of which."""
        self._pairs = pairs
        self._joins: dict[str, Join] = {}
        self._rows: dict[str, int] = {}

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        for req_id in plan.leaves:
            self._joins.pop(req_id, None)
            self._rows.pop(req_id, None)
        for join, row in zip(plan.joins, rows, strict=True):
            self._joins[join.req_id], self._rows[join.req_id] = join, row

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        req_ids = sorted(plan.num_tokens, key=plan.num_tokens.__getitem__)
        joins = [self._joins[req_id] for req_id in req_ids]
        lengths = np.array([len(join.token_ids) for join in joins])
        query_start = np.concatenate([[0], lengths.cumsum()])
        num_requests, num_tokens = len(req_ids), int(query_start[-1])
        assert num_tokens == plan.total_tokens == key.num_tokens, "a prompt was cut, or padded"
        positions = np.arange(num_tokens) - np.repeat(query_start[:-1], lengths)
        return InputBatch(
            req_ids=req_ids,
            rows=np.array([self._rows[req_id] for req_id in req_ids]),
            token_ids=np.array([token for join in joins for token in join.token_ids]),
            positions=positions,
            slot_mapping=NOTHING,
            query_start=query_start.astype(np.int32),
            seq_lens=lengths.astype(np.int32),
            block_tables=np.empty((num_requests, 0), np.int32),
            sample_tokens=NOTHING,
            sample_requests=NOTHING,
            draft_tokens=NOTHING,
            num_tokens=num_tokens,
            max_query=int(lengths[-1]),
            max_seq=int(lengths[-1]),
            token_types=self._types(joins, positions, lengths) if self._pairs else None,
        )

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray | Tensor) -> None:
        raise AssertionError("a head that pools makes no tokens")

    def _types(self, joins: Sequence[Join], positions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        begins = (join.pooling.second for join in joins)  # None: all is the first text
        second = [length if at is None else at for at, length in zip(begins, lengths, strict=True)]
        return (positions >= np.repeat(second, lengths)).astype(np.int64)
