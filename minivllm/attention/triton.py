"""Paged attention in Triton (kernels/triton): a launch for the decodes of a step and one for all other requests.

Cache layout: [2 (K, V), num_blocks, kv_heads, block_size, head_size]. The keys of one head and block are one piece of
memory, as a program reads them. In 8 bits: [2, num_blocks, kv_heads, block_size * (head_size + 4)], with scales behind
the codes (kernels/triton/quantised_kv.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import HND, AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import QUANTISED
from minivllm.attention.rows import send, with_dense_heads
from minivllm.kernels.triton.tiles import Tile, num_splits
from minivllm.kernels.triton.tuned import Shape, fixed, plan
from minivllm.upload import select

if TYPE_CHECKING:
    from minivllm.batch import InputBatch
    from minivllm.compile.context import Rope
    from minivllm.kernels.triton.paged import Requests


class _Meta(NamedTuple):
    slots: Tensor  # [padded T] int64
    decodes: Requests | None
    others: Requests | None
    longest_decode: int  # tokens
    num_tokens: int


class TritonAttention:
    adds_slopes: ClassVar[bool] = True
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "uniform"
    kv_layout: ClassVar[str] = HND
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = QUANTISED
    host_tables: ClassVar[bool] = False
    block_axis: ClassVar[int] = 1

    def __init__(
        self,
        layers: list[AttentionSpec],
        spec: KVSpec,
        num_blocks: int,
        device: torch.device,
        tiles: tuple[Tile, Tile] | None = None,
        num_sms: int | None = None,
    ):
        """tiles: of decode and of prefill; None: those that are shipped for the shape and the card."""
        from minivllm.kernels.triton import elementwise, paged

        is_quantised = spec.dtype in elementwise.KINDS
        self.paged, self.write = paged, elementwise.write_quantised if is_quantised else elementwise.write
        self.rope_write = elementwise.rope_write
        check_layers(layers, spec)
        assert is_quantised or spec.dtype in paged.DTYPES, spec.dtype
        self.spec = spec
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.num_sms = num_sms or (torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1)
        major = torch.cuda.get_device_capability(device)[0] if on_gpu else 9
        card = torch.cuda.get_device_name(device) if on_gpu else None
        self.scratch = paged.Scratch(self.device)
        self.heads = {layer: _head(paged.Head, layer) for layer in layers}
        self.by_head = {layer: _by_head(paged.ByHead, layer, self.device) for layer in layers}
        self.plans = {layer: fixed(*tiles) if tiles else plan(_shape(layer, spec), major, card) for layer in layers}

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if find_spec("triton") is None:
            return 'triton is not installed: pip install "minivllm[gpu]" (Linux only)'
        if device.type == "cuda":
            return None
        from minivllm.kernels.triton.interpreted import INTERPRETED

        return None if INTERPRETED and device.type == "cpu" else f"its kernels need a CUDA device, not {device.type}"

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        page = (self.spec.block_size, self.spec.head_size)
        if self.spec.dtype.itemsize == 1:
            page = (self.spec.block_size * (self.spec.head_size + 4),)
        return (2, num_blocks, self.spec.num_kv_heads, *page)

    def prepare(self, batch: InputBatch) -> _Meta:
        bounds = batch.query_start[: batch.num_requests + 1].astype(np.int32)
        num_queries = np.diff(bounds)
        single, several = np.flatnonzero(num_queries == 1), np.flatnonzero(num_queries > 1)
        slots = send(batch.slot_mapping, torch.int64, self.device)
        longest = int(batch.seq_lens[single].max()) if single.size else 0
        if batch.whole:  # the captured launch serves every length: the kernel reads on the device what a split gets
            longest = batch.max_seq
        decodes, others = self._requests(batch, bounds, single), self._requests(batch, bounds, several)
        return _Meta(slots, decodes, others, longest, batch.num_tokens)

    def _requests(self, batch: InputBatch, bounds: np.ndarray, which: np.ndarray) -> Requests | None:
        if not which.size:
            return None
        starts = np.concatenate([[0], np.cumsum(bounds[which + 1] - bounds[which])])
        arrays = bounds[which], batch.seq_lens[which], select(batch.block_tables, which), starts
        tensors = (send(array, torch.int32, self.device) for array in arrays)
        return self.paged.Requests(*tensors, int(starts[-1]))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        self.write(with_dense_heads(k), with_dense_heads(v), *kv, meta.slots)
        self._attend(with_dense_heads(q), kv, meta, layer, out)

    def rope_and_attend(
        self, qkv: Tensor, rope: Rope, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        """qkv [T, heads + 2 kv_heads, head_size] before norm and rotation: both, and the write, are one launch."""
        q = torch.empty_like(out)
        self.rope_write(with_dense_heads(qkv), q, *kv, meta.slots, *rope)
        self._attend(q, kv, meta, layer, out)

    def _attend(self, q: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor) -> None:
        paged, head, by_head = self.paged, self.heads[layer], self.by_head[layer]
        keys, values = kv
        plan = self.plans[layer]
        if meta.decodes is not None:
            decode = plan.decode_tile(len(meta.decodes.rows))
            most = min(meta.longest_decode, layer.sliding_window or meta.longest_decode) // decode.block_n + 1
            splits = num_splits(len(meta.decodes.rows), layer.num_kv_heads, self.num_sms, most)
            paged.decode(q, keys, values, meta.decodes, head, out, self.scratch, decode, splits, by_head)
        if meta.others is not None:
            prefill = plan.prefill_tile(meta.others.num_queries)
            paged.prefill(q, keys, values, meta.others, head, out, prefill, by_head)
        if out.shape[0] > meta.num_tokens:  # nobody reads padding rows, but they pass through the layers that follow
            out[meta.num_tokens :].zero_()


def _head(cls: type, layer: AttentionSpec):
    heads = layer.num_heads, layer.num_kv_heads, layer.head_size
    return cls(*heads, layer.scale, layer.sliding_window or 0, layer.soft_cap or 0.0)


def _by_head(cls: type, layer: AttentionSpec, device: torch.device):
    return cls(None if layer.slopes is None else torch.tensor(layer.slopes, dtype=torch.float32, device=device))


def _shape(layer: AttentionSpec, spec: KVSpec) -> Shape:
    dtype = str(spec.dtype).removeprefix("torch.")
    return Shape(layer.head_size, layer.num_heads // layer.num_kv_heads, dtype, layer.sliding_window is not None)
