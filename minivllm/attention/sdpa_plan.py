"""What the layers of a step share: which rows of the cache to read, who is batched with whom, and the masks.

Decodes (one query) are grouped by length and padded to the longest of their group; each group's blocks are copied side
by side into a workspace that is kept, since fresh memory costs page faults. Prefills (several queries) stand alone.
Blocks with consecutive ids are one piece of the cache, and nothing is copied.

Slots that no sequence owns may hold anything, NaN too, and no mask can undo 0 * NaN. So one request alone reads exactly
its own keys, and what a group copies beyond the end of a request (`holes`) is zeroed before it is multiplied.

Numpy does the index arithmetic: on arrays this small it costs less than torch's calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.attention.reference import visible
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

# Set by bench/attention.py on 2 cores; results are equal for any value.
FUSED_KEYS = 3072  # requests * kv_heads * keys up to which decodes take the fused kernel
GROUP_BYTES = 8 << 20  # K and V that a group may copy: above, the workspace falls out of the last-level cache
SPLIT_BYTES = 1 << 20  # padded K and V that cost as much as a group of their own
QUERY_TILE = 128  # query rows at a time: their scores stay in the cache, and keys that come later are not multiplied


class Keys(NamedTuple):
    """Where some requests' K and V are read: a run of the cache, or rows of it that are copied to the workspace."""

    start: int  # slot of the first key; meant only without an index
    num_keys: int  # keys a request, padding included
    index: Tensor | None = None  # [2 * requests * kv_heads * blocks a request]: which rows of block_size keys to copy
    dense: Tensor | None = None  # [rows, block_size * head_size]: the copy
    keys: Tensor | None = None  # [requests, kv_heads, num_keys, head_size], a view of the copy
    values: Tensor | None = None

    def read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, each [requests, kv_heads, num_keys, head_size]. A copy is valid until the next read."""
        if self.index is None:
            run = kv.flatten(2, 3).narrow(2, self.start, self.num_keys)
            return run[0:1], run[1:2]
        torch.index_select(kv.view(-1, self.dense.shape[1]), 0, self.index, out=self.dense)
        return self.keys, self.values


@dataclass(slots=True)
class Decodes:
    """Requests with one query each, whose keys are padded to one length."""

    rows: slice | Tensor  # their query rows: a slice, or [requests] int64
    num_requests: int
    source: Keys
    fused: bool
    bias: Tensor | None = (
        None  # 0 or -inf: [requests, 1, 1, num_keys] if fused, else [requests * kv_heads, 1, num_keys]
    )
    distances: Tensor | None = None  # [requests, num_keys] float32: key - query, where the layer has slopes
    holes: Tensor | None = None  # of the copy as [2 * requests * kv_heads * num_keys, head_size], rows of no request


class Tile(NamedTuple):
    """Some queries of a prefill and the keys that they may see."""

    rows: slice  # query rows of the batch
    keys: slice  # of the prefill's keys
    mask: Tensor | None  # [queries, last keys], added to the scores; None: causal, with as many keys as queries


class Prefill(NamedTuple):
    """One request with several queries."""

    rows: slice
    source: Keys | None  # None: nothing precedes, so that the step's own k and v are all there is
    first: int  # of the keys that are read, the first that is seen by any query
    num_keys: int
    fused: bool  # masks reach over all keys of a tile
    tiles: list[Tile]


class View(NamedTuple):
    """A step as the layers of one AttentionSpec see it."""

    decodes: list[Decodes]
    prefills: list[Prefill]


class _Extents(NamedTuple):
    """What requests read of their block tables. Arrays [requests] int64."""

    query_start: np.ndarray
    num_queries: np.ndarray
    seq_len: np.ndarray
    first_key: np.ndarray  # the first position that a query sees
    first_block: np.ndarray  # column of the block table that holds it
    num_blocks: np.ndarray  # from there to the last

    def take(self, requests: np.ndarray) -> _Extents:
        return _Extents(*(array[requests] for array in self))


class Planner:
    """Makes the View of each step. Knows the pool's size and dtype; owns the workspace and the masks."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        matmul_dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.matmul_dtype = matmul_dtype
        self.device = device
        # Where oneDNN multiplies 16 bits, masked products beat the CPU's fused kernel, which gains nothing from them.
        self.fast_products = device.type == "cpu" and dtype.itemsize == 2 and matmul_dtype == dtype
        self.workspace = torch.empty(0, dtype=dtype, device=device)
        self.corners: dict[int | None, Tensor] = {}

    def view(self, spec: AttentionSpec, batch: InputBatch) -> View:
        extents = self._extents(spec, batch)
        single = np.flatnonzero(extents.num_queries == 1)
        token_bytes = 2 * spec.num_kv_heads * spec.head_size * self.dtype.itemsize
        groups = split_by_length(extents.num_blocks[single], token_bytes * self.block_size)
        return View(
            [self._decodes(spec, extents.take(single[g]), batch.block_tables[single[g]]) for g in groups],
            [
                self._prefill(spec, _Extents(*(int(array[r]) for array in extents)), batch.block_tables[r])
                for r in np.flatnonzero(extents.num_queries > 1)
            ],
        )

    def _extents(self, spec: AttentionSpec, batch: InputBatch) -> _Extents:
        bounds = batch.query_start[: batch.num_requests + 1].astype(np.int64)
        seq_len = batch.seq_lens[: batch.num_requests].astype(np.int64)
        num_queries = np.diff(bounds)
        first_key = np.zeros_like(seq_len)
        if spec.sliding_window is not None:  # where the window of the first query begins
            first_key = np.maximum(seq_len - num_queries - spec.sliding_window + 1, 0)
        first_block = first_key // self.block_size
        num_blocks = -(-seq_len // self.block_size) - first_block
        return _Extents(bounds[:-1], num_queries, seq_len, first_key, first_block, num_blocks)

    def _decodes(self, spec: AttentionSpec, extents: _Extents, tables: np.ndarray) -> Decodes:
        num_requests, width = len(tables), int(extents.num_blocks.max())
        # Behind the end of a shorter request its first block is read again: valid, as a rule full of its own keys.
        column = np.arange(width)
        column = np.where(column < extents.num_blocks[:, None], column, 0) + extents.first_block[:, None]
        blocks = tables[np.arange(num_requests)[:, None], column].astype(np.int64)  # [requests, width]
        origin = extents.first_block * self.block_size  # position of the first key that is read
        begin, end = extents.first_key - origin, extents.seq_len - origin
        rows = as_slice(extents.query_start)
        if rows is None:
            rows = upload(extents.query_start, self.device)
        num_keys = width * self.block_size
        fused = is_plain(spec) and num_requests * spec.num_kv_heads * num_keys <= FUSED_KEYS
        if num_requests == 1 and is_run(blocks[0]):
            start, count = int(blocks[0, 0]) * self.block_size + int(begin[0]), int(end[0] - begin[0])
            return Decodes(rows, 1, Keys(start, count), fused, distances=self._distances(spec, end - begin, count))
        bias = self._bias(begin, end, num_keys)
        if bias is not None and not fused:
            bias = bias.to(self.matmul_dtype).expand(-1, spec.num_kv_heads, -1, -1).flatten(0, 1)
        holes, distances = self._holes(spec, extents.num_blocks, end, width), self._distances(spec, end, num_keys)
        return Decodes(rows, num_requests, self._gather(spec, blocks), fused, bias, distances, holes)

    def _distances(self, spec: AttentionSpec, end: np.ndarray, num_keys: int) -> Tensor | None:
        """[requests, num_keys]: of each key to the last one before the request's end, which is the query's own."""
        if spec.slopes is None:
            return None
        return upload((np.arange(num_keys) - (end[:, None] - 1)).astype(np.float32), self.device)

    def _gather(self, spec: AttentionSpec, blocks: np.ndarray) -> Keys:
        """blocks [requests, blocks a request]"""
        planes = np.arange(2 * spec.num_kv_heads).reshape(2, 1, -1, 1) * self.num_blocks
        index = (planes + blocks[None, :, None, :]).reshape(-1)
        columns = self.block_size * spec.head_size
        size = index.size * columns
        if self.workspace.numel() < size:
            self.workspace = torch.empty(size, dtype=self.dtype, device=self.device)
        dense = self.workspace[:size].view(-1, columns)
        num_keys = blocks.shape[1] * self.block_size
        keys, values = dense.view(2, len(blocks), spec.num_kv_heads, num_keys, spec.head_size)
        return Keys(0, num_keys, upload(index, self.device), dense, keys, values)

    def _bias(self, begin: np.ndarray, end: np.ndarray, num_keys: int) -> Tensor | None:
        """[requests, 1, 1, num_keys]: 0 from begin to end, else -inf. None: 0 everywhere."""
        if not begin.any() and (end == num_keys).all():
            return None
        key = np.arange(num_keys)
        unseen = upload((key >= end[:, None]) | (key < begin[:, None]), self.device)[:, None, None]
        return torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, -torch.inf)

    def _holes(self, spec: AttentionSpec, num_blocks: np.ndarray, end: np.ndarray, width: int) -> Tensor | None:
        """Rows behind the end of a last block, and of its copies where it was the request's first block too."""
        request, column = np.arange(len(end)), num_blocks - 1
        short = np.flatnonzero(num_blocks == 1)
        request = np.concatenate([request, short.repeat(width - 1)])
        column = np.concatenate([column, np.tile(np.arange(1, width), len(short))])
        num_owned = end[request] - (num_blocks[request] - 1) * self.block_size
        block, offset = np.nonzero(np.arange(self.block_size) >= num_owned[:, None])
        if not block.size:
            return None
        planes = np.arange(2)[:, None, None] * len(end) + request[block, None]  # [2, holes, 1]
        heads = planes * spec.num_kv_heads + np.arange(spec.num_kv_heads)  # [2, holes, kv_heads]
        key = column[block] * self.block_size + offset
        rows = heads * (width * self.block_size) + key[:, None]
        return upload(rows.reshape(-1), self.device)

    def _prefill(self, spec: AttentionSpec, extents: _Extents, table: np.ndarray) -> Prefill:
        """extents of one request: integers."""
        begin, num_queries, seq_len, first_key, first_block, num_blocks = extents
        rows, window, source, origin = slice(begin, begin + num_queries), spec.sliding_window, None, 0
        fused = is_plain(spec) and not self.fast_products
        if seq_len > num_queries:
            blocks = table[first_block : first_block + num_blocks].astype(np.int64)
            num_keys, origin = num_blocks * self.block_size, first_block * self.block_size
            source = Keys(int(blocks[0]) * self.block_size, num_keys) if is_run(blocks) else None
            source = source or self._gather(spec, blocks[None])
        elif fused and (window is None or num_queries <= window):
            return Prefill(rows, None, 0, seq_len, fused, [Tile(rows, slice(0, seq_len), None)])
        shift = seq_len - rows.stop
        tiles = [
            self._tile(window, a, min(a + QUERY_TILE, rows.stop), shift, first_key, fused)
            for a in range(begin, rows.stop, QUERY_TILE)
        ]
        return Prefill(rows, source, first_key - origin, seq_len - first_key, fused, tiles)

    def _tile(self, window: int | None, begin: int, end: int, shift: int, first_key: int, fused: bool) -> Tile:
        """Query rows begin : end, at positions begin + shift and on. Keys count from first_key."""
        low = first_key if window is None else max(begin + shift - window + 1, first_key)
        high = end + shift
        # Without a window every query sees all keys before the first query's: products need no mask there.
        num_masked = high - low if fused or window is not None else end - begin
        mask = self.corner(window, end - begin, num_masked)
        return Tile(slice(begin, end), slice(low - first_key, high - first_key), mask)

    def corner(self, window: int | None, num_queries: int, num_keys: int) -> Tensor:
        """[num_queries, num_keys]: 0 or -inf. The last query sees the last key, so each mask is the corner of one."""
        corner = self.corners.get(window)
        if corner is None or corner.shape[1] < num_keys:
            width = 1 << (max(num_keys, QUERY_TILE) - 1).bit_length()
            seen = visible(QUERY_TILE, width, window, self.device)
            corner = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
            self.corners[window] = corner
        return corner[QUERY_TILE - num_queries :, corner.shape[1] - num_keys :]


def is_plain(spec: AttentionSpec) -> bool:
    """Whether torch's fused kernel can compute it: scores are products, scaled and masked."""
    return spec.soft_cap is None and spec.slopes is None


def split_by_length(num_blocks: np.ndarray, block_bytes: int) -> list[np.ndarray]:
    """Which decodes to batch: each array holds positions in num_blocks, ascending."""
    if not num_blocks.size:
        return []
    order = np.argsort(-num_blocks, kind="stable")
    lengths = num_blocks[order].tolist()
    starts, longest = [0], lengths[0]
    for i, length in enumerate(lengths):
        padding = (longest - length) * (len(lengths) - i)  # blocks that the rest would be padded by, at least
        copied = (i + 1 - starts[-1]) * longest
        if i > starts[-1] and (padding * block_bytes > SPLIT_BYTES or copied * block_bytes > GROUP_BYTES):
            starts.append(i)
            longest = length
    # In batch order, so that a group's query rows are a slice where they can be.
    return [np.sort(order[a:b]) for a, b in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def is_run(blocks: np.ndarray) -> bool:
    """Whether the ids are consecutive, so that the blocks are one piece of the cache."""
    return bool((np.diff(blocks) == 1).all())


def as_slice(rows: np.ndarray) -> slice | None:
    """Ascending rows as a slice, if they are consecutive."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    return slice(first, last) if last - first == len(rows) else None
