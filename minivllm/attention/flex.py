"""FlexAttention (Dong et al. 2024; torch.nn.attention.flex_attention) over the paged cache.

The cache is one long row of keys, blocks in the order in which they lie. Which of them a query sees is said by a
function of (query, key) that looks a key's block up: `places` says where in its request a block stands, and the block
is the query's own if its request's table has it at that place. (A block that several requests share stands at the same
place in all of them: it is part of their common beginning.) Beside it stands a list of the blocks that a tile of
queries reads at all, which compiled kernels visit and no others.

Two calls, each with its own lists: decodes are a batch of single queries, everything else one packed row of queries.

Compiled where that is fused, on a GPU (never run on one here). On a CPU the same function is evaluated for all pairs of
a query and a key of the step's blocks, which are gathered first: slow, and what shows that it is right. torch 2.13 can
compile it for CPUs too, where it gave the same answers, but only for one shape at a time.

Cache layout: NHD, as the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as uncompiled_op
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minivllm.attention.base import NHD, AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import MODELS_OWN
from minivllm.attention.rows import Part, put, send, split, take
from minivllm.errors import ConfigError
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

QUERY_TILE = 128  # rows of a tile, whose lists of blocks are united

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> may be seen
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, batch, head, query, key) -> score


class _Blocks(NamedTuple):
    """The step's blocks, as its keys are numbered: where they lie, or one after the other once they are gathered."""

    tables: np.ndarray  # [R, blocks] int32
    places: np.ndarray  # [numbered blocks] int32: which block of its requests each one is
    gathered: Tensor | None  # [numbered blocks] int64: where they lie in the cache; None: they were not renumbered
    holes: Tensor | None  # [slots] int64: of gathered blocks, what nobody has written


class _Call(NamedTuple):
    part: Part
    packed: bool  # its queries are one row; else a batch of single ones
    masks: dict[int | None, BlockMask]  # by window


class _Meta(NamedTuple):
    slots: Tensor  # [padded T] int64
    blocks: _Blocks
    calls: list[_Call]
    num_tokens: int


class FlexBackend:
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"
    kv_layout: ClassVar[str] = NHD
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = MODELS_OWN
    host_tables: ClassVar[bool] = True
    block_axis: ClassVar[int] = 1

    def __init__(
        self,
        layers: list[AttentionSpec],
        spec: KVSpec,
        num_blocks: int,
        device: torch.device,
        compiled: bool | None = None,
    ):
        """compiled: None on a GPU only. Raises ConfigError for a block size that compiled kernels do not take."""
        check_layers(layers, spec)
        self.spec, self.num_blocks, self.device = spec, num_blocks, torch.device(device)
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        self.windows = list(dict.fromkeys(layer.sliding_window for layer in layers))
        self.score = {layer.soft_cap: make_score(layer.soft_cap) for layer in layers}
        self.attend = torch.compile(flex_attention, dynamic=True) if self.compiled else attend_uncompiled
        if self.device.type == "cuda" and (spec.block_size < 16 or spec.block_size & (spec.block_size - 1)):
            raise ConfigError(
                f"runner.attention=flex on a GPU needs blocks of 16, 32, 64, 128 or 256 tokens, not {spec.block_size}: "
                "set kv.block_size"
            )

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_size)

    def prepare(self, batch: InputBatch) -> _Meta:
        slots = send(batch.slot_mapping, torch.int64, self.device)
        blocks = self._number(batch.seq_lens[: batch.num_requests], batch.block_tables[: batch.num_requests])
        decodes, others = split(batch, self.device)
        calls = [
            self._call(batch, blocks, part, packed)
            for part, packed in ((decodes, False), (others, True))
            if part is not None
        ]
        return _Meta(slots, blocks, calls, batch.num_tokens)

    def _number(self, seq_lens: np.ndarray, tables: np.ndarray) -> _Blocks:
        page = self.spec.block_size
        columns = np.broadcast_to(np.arange(tables.shape[1]), tables.shape)
        used = columns * page < seq_lens[:, None]
        places = np.zeros(self.num_blocks, np.int32)
        places[tables[used]] = columns[used]
        if self.compiled:
            return _Blocks(tables.astype(np.int32), places, None, None)
        own, number = np.unique(tables[used], return_inverse=True)
        renumbered = np.zeros(tables.shape, np.int32)
        renumbered[used] = number
        written = np.zeros(len(own), np.int64)
        np.maximum.at(written, number, np.minimum((seq_lens[:, None] - columns * page)[used], page))
        holes = np.flatnonzero(np.arange(page) >= written[:, None])
        gathered = upload(own.astype(np.int64), self.device)
        return _Blocks(renumbered, places[own], gathered, upload(holes, self.device))

    def _call(self, batch: InputBatch, blocks: _Blocks, part: Part, packed: bool) -> _Call:
        request = np.repeat(part.requests, np.diff(part.query_start))  # [queries]
        position = batch.positions[part.index].astype(np.int32)
        arrays = request.astype(np.int32), position, blocks.tables, blocks.places
        tensors = [upload(array, self.device) for array in arrays]
        tile = QUERY_TILE if packed else 1
        masks = {}
        for window in self.windows:
            lists = block_lists(request, position, blocks.tables, self.spec.block_size, window, tile)
            shape = (1, 1, len(lists), -1) if packed else (len(lists), 1, 1, -1)
            counts = upload(np.array([len(x) for x in lists], np.int32), self.device)
            indices = upload(padded(lists), self.device)
            masks[window] = BlockMask.from_kv_blocks(
                counts.view(shape[:3]),
                indices.view(shape),
                BLOCK_SIZE=(QUERY_TILE, self.spec.block_size),
                mask_mod=make_mask(*tensors, self.spec.block_size, window, packed),
                seq_lengths=(len(request) if packed else 1, len(blocks.places) * self.spec.block_size),
                compute_q_blocks=False,
            )
        return _Call(part, packed, masks)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        keys, values = kv.flatten(1, 2)  # each [slots, kv_heads, head_size]
        keys[meta.slots] = k
        values[meta.slots] = v
        keys, values = (x.transpose(0, 1)[None] for x in self._numbered(kv, meta.blocks))  # [1, kv_heads, keys, D]
        for part, packed, masks in meta.calls:
            queries = take(q, part.rows)
            queries = queries.transpose(0, 1)[None] if packed else queries[:, :, None]  # [B, heads, n, D]
            result = self.attend(
                queries,
                keys,
                values,
                score_mod=self.score[layer.soft_cap],
                block_mask=masks[layer.sliding_window],
                scale=layer.scale,
                enable_gqa=layer.num_heads != layer.num_kv_heads,
                kernel_options=self._kernel_options(),
            )
            put(out, part.rows, result[0].transpose(0, 1) if packed else result[:, :, 0])
        out[meta.num_tokens :] = 0  # padding rows: nobody reads them, but they pass through the layers that follow

    def _numbered(self, kv: Tensor, blocks: _Blocks) -> Tensor:
        """K and V of the numbered blocks: [2, slots, kv_heads, head_size]."""
        if blocks.gathered is None:
            return kv.flatten(1, 2)
        own = kv.index_select(1, blocks.gathered).flatten(1, 2)
        return own.index_fill_(1, blocks.holes, 0)  # whatever lies there, NaN too, survives a multiplication by zero

    def _kernel_options(self) -> dict[str, int] | None:
        """A tile of keys lies in one block."""
        return {"BLOCK_N": min(self.spec.block_size, 64)} if self.device.type == "cuda" else None


def make_mask(
    request: Tensor, position: Tensor, tables: Tensor, places: Tensor, page: int, window: int | None, packed: bool
) -> Mask:
    """request, position [queries]; keys are slots of the numbered blocks. packed: queries are told apart by their
    index, and by the batch's otherwise."""

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query if packed else batch
        block = key // page
        place = places[block]
        at = place * page + key % page
        own = tables[request[row], place] == block
        near = own & (at <= position[row])
        return near if window is None else near & (at > position[row] - window)

    return seen


def block_lists(
    request: np.ndarray, position: np.ndarray, tables: np.ndarray, page: int, window: int | None, tile: int
) -> list[np.ndarray]:
    """For each tile of queries, the blocks in which any of them sees a key. request, position [queries]: a request's
    queries lie together, their positions rise."""
    lists = []
    for begin in range(0, len(request), tile):
        rows, at = request[begin : begin + tile], position[begin : begin + tile]
        ends = np.flatnonzero(np.diff(rows, append=-1))
        begins = np.concatenate([[0], ends[:-1] + 1])
        first = np.zeros(len(ends), np.int64) if window is None else np.maximum(at[begins] - window + 1, 0)
        parts = [tables[rows[e], f // page : at[e] // page + 1] for f, e in zip(first, ends, strict=True)]
        lists.append(np.unique(np.concatenate(parts)))
    return lists


def padded(lists: list[np.ndarray]) -> np.ndarray:
    """[lists, longest] int32, zeros behind."""
    result = np.zeros((len(lists), max(map(len, lists))), np.int32)
    for row, own in zip(result, lists, strict=True):
        row[: len(own)] = own
    return result


def make_score(cap: float | None) -> Score:
    def score(x: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return x if cap is None else cap * torch.tanh(x / cap)

    return score


def attend_uncompiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Score,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    kernel_options: None,
) -> Tensor:
    """What flex_attention compiles, in plain torch. That function itself would trace it anew for every shape, to the
    same operations."""
    assert enable_gqa == (query.shape[1] != key.shape[1]) and kernel_options is None
    return uncompiled_op(query, key, value, score_mod, block_mask.as_tuple(), scale, {})[0]
