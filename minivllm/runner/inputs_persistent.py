"""PersistentInputs: vLLM V1's persistent batch. State stays in numpy arrays between steps; a plan changes only its
diffs.

A request keeps one row from joining to leaving, and a step gathers its rows in plan order. V1 instead kept the batch
dense by moving the last row into each hole; later vLLM went back to permanent rows, because everything that is
indexed by row (sampling state, LoRA slots, tokens still on the device) had to move along.

In the steady state (same requests, one token each, no new block) a step is a few array operations, with no Python work
that grows with the batch beyond reading the plan's dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.plan import StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey, InputSizes, find_samples, places_of


class PersistentInputs:
    on_device = False

    def __init__(self, sizes: InputSizes):
        self.sizes = sizes
        # np.zeros maps pages on first touch, so room for the longest request in every row costs nothing by itself.
        self.token_ids = np.zeros((sizes.max_rows, sizes.max_model_len), np.int32)
        self.block_tables = np.zeros((sizes.max_rows, sizes.max_blocks), np.int32)
        self.num_tokens = np.zeros(sizes.max_rows, np.int32)  # known tokens, computed or not
        self.num_blocks = np.zeros(sizes.max_rows, np.int32)
        self._row_of: dict[str, int] = {}
        self._req_ids: list[str] = []  # of the last build, and their rows
        self._rows = np.zeros(0, np.int64)

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        for req_id in plan.leaves:
            self._row_of.pop(req_id, None)
        for join, row in zip(plan.joins, rows, strict=True):
            self._row_of[join.req_id] = row
            self.token_ids[row, : len(join.token_ids)] = join.token_ids
            self.num_tokens[row] = len(join.token_ids)
            self.block_tables[row, : self.num_blocks[row]] = 0  # entries past a request's blocks name a valid one
            self.num_blocks[row] = 0
        for req_id, blocks in plan.new_blocks.items():
            row = self._row_of[req_id]
            first = self.num_blocks[row]
            self.block_tables[row, first : first + len(blocks)] = blocks
            self.num_blocks[row] = first + len(blocks)
        if plan.leaves or plan.joins:
            self._req_ids = []

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        req_ids = list(plan.num_tokens)
        num_requests = len(req_ids)
        if req_ids != self._req_ids:
            self._req_ids = req_ids
            self._rows = np.fromiter(map(self._row_of.__getitem__, req_ids), np.int64, num_requests)
        rows = self._rows
        for req_id, drafts in plan.drafts.items():  # behind the known tokens, where the next append() writes
            row = self._row_of[req_id]
            self.token_ids[row, self.num_tokens[row] : self.num_tokens[row] + len(drafts)] = drafts
        num_new = np.fromiter(plan.num_tokens.values(), np.int64, num_requests)
        start = np.fromiter(plan.start.values(), np.int64, num_requests)
        seq_lens = start + num_new
        query_start = np.zeros(num_requests + 1, np.int32)
        np.cumsum(num_new, out=query_start[1:])
        num_tokens = int(query_start[-1])
        token_rows, at = rows, start  # of each token
        if num_tokens > num_requests:
            token_rows = np.repeat(rows, num_new)
            at = np.arange(num_tokens) + np.repeat(start - query_start[:-1], num_new)
        token_ids, positions, slot_mapping = self._columns(token_rows, at, key.num_tokens)
        max_seq = int(seq_lens.max())
        samples = find_samples(self.num_tokens[rows], num_new, seq_lens, query_start, token_ids)
        return InputBatch(
            req_ids=req_ids,
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self.block_tables[rows, : -(-max_seq // self.sizes.block_size)],
            sample_tokens=samples.tokens,
            sample_requests=samples.requests,
            draft_tokens=samples.drafts,
            num_tokens=num_tokens,
            max_query=int(num_new.max()),
            max_seq=max_seq,
            whole=key.whole,
        )

    def _columns(self, rows: np.ndarray, at: np.ndarray, num_padded: int) -> np.ndarray:
        """rows, at [T]: of each token its request's row and its position.
        -> [3, padded T] int64: ids, positions, slots."""
        num_tokens, block_size = len(at), self.sizes.block_size
        columns = np.zeros((3, num_padded), np.int64)
        token_ids, positions, slots = columns
        token_ids[:num_tokens] = self.token_ids[rows, at]
        positions[:num_tokens] = at
        slots[:num_tokens] = self.block_tables[rows, at // block_size]
        slots[:num_tokens] *= block_size
        slots[:num_tokens] += at % block_size
        slots[num_tokens:] = self.sizes.spare_block * block_size
        return columns

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray) -> None:
        rows = batch.rows[requests]
        at = self.num_tokens[rows] + places_of(requests)
        # A request's very last token is never fed back and may lie past the longest length: it has no place here.
        fits = at < self.sizes.max_model_len
        self.token_ids[rows[fits], at[fits]] = tokens[fits]
        self.num_tokens[rows] = at + 1
