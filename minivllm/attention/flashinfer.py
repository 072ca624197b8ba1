"""FlashInfer (Ye et al. 2025) over the paged cache, where its package is installed.

Its wrappers plan once a step and run once a layer: plan() balances the work over the multiprocessors from the lengths
on the host, run() only launches. There is a pair of wrappers, for decodes and for all other requests, for each kind of
layer (a window, a soft cap and a scale are part of a plan). The page table is a sparse matrix in CSR form: `indptr`
says which of `indices` are a request's blocks, `last_page_len` how full its last one is. The cache is HND, as the
Triton kernels have it, so that the two can share one (attention/composite.py).

Never run on a card here. The arguments follow FlashInfer 0.6.18, and are tested against stand-ins with the same
signatures in plain torch (tests/attention/libraries.py).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import HND, AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import MODELS_OWN
from minivllm.attention.rows import Part, put, send, split, take, with_dense_heads
from minivllm.attention.writer import choose_writer
from minivllm.errors import ConfigError
from minivllm.upload import select, upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

MISSING = 'flashinfer is not installed: pip install "minivllm[flashinfer]" (Linux)'
WORKSPACE = 128 << 20  # bytes: what FlashInfer recommends; zeros, as it asks for
HEAD_SIZES = (64, 128, 256)
SCALAR_GROUPS = (1, 2, 3)  # query heads of a KV head; with more, matrix instructions pay, also for single queries


class _Meta(NamedTuple):
    slots: Tensor  # [padded T] int64
    decodes: Part | None
    others: Part | None
    num_tokens: int
    step: int  # the plan that the wrappers must still hold


class _Pages(NamedTuple):
    """Block tables in CSR form, int32 on the host, where plan() needs them, but for the blocks themselves."""

    indptr: Tensor  # [n + 1]
    indices: Tensor  # [blocks in use], where the tables are
    last_page_len: Tensor  # [n], from 1 to block_size


def csr_pages(seq_lens: np.ndarray, tables: np.ndarray | Tensor, block_size: int) -> _Pages:
    """seq_lens [n], each at least 1; tables [n, blocks]: entries past a request's last block are left out."""
    counts = -(-seq_lens // block_size)
    used = np.flatnonzero(np.arange(tables.shape[1]) < counts[:, None])
    lengths = np.concatenate([[0], np.cumsum(counts)]), seq_lens - (counts - 1) * block_size
    indptr, last_page_len = (torch.from_numpy(array.astype(np.int32)) for array in lengths)
    indices = upload(select(tables.reshape(-1), used), torch.device("cpu"))
    return _Pages(indptr, indices, last_page_len)


class FlashInferBackend:
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"
    kv_layout: ClassVar[str] = HND
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = MODELS_OWN
    host_tables: ClassVar[bool] = False
    block_axis: ClassVar[int] = 1

    def __init__(
        self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device, library: Any = None
    ):
        """Raises ConfigError for a dtype or head size that FlashInfer is not compiled for. library: the module."""
        check_layers(layers, spec)
        self.spec, self.device = spec, torch.device(device)
        self._check()
        library = library or import_module("flashinfer")
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self.device)
        self.decode, self.prefill = {}, {}
        for layer in dict.fromkeys(layers):
            matrix = layer.num_heads // layer.num_kv_heads not in SCALAR_GROUPS
            self.decode[layer] = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=matrix)
            self.prefill[layer] = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self.write = choose_writer(self.device)
        self.planned = torch.cuda.Event() if self.device.type == "cuda" else None
        self.step = 0

    def _check(self) -> None:
        if self.spec.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(
                "runner.attention=flashinfer computes in float16 or bfloat16: set model.dtype to one of them"
            )
        if self.spec.head_size not in HEAD_SIZES:
            raise ConfigError(
                f"runner.attention=flashinfer takes head sizes {', '.join(map(str, HEAD_SIZES))}, this model has "
                f"{self.spec.head_size}. Use runner.attention=auto"
            )

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels need a CUDA device, not {device.type}"
        return None if find_spec("flashinfer") is not None else MISSING

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.spec.num_kv_heads, self.spec.block_size, self.spec.head_size)

    def prepare(self, batch: InputBatch) -> _Meta:
        if self.planned is not None:  # plan() copies from one pinned buffer, which the last copy may still be reading
            self.planned.synchronize()
        slots = send(batch.slot_mapping, torch.int64, self.device)
        decodes, others = split(batch, self.device)
        if decodes is not None:
            self.plan_decodes(self._pages(batch, decodes))
        if others is not None:
            self.plan_others(self._pages(batch, others), torch.from_numpy(others.query_start))
        if self.planned is not None:
            self.planned.record()
        self.step += 1
        return _Meta(slots, decodes, others, batch.num_tokens, self.step)

    def _pages(self, batch: InputBatch, part: Part) -> _Pages:
        return csr_pages(batch.seq_lens[part.requests], select(batch.block_tables, part.requests), self.spec.block_size)

    def plan_decodes(self, pages: _Pages) -> None:
        for layer, wrapper in self.decode.items():
            heads = layer.num_heads, layer.num_kv_heads, layer.head_size
            wrapper.plan(*pages, *heads, self.spec.block_size, **self._options(layer))

    def plan_others(self, pages: _Pages, query_start: Tensor) -> None:
        for layer, wrapper in self.prefill.items():
            heads = layer.num_heads, layer.num_kv_heads, layer.head_size
            wrapper.plan(query_start, *pages, *heads, self.spec.block_size, causal=True, **self._options(layer))

    def _options(self, layer: AttentionSpec) -> dict[str, Any]:
        window = -1 if layer.sliding_window is None else layer.sliding_window - 1
        bounds = {"window_left": window, "logits_soft_cap": layer.soft_cap or 0.0, "sm_scale": layer.scale}
        return {"pos_encoding_mode": "NONE", **bounds, "q_data_type": self.spec.dtype, "kv_data_type": self.spec.dtype}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        assert meta.step == self.step, "the wrappers hold the plan of a later step"
        q, k, v = with_dense_heads(q), with_dense_heads(k), with_dense_heads(v)
        keys, values = kv
        self.write(k, v, keys, values, meta.slots)
        for wrapper, part in ((self.decode[layer], meta.decodes), (self.prefill[layer], meta.others)):
            if part is not None:
                put(out, part.rows, wrapper.run(take(q, part.rows).contiguous(), (keys, values)))
        if out.shape[0] > meta.num_tokens:  # nobody reads padding rows, but they pass through the layers that follow
            out[meta.num_tokens :].zero_()
