"""InputBatch: one step's inputs, the common product of all input builders. No torch here.

Arrays are numpy. Four columns are tensors if the builder's tables are on the device (runner/inputs_gather.py): what a
model and its attention read. All that decides what is done next can be had from counts, and is the host's.

Padding: a forward may be asked for more token rows than the plan has (`padded_tokens`). The extra rows are dummies that
compute something harmless: token 0 at position 0, written to the spare block that no table names. A whole forward that
was captured wants more requests too: `pad_requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class InputSizes:
    max_rows: int  # requests that a worker can hold
    max_model_len: int  # tokens a request
    block_size: int
    spare_block: int  # one block that no table names: padding tokens are written there
    num_groups: int = 1  # KV groups (kv_groups.py): block tables that each request has

    @property
    def max_blocks(self) -> int:
        """Of a request in one group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def tables_shape(self) -> tuple[int, ...]:
        """Of all requests' tables: [rows, blocks] or, of several groups, [rows, blocks, groups]: in each row, flat, the
        blocks as a plan has them."""
        groups = () if self.num_groups == 1 else (self.num_groups,)
        return (self.max_rows, self.max_blocks, *groups)


class BatchKey(NamedTuple):
    """The padded shape of a forward: what a compiled piece or a captured graph is chosen by."""

    num_tokens: int
    queries: int = 0  # of a whole forward that was captured: so many tokens of each request; 0: any other forward

    @property
    def whole(self) -> bool:
        return self.queries > 0


class Overlay(NamedTuple):
    """Token rows first : end of a batch are no tokens: what a model's first layer is given there."""

    first: int
    end: int
    x: Tensor  # [end - first, hidden], on the model's device


@dataclass(slots=True)
class InputBatch:
    """T tokens of R requests in plan order. Arrays may be views of a builder's buffers: valid until its next
    build(). On the device: as tensors of the same dtype there."""

    req_ids: list[str]  # [R]
    rows: np.ndarray  # [R] int64: each request's permanent row in the worker's state (sampling state is indexed by it)
    token_ids: np.ndarray | Tensor  # [padded T] int64; a tensor also if only the device knows some (async_sampling.py)
    positions: np.ndarray | Tensor  # [padded T] int64
    # [padded T] int64: block * block_size + offset, where its K and V are written. Of several KV groups these and the
    # block tables are [groups, ..], and of_group() has one group's
    slot_mapping: np.ndarray | Tensor
    query_start: np.ndarray  # [R + 1] int32: request r owns token rows query_start[r] : query_start[r + 1]
    seq_lens: np.ndarray  # [R] int32: tokens in the cache after this step, the queries included
    block_tables: np.ndarray | Tensor  # [R, at least max blocks in use] int32; entries past a request's blocks are 0, a
    # valid block. On the device those of a whole forward have rows for its padding requests too
    sample_tokens: np.ndarray  # [S] int64: the token rows whose logits are sampled from
    sample_requests: np.ndarray  # [S] int64: for each of them, which request of this batch (index into req_ids)
    draft_tokens: np.ndarray  # [S] int64: what was proposed for the place that each of them draws; -1: nothing
    num_tokens: int  # T without padding
    max_query: int  # longest query of a request in this batch
    max_seq: int  # longest seq_lens
    whole: bool = False  # BatchKey.whole
    token_types: np.ndarray | None = None  # [padded T] int64: of pairs of texts, which of the two a token is of
    # What a model's own state adds (runner/model_state.py):
    encoded: np.ndarray | None = None  # [R] int64: which slot of each cross layer's K and V a request reads
    overlays: Sequence[Overlay] = ()
    rope_positions: np.ndarray | Tensor | None = None  # [3, padded T] int64 for M-RoPE; None: rotated by `positions`

    @property
    def num_requests(self) -> int:
        return len(self.req_ids)

    @property
    def padded_tokens(self) -> int:
        return len(self.token_ids)

    def of_group(self, group: int) -> InputBatch:
        """What the attention of one KV group reads. All of it, where there is one."""
        if self.slot_mapping.ndim == 1:
            return self
        return replace(self, slot_mapping=self.slot_mapping[group], block_tables=self.block_tables[group])

    def positions_of(self, tokens: np.ndarray, requests: np.ndarray) -> np.ndarray:
        """Positions of some token rows, wherever that column lies. tokens [N] int64, requests [N]: whose they are
        (index into req_ids)."""
        return tokens + (self.seq_lens - self.query_start[1:])[requests]


def pad_requests(batch: InputBatch, sizes: InputSizes, width: int) -> InputBatch:
    """batch: max_query tokens of each request. -> the same of as many requests as its padded token rows make, all
    shapes a function of these two numbers and of `width`, columns of the block tables: at least those in use.

    A padding request is no longer than its queries and lies in the spare block, at the slots which its own tokens are
    written to in this step: nothing is read that was not written.
    """
    num_real, queries = batch.num_requests, batch.max_query
    num_requests = batch.padded_tokens // queries
    num_padding = num_requests - num_real
    seq_lens = np.full(num_requests, queries, np.int32)
    seq_lens[:num_real] = batch.seq_lens
    tables, slots = batch.block_tables, batch.slot_mapping
    if isinstance(tables, np.ndarray):
        tables, slots = _pad_columns(batch, sizes, num_requests, max(width, -(-queries // sizes.block_size)))
    assert tables.shape[-2] == num_requests, "on the device they are gathered with padding"
    assert tables.shape[-1] >= width
    return replace(
        batch,
        req_ids=[*batch.req_ids, *[""] * num_padding],
        slot_mapping=slots,
        query_start=np.arange(0, batch.padded_tokens + 1, queries, dtype=np.int32),
        seq_lens=seq_lens,
        block_tables=tables,
        num_tokens=batch.padded_tokens,
        max_seq=sizes.max_model_len,
    )


def _pad_columns(batch: InputBatch, sizes: InputSizes, num_requests: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables [num_requests, width] and slots; of several KV groups [groups, ..]."""
    num_real, queries = batch.num_requests, batch.max_query
    tables = np.zeros((*batch.block_tables.shape[:-2], num_requests, width), np.int32)
    tables[..., :num_real, : batch.block_tables.shape[-1]] = batch.block_tables
    tables[..., num_real:, : -(-queries // sizes.block_size)] = sizes.spare_block
    slots = batch.slot_mapping.copy()
    offsets = np.tile(np.arange(queries) % sizes.block_size, num_requests - num_real)
    slots[..., batch.num_tokens :] = sizes.spare_block * sizes.block_size + offsets
    return tables, slots


def by_group(tables: np.ndarray) -> np.ndarray:
    """Rows [R, width] of tables of InputSizes.tables_shape, as InputBatch has them: of several groups [R, width,
    groups] -> [groups, R, width]."""
    return tables if tables.ndim == 2 else tables.transpose(2, 0, 1)
