"""PersistentInputs: vLLM V1's persistent batch. State stays in numpy arrays between steps; a plan changes only its
diffs.

A request keeps one row from joining to leaving, and a step gathers its rows in plan order. V1 instead kept the batch
dense by moving the last row into each hole; later vLLM went back to permanent rows, because everything that is
indexed by row (sampling state, LoRA slots, tokens still on the device) had to move along.

Most steps are like the one before: the same requests decode, one token each. Nothing is gathered for such a step
(`_Run`): its batch is the last one with one added to positions, slots and lengths, and with the tokens that were
appended. All that is looked up is the slot where somebody's next block begins. An array operation costs about a
microsecond, several with cold caches, for one request as for a hundred. So their number is what few requests cost: six
in such a step, some forty where all is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm.batch import BatchKey, InputBatch, InputSizes, by_group
from minivllm.plan import StepPlan
from minivllm.runner.inputs import find_samples, places_of

# Rows of a step's columns; a place: where in the flat table a token is. Of several KV groups each has a row of slots.
TOKENS, POSITIONS, PLACES, SLOTS = range(4)


class PersistentInputs:
    on_device = False

    def __init__(self, sizes: InputSizes):
        self.sizes = sizes
        # np.zeros maps pages on first touch, so room for the longest request in every row costs nothing by itself.
        self.token_ids = np.zeros((sizes.max_rows, sizes.max_model_len), np.int32)
        self.block_tables = np.zeros(sizes.tables_shape, np.int32)
        self._flat_tables = self.block_tables.reshape(sizes.max_rows, -1)  # as plans have them
        self.num_blocks = [0] * sizes.max_rows  # of all groups
        self._num_tokens = np.zeros(sizes.max_rows, np.int64)  # without those of the run
        self._flat = self.token_ids.reshape(-1)
        self._row_of: dict[str, int] = {}
        self._req_ids: list[str] = []  # of the last build, and their rows
        self._rows = np.zeros(0, np.int64)
        self._run: _Run | None = None

    @property
    def num_tokens(self) -> np.ndarray:
        """[max_rows] int64: known tokens of each row, computed or not."""
        if self._run is not None:
            self._num_tokens[self._rows] += self._run.take_lag()
        return self._num_tokens

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        if plan.leaves or plan.joins:
            self._end_run()
            self._req_ids = []
        for req_id in plan.leaves:
            self._row_of.pop(req_id, None)
        for join, row in zip(plan.joins, rows, strict=True):
            self._row_of[join.req_id] = row
            self.token_ids[row, : len(join.token_ids)] = join.token_ids
            self._num_tokens[row] = len(join.token_ids)
            self._flat_tables[row, : self.num_blocks[row]] = 0  # entries past a request's blocks name a valid one
            self.num_blocks[row] = 0
        for req_id, blocks in plan.new_blocks.items():
            row = self._row_of[req_id]
            first = self.num_blocks[row]
            write_blocks(self._flat_tables, row, first, blocks)
            self.num_blocks[row] = first + len(blocks)
            if self._run is not None:
                self._run.add_blocks(req_id, first, blocks)

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        if self._run is not None and self._run.goes_on(plan, key):
            return self._run.follow(self.block_tables)
        return self._gather(plan, key)

    def _gather(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        self._end_run()
        req_ids, num_requests = list(plan.num_tokens), len(plan.num_tokens)
        if is_new := req_ids != self._req_ids:
            self._req_ids = req_ids
            self._rows = np.fromiter(map(self._row_of.__getitem__, req_ids), np.int64, num_requests)
        rows = self._rows
        for req_id, drafts in plan.drafts.items():  # behind the known tokens, where the next append() writes
            row = self._row_of[req_id]
            self.token_ids[row, self._num_tokens[row] : self._num_tokens[row] + len(drafts)] = drafts
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
        columns = self._columns(token_rows, at, key.num_tokens)
        max_seq = int(seq_lens.max())
        samples = find_samples(self._num_tokens[rows], num_new, seq_lens, query_start, columns[TOKENS])
        batch = InputBatch(
            req_ids=req_ids,
            rows=rows,
            token_ids=columns[TOKENS],
            positions=columns[POSITIONS],
            slot_mapping=slots_in(columns),
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=by_group(self.block_tables[rows, : -(-max_seq // self.sizes.block_size)]),
            sample_tokens=samples.tokens,
            sample_requests=samples.requests,
            draft_tokens=samples.drafts,
            num_tokens=num_tokens,
            max_query=int(num_new.max()),
            max_seq=max_seq,
            whole=key.whole,
        )
        if not is_new and num_tokens == num_requests == len(samples.tokens) and not plan.drafts:
            self._run = _Run(batch, columns, key, self.sizes)
        return batch

    def _columns(self, rows: np.ndarray, at: np.ndarray, num_padded: int) -> np.ndarray:
        """rows, at [T]: of each token its request's row and its position.
        -> [3 + groups, padded T] int64: ids, positions, places, slots."""
        num_tokens, block_size = len(at), self.sizes.block_size
        columns = np.zeros((SLOTS + self.sizes.num_groups, num_padded), np.int64)
        token_ids, positions, places = columns[:SLOTS]
        slots = slots_in(columns)
        places[:num_tokens] = rows * self.sizes.max_model_len + at
        token_ids[:num_tokens] = self._flat.take(places[:num_tokens])
        positions[:num_tokens] = at
        slots[..., :num_tokens] = self.block_tables[rows, at // block_size].T
        slots[..., :num_tokens] *= block_size
        slots[..., :num_tokens] += at % block_size
        slots[..., num_tokens:] = self.sizes.spare_block * block_size
        return columns

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray) -> None:
        if self._run is not None and self._run.is_whole(batch, requests):
            self._flat[self._run.advance(tokens)] = tokens
            return
        self._end_run()
        rows = batch.rows[requests]
        at = self._num_tokens[rows] + places_of(requests)
        # A request's very last token is never fed back and may lie past the longest length: it has no place here.
        fits = at < self.sizes.max_model_len
        self.token_ids[rows[fits], at[fits]] = tokens[fits]
        self._num_tokens[rows] = at + 1

    def _end_run(self) -> None:
        if self._run is not None:
            self._num_tokens[self._rows] += self._run.take_lag()
            self._run = None


def slots_in(columns: np.ndarray) -> np.ndarray:
    """A view of the slots: [padded T], or of several KV groups [groups, padded T]."""
    return columns[SLOTS] if len(columns) == SLOTS + 1 else columns[SLOTS:]


def write_blocks(tables: np.ndarray, row: int, first: int, blocks: Sequence[int]) -> None:
    if len(blocks) == 1:  # a decode's: a slice takes several times as long
        tables[row, first] = blocks[0]
    else:
        tables[row, first : first + len(blocks)] = blocks


class _Run:
    """Steps in which the same requests compute one token each, their last known one.

    What it hands out is new for each step, but for what stays equal as long as the run lasts. Whatever is none of its
    steps ends it: a join, a leave, drafts, a prompt's piece, another order, another padding, a step whose tokens were
    not all appended.
    """

    def __init__(self, batch: InputBatch, columns: np.ndarray, key: BatchKey, sizes: InputSizes):
        """columns [3 + groups, padded T] int64, those of the batch."""
        self.sizes, self.key, self.batch, self.columns = sizes, key, batch, columns
        self.num_requests = batch.num_requests
        self.lag = 0  # tokens of each row that PersistentInputs has not counted
        self.step = np.zeros_like(columns)
        self.step[POSITIONS:, : self.num_requests] = 1
        self.sum_start = int(batch.seq_lens.sum())  # of the next step, if it is one of the run
        # All grow alike, so who comes to a block's first token does so again block_size steps later.
        self.phase = 0  # steps so far, modulo block_size
        self.enters_at = -columns[POSITIONS, : self.num_requests] % sizes.block_size
        self.entering: dict[int, np.ndarray | None] = dict.fromkeys(self.enters_at.tolist())  # by phase, once asked for
        self.tables: np.ndarray | None = batch.block_tables
        self.is_handed_out = True  # the tables: from then on they are another's to read
        self.places: dict[str, int] = {}  # of the requests in the batch, once somebody asks

    def goes_on(self, plan: StepPlan, key: BatchKey) -> bool:
        """Without drafts no request starts behind its last known token, so if the sum of all starts is that of the last
        known tokens, each starts there, and the last step's tokens were all appended."""
        return (
            key == self.key
            and not plan.drafts
            and list(plan.num_tokens) == self.batch.req_ids
            and sum(plan.num_tokens.values()) == self.num_requests
            and sum(plan.start.values()) == self.sum_start
        )

    def add_blocks(self, req_id: str, first: int, blocks: Sequence[int]) -> None:
        if self.sizes.num_groups > 1:
            self.tables = None  # who has tables in several groups copies them anew
        if self.tables is None or first >= self.tables.shape[1]:
            return  # they are copied with the column
        if first + len(blocks) > self.tables.shape[1]:
            self.tables = None
            return
        if not self.places:
            self.places = {req_id: place for place, req_id in enumerate(self.batch.req_ids)}
        if req_id not in self.places:
            return  # a fork that waits for its part of the budget may be given blocks beside a run of others
        if self.is_handed_out:
            self.tables, self.is_handed_out = self.tables.copy(), False
        write_blocks(self.tables, self.places[req_id], first, blocks)

    def follow(self, block_tables: np.ndarray) -> InputBatch:
        """block_tables: of InputSizes.tables_shape."""
        before, columns = self.batch, self.columns
        self.sum_start += self.num_requests
        self.phase = (self.phase + 1) % self.sizes.block_size
        if self.phase in self.entering:
            self._enter_blocks(block_tables)
        max_seq = before.max_seq + 1
        width = -(-max_seq // self.sizes.block_size)
        if self.tables is None or self.tables.shape[-1] != width:
            self.tables = by_group(block_tables[before.rows, :width])
        self.is_handed_out = True
        self.batch = InputBatch(
            req_ids=before.req_ids,
            rows=before.rows,
            token_ids=columns[TOKENS],
            positions=columns[POSITIONS],
            slot_mapping=slots_in(columns),
            query_start=before.query_start,
            seq_lens=before.seq_lens + 1,
            block_tables=self.tables,
            sample_tokens=before.sample_tokens,
            sample_requests=before.sample_requests,
            draft_tokens=before.draft_tokens,
            num_tokens=self.num_requests,
            max_query=1,
            max_seq=max_seq,
            whole=before.whole,
        )
        return self.batch

    def _enter_blocks(self, block_tables: np.ndarray) -> None:
        """The slots of those whose token is the first of a block. Those of the others are one further."""
        entering = self.entering[self.phase]
        if entering is None:
            entering = self.entering[self.phase] = (self.enters_at == self.phase).nonzero()[0]
        block_size = self.sizes.block_size
        blocks = self.columns[POSITIONS, entering] // block_size
        found = block_tables[self.batch.rows[entering], blocks]
        slots_in(self.columns)[..., entering] = np.multiply(found, block_size, dtype=np.int64).T

    def is_whole(self, batch: InputBatch, requests: np.ndarray) -> bool:
        """Whether these are the run's last batch and one token of each of its requests, all of them with a place."""
        is_last = batch.seq_lens is self.batch.seq_lens  # made for it, and kept where another column is replaced
        return is_last and len(requests) == self.num_requests and batch.max_seq < self.sizes.max_model_len

    def advance(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [R] int64, of the next step. -> [R] int64: their places."""
        self.columns = self.columns + self.step
        self.columns[TOKENS, : self.num_requests] = tokens
        self.lag += 1
        return self.columns[PLACES, : self.num_requests]

    def take_lag(self) -> int:
        lag, self.lag = self.lag, 0
        return lag
