"""GatherInputs: the input preparation of vLLM's second model runner. One permanent row a request, and nothing else that
the host keeps in step with the device.

Three rules, each of which makes the next step's inputs independent of what the host knows of this one:

    a row is for life        no compaction: whatever is indexed by row (sampling state, KV, tokens on their way) stays
    the host only stages     what a plan adds (a prompt, blocks, drafts) is noted piece by piece and written in one go
    a batch is gathered      from the rows, by (row, tokens to compute, where they start): the three short arrays that
                             are all the host has to say of a step

Who has which row, and how many tokens and blocks a row has, is counted here: counts follow from plans alone. What they
count lies in two tables, `token_ids` and `block_tables`, and those are where the forward reads them:

    on a CPU     numpy arrays, in this process (tables.py)
    on a device  in its memory (tables_device.py): the tokens of the step before need never have been seen by the host

Which of them it is, inputs_place.py chooses. Not the original: vLLM also keeps num_computed_tokens on the device; here
a plan says where each request starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minivllm.batch import BatchKey, InputBatch, InputSizes
from minivllm.plan import StepPlan
from minivllm.runner.inputs import find_samples, places_of
from minivllm.runner.tables import HostTables, Step, Tables

if TYPE_CHECKING:
    from torch import Tensor

NO_DRAFTS = np.zeros(0, np.int64)


class GatherInputs:
    def __init__(self, sizes: InputSizes, tables: Tables | None = None):
        """tables: None: on the host."""
        self.sizes = sizes
        self.tables = HostTables(sizes) if tables is None else tables
        self.on_device = self.tables.on_device
        self.num_known = np.zeros(sizes.max_rows, np.int64)  # tokens in the row, computed or not
        self._num_blocks = [0] * sizes.max_rows
        self._row_of: dict[str, int] = {}
        self._req_ids: list[str] = []  # of the last build, and their rows
        self._rows = np.zeros(0, np.int64)

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        num_blocks, tables = self._num_blocks, self.tables
        for req_id in plan.leaves:
            row = self._row_of.pop(req_id, None)
            if row is not None:
                tables.stage_blocks(row, 0, (), clear_to=num_blocks[row])
                num_blocks[row] = 0
        for join, row in zip(plan.joins, rows, strict=True):
            self._row_of[join.req_id] = row
            tables.stage_tokens(row, 0, join.token_ids)
            self.num_known[row] = len(join.token_ids)
        for req_id, blocks in plan.new_blocks.items():
            row = self._row_of[req_id]
            tables.stage_blocks(row, num_blocks[row], blocks)
            num_blocks[row] += len(blocks)
        tables.write()
        if plan.leaves or plan.joins:
            self._req_ids = []

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        req_ids = list(plan.num_tokens)
        num_requests = len(req_ids)
        if req_ids != self._req_ids:
            self._req_ids = req_ids
            self._rows = np.fromiter(map(self._row_of.__getitem__, req_ids), np.int64, num_requests)
        num_new = np.fromiter(plan.num_tokens.values(), np.int64, num_requests)
        start = np.fromiter(plan.start.values(), np.int64, num_requests)
        query_start = np.zeros(num_requests + 1, np.int32)
        np.cumsum(num_new, out=query_start[1:])
        step = Step(self._rows, start, num_new, query_start)
        drafts = self._stage_drafts(plan, step) if plan.drafts else NO_DRAFTS
        seq_lens = start + num_new
        max_seq = int(seq_lens.max())
        columns = self.tables.gather(step, key, -(-max_seq // self.sizes.block_size))
        samples = find_samples(self.num_known[step.rows], num_new, seq_lens, query_start, drafts)
        return InputBatch(
            req_ids=req_ids,
            rows=step.rows,
            token_ids=columns.token_ids,
            positions=columns.positions,
            slot_mapping=columns.slot_mapping,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=columns.block_tables,
            sample_tokens=samples.tokens,
            sample_requests=samples.requests,
            draft_tokens=samples.drafts,
            num_tokens=int(query_start[-1]),
            max_query=int(num_new.max()),
            max_seq=max_seq,
            whole=key.whole,
        )

    def _stage_drafts(self, plan: StepPlan, step: Step) -> np.ndarray:
        """Behind the known tokens, where the next append() writes. -> [T] int64: drafts where the step's tokens are
        some, as the plan has them: what is proposed is known here, whatever it is proposed to."""
        found = np.zeros(step.query_start[-1], np.int64)
        known = self.num_known[step.rows].tolist()
        for i, (req_id, start) in enumerate(plan.start.items()):
            drafts = plan.drafts.get(req_id)
            if drafts:
                self.tables.stage_tokens(self._row_of[req_id], known[i], drafts)
                own = drafts[max(start - known[i], 0) : start + plan.num_tokens[req_id] - known[i]]
                found[step.query_start[i + 1] - len(own) : step.query_start[i + 1]] = own
        self.tables.write()
        return found

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray | Tensor) -> None:
        rows = batch.rows[requests]
        at = self.num_known[rows] + places_of(requests)
        self.num_known[rows] = at + 1
        self.tables.put(rows, at, tokens)
