"""FlashAttention 2 (Dao 2023) and 3 (Shah et al. 2024) over the paged cache, where their packages are installed.

Two calls a layer: the decodes of a step, which the library splits along their keys, and all other requests as sequences
of unequal length. Both read K and V through the block table; they see the cache of the Triton kernels through strides
(a page's keys of one head lie together), so that the two can share one (attention/composite.py).

| | package, module | cards | block size |
|---|---|---|---|
| 2 | flash-attn, `flash_attn` | Ampere and later | 256 |
| 3 | built from FlashAttention's folder hopper/, `flash_attn_interface` | Hopper | any |

Never run on a card here. The arguments follow flash-attn 2.8.4 and hopper/ of August 2026, and are tested against
stand-ins with the same signatures in plain torch (tests/attention/libraries.py).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import HND, AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import MODELS_OWN
from minivllm.attention.rows import Part, put, send, split, take, with_dense_heads
from minivllm.attention.writer import choose_writer
from minivllm.errors import ConfigError
from minivllm.upload import select

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

MISSING = (
    'flash-attn is not installed: pip install --no-build-isolation "minivllm[flash]" (Linux with a CUDA toolkit), '
    "or build FlashAttention 3 on Hopper"
)


class Call(NamedTuple):
    """The requests of one call. Tensors int32 on the device."""

    part: Part | None  # None: not of a batch
    seq_lens: Tensor  # [n]
    tables: Tensor  # [n, blocks]
    query_start: Tensor  # [n + 1]
    key_start: Tensor  # [n + 1]
    max_query: int
    max_seq: int


class _Meta(NamedTuple):
    slots: Tensor  # [padded T] int64
    decodes: Call | None
    others: Call | None
    num_tokens: int


class Library(Protocol):
    """One generation's functions. keys, values [num_blocks, block_size, kv_heads, head_size], last dimension dense;
    options: softmax_scale, causal, window_size, softcap."""

    block_multiple: int

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, call: Call, options: dict[str, Any]) -> Tensor:
        """q [n, heads, head_size], a query for each request -> like q."""
        ...

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, call: Call, options: dict[str, Any]) -> Tensor:
        """q [queries, heads, head_size], request after request -> like q."""
        ...


class FlashAttention2:
    block_multiple = 256

    def __init__(self, module: ModuleType):
        self.module = module

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, call: Call, options: dict[str, Any]) -> Tensor:
        lengths = {"cache_seqlens": call.seq_lens, "block_table": call.tables}
        return self.module.flash_attn_with_kvcache(q[:, None], keys, values, **lengths, **options)[:, 0]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, call: Call, options: dict[str, Any]) -> Tensor:
        lengths = call.query_start, call.key_start, call.max_query, call.max_seq
        return self.module.flash_attn_varlen_func(q, keys, values, *lengths, block_table=call.tables, **options)


class FlashAttention3:
    block_multiple = 1

    def __init__(self, module: ModuleType):
        self.module = module

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, call: Call, options: dict[str, Any]) -> Tensor:
        lengths = {"cache_seqlens": call.seq_lens, "page_table": call.tables}
        return self.module.flash_attn_with_kvcache(q[:, None], keys, values, **lengths, **options)[:, 0]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, call: Call, options: dict[str, Any]) -> Tensor:
        lengths = {"cache_seqlens": call.seq_lens, "page_table": call.tables}
        queries = {"cu_seqlens_q": call.query_start, "max_seqlen_q": call.max_query}
        return self.module.flash_attn_with_kvcache(q, keys, values, **lengths, **queries, **options)


def load_library(capability: tuple[int, int], generation: int | None = None) -> Library:
    """capability: of the CUDA device. generation: None: 3 where it is installed and the card is Hopper, else 2. Raises
    ImportError with what to install."""
    if generation != 2 and capability[0] == 9 and find_spec("flash_attn_interface") is not None:
        return FlashAttention3(import_module("flash_attn_interface"))
    if generation == 3:
        raise ImportError(MISSING)
    module = import_module("flash_attn") if find_spec("flash_attn") is not None else None
    if not hasattr(module, "flash_attn_with_kvcache"):  # FlashAttention 4 alone brings a package of this name, too
        raise ImportError(MISSING)
    return FlashAttention2(module)


class FlashBackend:
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"
    kv_layout: ClassVar[str] = HND
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = MODELS_OWN
    host_tables: ClassVar[bool] = False
    block_axis: ClassVar[int] = 1

    def __init__(
        self,
        layers: list[AttentionSpec],
        spec: KVSpec,
        num_blocks: int,
        device: torch.device,
        library: Library | None = None,
    ):
        """Raises ConfigError for a dtype, head size or block size that the library does not take. library: None: what
        the device can run."""
        check_layers(layers, spec)
        self.spec, self.device = spec, torch.device(device)
        self.library = library or load_library(torch.cuda.get_device_capability(self.device))
        self._check()
        self.options = {layer: _options(layer) for layer in layers}
        self.write = choose_writer(self.device)

    def _check(self) -> None:
        spec, multiple = self.spec, self.library.block_multiple
        if spec.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError("runner.attention=flash computes in float16 or bfloat16: set model.dtype to one of them")
        if spec.head_size % 8 or spec.head_size > 256:
            raise ConfigError(
                f"runner.attention=flash takes head sizes up to 256 in steps of 8, this model has {spec.head_size}. "
                "Use runner.attention=auto"
            )
        if spec.block_size % multiple:
            raise ConfigError(
                f"runner.attention=flash with {type(self.library).__name__} needs blocks of {multiple} tokens, not "
                f"{spec.block_size}: set kv.block_size={multiple}"
            )

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels need a CUDA device, not {device.type}"
        try:
            load_library(torch.cuda.get_device_capability(device))
        except ImportError as e:
            return str(e)
        return None

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.spec.num_kv_heads, self.spec.block_size, self.spec.head_size)

    def prepare(self, batch: InputBatch) -> _Meta:
        slots = send(batch.slot_mapping, torch.int64, self.device)
        decodes, others = (part and self._call(batch, part) for part in split(batch, self.device))
        return _Meta(slots, decodes, others, batch.num_tokens)

    def _call(self, batch: InputBatch, part: Part) -> Call:
        seq_lens = batch.seq_lens[part.requests]
        key_start = np.concatenate([[0], np.cumsum(seq_lens)])
        arrays = seq_lens, select(batch.block_tables, part.requests), part.query_start, key_start
        tensors = (send(array, torch.int32, self.device) for array in arrays)
        return Call(part, *tensors, part.max_query, int(seq_lens.max()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        q, k, v = with_dense_heads(q), with_dense_heads(k), with_dense_heads(v)
        self.write(k, v, *kv, meta.slots)
        keys, values = kv.transpose(2, 3)  # each [num_blocks, block_size, kv_heads, head_size]
        options = self.options[layer]
        for function, call in ((self.library.decode, meta.decodes), (self.library.attend, meta.others)):
            if call is not None:
                rows = call.part.rows
                put(out, rows, function(take(q, rows), keys, values, call, options))
        if out.shape[0] > meta.num_tokens:  # nobody reads padding rows, but they pass through the layers that follow
            out[meta.num_tokens :].zero_()


def _options(layer: AttentionSpec) -> dict[str, Any]:
    window = (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)
    scale, cap = layer.scale, layer.soft_cap or 0.0
    return {"softmax_scale": scale, "causal": True, "window_size": window, "softcap": cap}
