"""The seam of input preparation: how a plan becomes arrays. Three generations of vLLM, three builders, one product.

All of them keep the same knowledge of each request (its tokens, its blocks, its row); they differ in where it lives and
in what a step costs. No torch here: arrays are numpy, so builders are tested without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from minivllm.plan import StepPlan
from minivllm.runner.batch import InputBatch


@dataclass(frozen=True, slots=True)
class InputSizes:
    max_rows: int  # requests that a worker can hold
    max_model_len: int  # tokens a request
    block_size: int
    spare_block: int  # one block that no table names: padding tokens are written there

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


class BatchKey(NamedTuple):
    """The padded shape of a forward: what a compiled piece or a captured graph is chosen by."""

    num_tokens: int


class InputBuilder(Protocol):
    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        """Leaves, then joins (rows[i] is the row of plan.joins[i]), then new blocks."""
        ...

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        """Sampled from: every token of the plan from a request's last known one on, its drafts included."""
        ...

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray) -> None:
        """tokens [N] are known from now on; requests [N]: whose (index into batch.req_ids), ascending. A request may
        have several, in sequence order."""
        ...


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
