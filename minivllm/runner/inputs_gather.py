"""GatherInputs: the input preparation of vLLM's second model runner. One permanent row a request, and nothing else that
the host keeps in step with the device.

Three rules, each of which makes the next step's inputs independent of what the host knows of this one:

    a row is for life        no compaction: whatever is indexed by row (sampling state, KV, tokens on their way) stays
    the host only stages     what a plan adds (a prompt, blocks, drafts) is noted piece by piece and written in one go
    a batch is gathered      from the rows, by (row, tokens to compute, where they start): the three short arrays that
                             are all the host has to say of a step

Everything in `build` behind those three arrays, and `append`, is whole-array work over per-row state: on an accelerator
each is a launch, and the tokens of the step before need never have been seen by the host. Here the arrays are numpy, so
that the same product comes out as of the other builders. Where the state lives:

    host      row of each request, number of its blocks
    device    token_ids, num_known, block_tables

Not the original: vLLM also keeps num_computed_tokens on the device; here a plan says where each request starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.plan import StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey, InputSizes, find_samples, places_of


class StagedWrites:
    """A table [rows, width] that is written piece by piece in Python and all at once in memory: the pieces of a step
    travel as one list of values and one of places. Of two pieces that overlap the later one stays."""

    def __init__(self, rows: int, width: int, dtype: type):
        # Pages are mapped on first touch, so room for the longest request in every row costs nothing by itself.
        self.array = np.zeros((rows, width), dtype)
        self.flat = self.array.reshape(-1)
        self.width = width
        self._starts: list[int] = []  # in `flat`
        self._lengths: list[int] = []
        self._values: list[int] = []

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        assert start + len(values) <= self.width, "a piece reaches into the next row"
        self._starts.append(row * self.width + start)
        self._lengths.append(len(values))
        self._values += values

    def write(self) -> None:
        if not self._starts:
            return
        lengths = np.array(self._lengths)
        before = np.cumsum(lengths) - lengths
        places = np.repeat(np.array(self._starts) - before, lengths) + np.arange(len(self._values))
        self.flat[places] = self._values  # numpy keeps the last value of a place that is named twice
        self._starts, self._lengths, self._values = [], [], []


class GatherInputs:
    def __init__(self, sizes: InputSizes):
        self.sizes = sizes
        self.token_ids = StagedWrites(sizes.max_rows, sizes.max_model_len, np.int32)
        self.block_tables = StagedWrites(sizes.max_rows, sizes.max_blocks, np.int32)  # behind a row's blocks: 0
        self.num_known = np.zeros(sizes.max_rows, np.int64)  # tokens in the row, computed or not
        self._num_blocks = [0] * sizes.max_rows
        self._row_of: dict[str, int] = {}
        self._req_ids: list[str] = []  # of the last build, and their rows
        self._rows = np.zeros(0, np.int64)

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        num_blocks, tables = self._num_blocks, self.block_tables
        for req_id in plan.leaves:
            row = self._row_of.pop(req_id, None)
            if row is not None:
                tables.stage(row, 0, [0] * num_blocks[row])
                num_blocks[row] = 0
        for join, row in zip(plan.joins, rows, strict=True):
            self._row_of[join.req_id] = row
            self.token_ids.stage(row, 0, join.token_ids)
            self.num_known[row] = len(join.token_ids)
        for req_id, blocks in plan.new_blocks.items():
            row = self._row_of[req_id]
            tables.stage(row, num_blocks[row], blocks)
            num_blocks[row] += len(blocks)
        self.token_ids.write()
        tables.write()
        if plan.leaves or plan.joins:
            self._req_ids = []

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        for req_id, drafts in plan.drafts.items():  # behind the known tokens, where the next append() writes
            row = self._row_of[req_id]
            self.token_ids.stage(row, int(self.num_known[row]), drafts)
        self.token_ids.write()
        req_ids = list(plan.num_tokens)
        num_requests = len(req_ids)
        if req_ids != self._req_ids:
            self._req_ids = req_ids
            self._rows = np.fromiter(map(self._row_of.__getitem__, req_ids), np.int64, num_requests)
        num_new = np.fromiter(plan.num_tokens.values(), np.int64, num_requests)
        start = np.fromiter(plan.start.values(), np.int64, num_requests)
        return self._gather(req_ids, self._rows, num_new, start, key)

    def _gather(
        self, req_ids: list[str], rows: np.ndarray, num_new: np.ndarray, start: np.ndarray, key: BatchKey
    ) -> InputBatch:
        """rows, num_new, start [R] int64: the batch. All else is read from the rows."""
        block_size = self.sizes.block_size
        seq_lens = start + num_new
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(num_new, out=query_start[1:])
        num_tokens, max_seq = int(query_start[-1]), int(seq_lens.max())
        token_rows, at = rows, start  # of each token
        if num_tokens > len(rows):
            token_rows = np.repeat(rows, num_new)
            at = np.arange(num_tokens) + np.repeat(start - query_start[:-1], num_new)
        block, offset = np.divmod(at, block_size)
        token_ids, positions, slot_mapping = np.zeros((3, key.num_tokens), np.int64)
        token_ids[:num_tokens] = self.token_ids.flat[token_rows * self.token_ids.width + at]
        positions[:num_tokens] = at
        slots = slot_mapping[:num_tokens]
        slots[:] = self.block_tables.flat[token_rows * self.block_tables.width + block]
        slots *= block_size
        slots += offset
        slot_mapping[num_tokens:] = self.sizes.spare_block * block_size
        samples = find_samples(self.num_known[rows], num_new, seq_lens, query_start, token_ids)
        return InputBatch(
            req_ids=req_ids,
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self.block_tables.array[rows, : -(-max_seq // block_size)],
            sample_tokens=samples.tokens,
            sample_requests=samples.requests,
            draft_tokens=samples.drafts,
            num_tokens=num_tokens,
            max_query=int(num_new.max()),
            max_seq=max_seq,
            whole=key.whole,
        )

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray) -> None:
        rows = batch.rows[requests]
        at = self.num_known[rows] + places_of(requests)
        self.num_known[rows] = at + 1
        # A request's very last token is never fed back and may lie past the longest length: it has no place here.
        fits = at < self.token_ids.width
        self.token_ids.flat[rows[fits] * self.token_ids.width + at[fits]] = tokens[fits]
