"""The seam of input preparation: how a plan becomes arrays. Three generations of vLLM, three builders, one product.

All of them keep the same knowledge of each request (its tokens, its blocks, its row); they differ in where it lives and
in what a step costs. No torch here: arrays are numpy, so builders are tested without a model. Where the third has its
tables on a GPU, they are tensors (tables_device.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from minivllm.batch import BatchKey, InputBatch
from minivllm.plan import Join, StepPlan

if TYPE_CHECKING:
    from torch import Tensor


class InputBuilder(Protocol):
    on_device: bool  # whether the tables are there that batches are made from: then four of their columns are, too

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        """Leaves, then joins (rows[i] is the row of plan.joins[i]), then new blocks."""
        ...

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        """Sampled from: every token of the plan from a request's last known one on, its drafts included."""
        ...

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray | Tensor) -> None:
        """tokens [N] are known from now on; requests [N]: whose (index into batch.req_ids), ascending. A request may
        have several, in sequence order. A tensor: of tokens on the device, one a request (async_sampling.py)."""
        ...


class Samples(NamedTuple):
    """The columns of InputBatch that say what is sampled."""

    tokens: np.ndarray  # [S] int64
    requests: np.ndarray  # [S] int64
    drafts: np.ndarray  # [S] int64


def find_samples(
    num_known: np.ndarray, num_new: np.ndarray, seq_lens: np.ndarray, query_start: np.ndarray, token_ids: np.ndarray
) -> Samples:
    """A request's tokens from its last known one on. num_known, num_new, seq_lens [R]; query_start [R + 1]; token_ids
    [padded T]."""
    if query_start[-1] == len(num_new):  # one token each: a step of decodes
        requests = np.flatnonzero(seq_lens >= num_known)
        return Samples(requests, requests, np.full(len(requests), -1, np.int64))
    num_samples = np.minimum(seq_lens - num_known + 1, num_new)
    requests = np.flatnonzero(num_samples > 0)
    num_samples = num_samples[requests]
    ends = query_start[1:][requests].astype(np.int64)
    if len(requests) == num_samples.sum():
        return Samples(ends - 1, requests, np.full(len(requests), -1, np.int64))
    behind = np.cumsum(num_samples)
    tokens = np.arange(behind[-1]) + np.repeat(ends - behind, num_samples)
    drafts = token_ids[np.minimum(tokens + 1, len(token_ids) - 1)]
    drafts[behind - 1] = -1
    return Samples(tokens, np.repeat(requests, num_samples), drafts)


def places_of(requests: np.ndarray) -> np.ndarray | int:
    """requests [N], ascending -> [N], or 0 for all: how many equal ones come before."""
    if len(requests) > 1 and (requests[1:] == requests[:-1]).any():
        return np.arange(len(requests)) - np.searchsorted(requests, requests)
    return 0


class Rows:
    """Request id -> permanent row of a worker's per-request state. A row that is left is the last to be given out
    again, so that nothing still reading it (a copy in flight) sees it change."""

    def __init__(self, max_rows: int):
        self.of: dict[str, int] = {}
        self._free = list(range(max_rows))

    def join(self, req_id: str) -> int:
        assert req_id not in self.of, f"{req_id} has a row already"
        row = self.of[req_id] = self._free.pop(0)
        return row

    def leave(self, req_id: str) -> int:
        row = self.of.pop(req_id)
        self._free.append(row)
        return row


class RowState(Protocol):
    """What a part keeps of each request, at its row."""

    def join(self, row: int, join: Join) -> None: ...
    def leave(self, row: int) -> None: ...


def leave_and_join(plan: StepPlan, rows: Rows, states: Sequence[RowState], inputs: InputBuilder) -> None:
    """Who leaves gives up a row before whoever joins gets one."""
    for req_id in plan.leaves:
        if req_id in rows.of:  # not there if the step that it should have joined in failed
            row = rows.leave(req_id)
            for state in states:
                state.leave(row)
    joined = [rows.join(join.req_id) for join in plan.joins]
    for row, join in zip(joined, plan.joins, strict=True):
        for state in states:
            state.join(row, join)
    inputs.apply(plan, joined)
