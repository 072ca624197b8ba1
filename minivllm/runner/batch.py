"""InputBatch: one step's inputs as numpy arrays, the common product of all input builders. No torch here.

Padding: a forward may be asked for more token rows than the plan has (`padded_tokens`). The extra rows are dummies that
compute something harmless: token 0 at position 0, written to the spare block that no table names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class InputBatch:
    """T tokens of R requests in plan order. Arrays may be views of a builder's buffers: valid until its next
    build()."""

    req_ids: list[str]  # [R]
    rows: np.ndarray  # [R] int64: each request's permanent row in the worker's state (sampling state is indexed by it)
    token_ids: np.ndarray  # [padded T] int64
    positions: np.ndarray  # [padded T] int64
    slot_mapping: np.ndarray  # [padded T] int64: block * block_size + offset, where this token's K and V are written
    query_start: np.ndarray  # [R + 1] int32: request r owns token rows query_start[r] : query_start[r + 1]
    seq_lens: np.ndarray  # [R] int32: tokens in the cache after this step, the queries included
    block_tables: (
        np.ndarray
    )  # [R, at least max blocks in use] int32; entries past a request's blocks are 0, a valid block
    sample_tokens: np.ndarray  # [S] int64: the token rows whose logits are sampled from
    sample_requests: np.ndarray  # [S] int64: for each of them, which request of this batch (index into req_ids)
    draft_tokens: np.ndarray  # [S] int64: what was proposed for the place that each of them draws; -1: nothing
    num_tokens: int  # T without padding
    max_query: int  # longest query of a request in this batch
    max_seq: int  # longest seq_lens

    @property
    def num_requests(self) -> int:
        return len(self.req_ids)

    @property
    def padded_tokens(self) -> int:
        return len(self.token_ids)
