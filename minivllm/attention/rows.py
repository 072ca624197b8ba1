"""Which rows of a batch belong to its decodes, and which to its other requests: for backends that call a library once
for each, and for those that lend a part of a batch to another backend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.upload import select, upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class Part(NamedTuple):
    """Some requests of a batch, in the batch's order."""

    requests: np.ndarray  # [n] int64
    index: slice | np.ndarray  # [queries] int64: their token rows; a slice where they lie together
    rows: slice | Tensor  # the same on the device
    query_start: np.ndarray  # [n + 1] int32: request i of the part owns query_start[i] : query_start[i + 1] of the rows

    @property
    def max_query(self) -> int:
        return int(np.diff(self.query_start).max())


def take(x: Tensor, rows: slice | Tensor) -> Tensor:
    """x [T, ...] -> [queries, ...]; a view where the rows lie together."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def put(out: Tensor, rows: slice | Tensor, result: Tensor) -> None:
    if isinstance(rows, slice):
        out[rows] = result
    else:
        out.index_copy_(0, rows, result)


def send(column: np.ndarray | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A column of a batch on the device, int32 or int64. Of an array it is a copy, which may outlive the batch."""
    if isinstance(column, Tensor):
        return column.to(dtype)
    return upload(column.astype(np.int32 if dtype == torch.int32 else np.int64), device)


def split(batch: InputBatch, device: torch.device) -> tuple[Part | None, Part | None]:
    """The decodes of a batch (requests with one query), and all others; None where there are none."""
    bounds = batch.query_start[: batch.num_requests + 1].astype(np.int64)
    counts = np.diff(bounds)
    decodes, others = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    return _part(decodes, bounds, counts, device), _part(others, bounds, counts, device)


def _part(requests: np.ndarray, bounds: np.ndarray, counts: np.ndarray, device: torch.device) -> Part | None:
    if not requests.size:
        return None
    query_start = np.concatenate([[0], np.cumsum(counts[requests])])
    first, last = int(bounds[requests[0]]), int(bounds[requests[-1] + 1])
    if last - first == query_start[-1]:
        rows = slice(first, last)
        return Part(requests, rows, rows, query_start.astype(np.int32))
    index = np.arange(query_start[-1]) + np.repeat(bounds[requests] - query_start[:-1], counts[requests])
    return Part(requests, index, upload(index, device), query_start.astype(np.int32))


def batch_of(batch: InputBatch, part: Part) -> InputBatch:
    """The part as a batch of its own, without padding: what a backend prepares from. Nothing is sampled in it, and
    its tokens, which the device alone may know, are all 0."""
    seq_lens = batch.seq_lens[part.requests]
    return replace(
        batch,
        req_ids=[batch.req_ids[r] for r in part.requests],
        rows=batch.rows[part.requests],
        token_ids=np.zeros(part.query_start[-1], np.int64),
        positions=_tokens(batch.positions, part),
        slot_mapping=_tokens(batch.slot_mapping, part),
        query_start=part.query_start,
        seq_lens=seq_lens,
        block_tables=select(batch.block_tables, part.requests),
        sample_tokens=batch.sample_tokens[:0],
        sample_requests=batch.sample_requests[:0],
        draft_tokens=batch.draft_tokens[:0],
        num_tokens=int(part.query_start[-1]),
        max_query=part.max_query,
        max_seq=batch.max_seq if batch.whole else int(seq_lens.max()),
    )


def _tokens(column: np.ndarray | Tensor, part: Part) -> np.ndarray | Tensor:
    return column[part.index] if isinstance(column, np.ndarray) else take(column, part.rows)


def with_dense_heads(x: Tensor) -> Tensor:
    """[T, heads, head_size] in which a token's heads lie together; tokens may be apart (views of one projection)."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()
