"""InputBatch: one step's inputs as numpy arrays, the common product of all input builders. No torch here.

Padding: a forward may be asked for more token rows than the plan has (`padded_tokens`). The extra rows are dummies that
compute something harmless: token 0 at position 0, written to the spare block that no table names. A whole forward that
was captured wants more requests too: `pad_requests`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from minivllm.runner.inputs import InputSizes


@dataclass(slots=True)
class InputBatch:
    """T tokens of R requests in plan order. Arrays may be views of a builder's buffers: valid until its next
    build()."""

    req_ids: list[str]  # [R]
    rows: np.ndarray  # [R] int64: each request's permanent row in the worker's state (sampling state is indexed by it)
    token_ids: np.ndarray  # [padded T] int64; a tensor if some are known to the device alone (runner/late.py)
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
    whole: bool = False  # BatchKey.whole

    @property
    def num_requests(self) -> int:
        return len(self.req_ids)

    @property
    def padded_tokens(self) -> int:
        return len(self.token_ids)


def pad_requests(batch: InputBatch, sizes: InputSizes) -> InputBatch:
    """batch: one token of each request. -> as many requests as token rows, all shapes a function of that number.

    A padding request is one token long and lies in the spare block, at the slot which its own token is written to in
    this step: nothing is read that was not written.
    """
    num_real, num_requests = batch.num_requests, batch.padded_tokens
    tables = np.zeros((num_requests, sizes.max_blocks), np.int32)
    tables[:num_real, : batch.block_tables.shape[1]] = batch.block_tables
    tables[num_real:, 0] = sizes.spare_block
    seq_lens = np.ones(num_requests, np.int32)
    seq_lens[:num_real] = batch.seq_lens
    return replace(
        batch,
        req_ids=[*batch.req_ids, *[""] * (num_requests - num_real)],
        query_start=np.arange(num_requests + 1, dtype=np.int32),
        seq_lens=seq_lens,
        block_tables=tables,
        num_tokens=num_requests,
        max_seq=sizes.max_model_len,
    )
