"""Part `attention` of bench/gpu/run.py: decodes and prefills of two models' shapes, by the Triton kernels and by all
that is installed beside them, in turn over the same random q, K and V.

Ours and the libraries that serve (FlashAttention, FlashInfer, vLLM's kernel) read K and V through block tables, in
blocks that lie anywhere. torch's own ways (SDPA by each of its backends, FlexAttention) get them dense, request by
request: they have no block tables, and need none to be compared with. Every result is held against float64.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from card import Ceilings, ceilings, error_of, measured
from case import Rows, Setting
from kernel_parts import DTYPES
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minivllm.attention.base import AttentionSpec, KVSpec
from minivllm.attention.flash import Call, Library, load_library
from minivllm.attention.flashinfer import FlashInferBackend, csr_pages
from minivllm.attention.reference import attend_dense
from minivllm.kernels.triton import paged
from minivllm.kernels.triton.tiles import attention_tiles, num_splits

MODELS = {"Llama-3.1-8B": (32, 8, 128), "Qwen3-0.6B": (16, 8, 128)}
DECODES = ((1, 1024), (1, 65_536), (32, 1024), (32, 4096), (256, 1024))  # requests x tokens
PREFILLS = (2048, 4096, 8192, 16_384)

Way = Callable[[], Tensor]  # -> [tokens, heads, head_size]


class Missing(Exception):
    """A library that is not installed."""


@dataclass
class Problem:
    """`count` requests of `length` tokens, of which the last one or all ask; length is a number of whole blocks."""

    setting: Setting
    spec: AttentionSpec
    count: int
    length: int
    decodes: bool
    q: Tensor = field(init=False)  # [tokens, heads, head_size]
    dense: Tensor = field(init=False)  # [2, requests, kv_heads, length, head_size]

    def __post_init__(self) -> None:
        spec, (device, dtype, _) = self.spec, self.setting
        tokens = self.count if self.decodes else self.count * self.length
        self.q = torch.randn(tokens, spec.num_heads, spec.head_size, device=device).to(dtype)
        shape = 2, self.count, spec.num_kv_heads, self.length, spec.head_size
        self.dense = torch.randn(shape, device=device, dtype=dtype)

    @property
    def kv_bytes(self) -> int:
        return self.dense.numel() * self.dense.itemsize

    @property
    def flops(self) -> int:
        pairs = self.length if self.decodes else self.length * (self.length + 1) // 2
        return 4 * self.count * pairs * self.spec.num_heads * self.spec.head_size

    @property
    def num_queries(self) -> int:
        return 1 if self.decodes else self.length

    def paged(self, page: int) -> tuple[Tensor, Tensor]:
        """-> a cache [2, blocks, kv_heads, page, head_size] of scattered blocks, and block tables [requests, blocks of
        one] int32."""
        num = self.length // page
        ids = torch.randperm(self.count * num, device=self.q.device)
        pieces = self.dense.unflatten(3, (num, page)).transpose(2, 3).flatten(1, 2)  # in the order of the requests
        cache = torch.full_like(pieces, torch.nan, memory_format=torch.contiguous_format)
        cache[:, ids] = pieces
        return cache, ids.view(self.count, num).to(torch.int32)

    def by_request(self, out: Tensor) -> Tensor:
        """[requests, heads, queries, head_size] -> [tokens, heads, head_size]"""
        return out.transpose(1, 2).flatten(0, 1)

    @cached_property
    def queries(self) -> Tensor:
        """[requests, heads, queries, head_size]"""
        return self.q.unflatten(0, (self.count, self.num_queries)).transpose(1, 2).contiguous()

    @cached_property
    def oracle(self) -> Tensor:
        """float64, a piece of queries at a time."""
        parts = []
        for r in range(self.count):
            k, v = self.dense[:, r].transpose(1, 2).double()
            asked = self.q[r * self.num_queries : (r + 1) * self.num_queries].double()
            for begin in range(0, self.num_queries, 256):
                piece = asked[begin : begin + 256]
                seen = self.length - self.num_queries + begin + len(piece)
                parts.append(attend_dense(piece, k[:seen], v[:seen], self.spec))
        return torch.cat(parts)


def triton(problem: Problem) -> Way:
    spec, setting = problem.spec, problem.setting
    cache, tables = problem.paged(16)
    starts = torch.arange(problem.count + 1, dtype=torch.int32, device=problem.q.device) * problem.num_queries
    lengths = torch.full((problem.count,), problem.length, dtype=torch.int32, device=problem.q.device)
    requests = paged.Requests(starts[:-1], lengths, tables, starts, len(problem.q))
    head = paged.Head(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.scale, 0, 0.0)
    group, itemsize = spec.num_heads // spec.num_kv_heads, problem.q.itemsize
    decode, prefill = attention_tiles(group, spec.head_size, itemsize, False, setting.major)
    splits = num_splits(problem.count, spec.num_kv_heads, setting.num_sms, problem.length // decode.block_n + 1)
    out, scratch = torch.full_like(problem.q, torch.nan), paged.Scratch(problem.q.device)

    def call() -> Tensor:
        if problem.decodes:
            paged.decode(problem.q, *cache, requests, head, out, scratch, decode, splits)
        else:
            paged.prefill(problem.q, *cache, requests, head, out, prefill)
        return out

    return call


def sdpa(backend: SDPBackend) -> Callable[[Problem], Way]:
    def make(problem: Problem) -> Way:
        grouped = problem.spec.num_heads != problem.spec.num_kv_heads
        options = {"scale": problem.spec.scale, "enable_gqa": grouped, "is_causal": not problem.decodes}

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return problem.by_request(F.scaled_dot_product_attention(problem.queries, *problem.dense, **options))

        return call

    return make


def flex(problem: Problem) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    on_gpu = problem.q.device.type == "cuda"
    attend = torch.compile(flex_attention, dynamic=True) if on_gpu else flex_attention
    mask = None
    if not problem.decodes:

        def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query >= key

        mask = create_block_mask(causal, None, None, problem.length, problem.length, device=problem.q.device)
    options = {"scale": problem.spec.scale, "enable_gqa": problem.spec.num_heads != problem.spec.num_kv_heads}
    return lambda: problem.by_request(attend(problem.queries, *problem.dense, block_mask=mask, **options))


def flash(generation: int) -> Callable[[Problem], Way]:
    """FlashAttention over block tables, as minivllm.attention.flash calls it."""

    def make(problem: Problem) -> Way:
        return with_library(_flash_library(generation), problem)

    return make


def _flash_library(generation: int) -> Library:
    if generation == 3 and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        raise Missing("it is for Hopper")
    try:
        return load_library((9 if generation == 3 else 8, 0), generation)
    except ImportError as e:
        raise Missing(str(e)) from None


def with_library(library: Library, problem: Problem) -> Way:
    count, device, multiple = problem.count, problem.q.device, library.block_multiple
    cache, tables = problem.paged(max(multiple, 16))
    keys, values = cache.transpose(2, 3)
    lengths = torch.full((count,), problem.length, dtype=torch.int32, device=device)
    steps = torch.arange(count + 1, dtype=torch.int32, device=device)
    bounds = steps * problem.num_queries, steps * problem.length
    call = Call(None, lengths, tables, *bounds, problem.num_queries, problem.length)
    options = {"softmax_scale": problem.spec.scale, "causal": True, "window_size": (-1, -1), "softcap": 0.0}
    function = library.decode if problem.decodes else library.attend
    return lambda: function(problem.q, keys, values, call, options)


def flashinfer(problem: Problem, library: Any = None) -> Way:
    """library: the module; None: the installed one."""
    if library is None and (why := FlashInferBackend.unavailable(problem.q.device)) is not None:
        raise Missing(why)
    spec, page, count = problem.spec, 16, problem.count
    cache, tables = problem.paged(page)
    kv = KVSpec(1, spec.num_kv_heads, spec.head_size, page, problem.q.dtype)
    backend = FlashInferBackend([spec], kv, cache.shape[1], problem.q.device, library)
    pages = csr_pages(np.full(count, problem.length), tables.cpu().numpy(), page)
    if problem.decodes:
        backend.plan_decodes(pages)
        wrapper = backend.decode[spec]
    else:
        backend.plan_others(pages, torch.arange(count + 1, dtype=torch.int32) * problem.length)
        wrapper = backend.prefill[spec]
    return lambda: wrapper.run(problem.q, (cache[0], cache[1]))


def vllm_triton(problem: Problem) -> Way:
    """vLLM's Triton kernel, as its backend of that name calls it (0.32)."""
    if find_spec("vllm") is None:
        raise Missing("vllm is not installed")
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    cache, tables = problem.paged(16)
    keys, values = (half.transpose(1, 2).contiguous() for half in cache)
    starts = torch.arange(problem.count + 1, dtype=torch.int32, device=problem.q.device) * problem.num_queries
    out = torch.full_like(problem.q, torch.nan)
    arguments = {
        **{"q": problem.q, "k": keys, "v": values, "out": out, "block_table": tables, "causal": True},
        **{"cu_seqlens_q": starts, "max_seqlen_q": problem.num_queries, "max_seqlen_k": problem.length},
        "seqused_k": torch.full((problem.count,), problem.length, dtype=torch.int32, device=problem.q.device),
        **{"softmax_scale": problem.spec.scale, "window_size": (-1, -1), "softcap": 0},
        **{"q_descale": None, "k_descale": None, "v_descale": None},
    }

    def call() -> Tensor:
        unified_attention(**arguments)
        return out

    return call


WAYS: dict[str, Callable[[Problem], Way]] = {
    "triton": triton,
    "flash 3": flash(3),
    "flash 2": flash(2),
    "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "flashinfer": flashinfer,
    "vllm triton": vllm_triton,
}
ON_A_CPU = {"triton": triton, "sdpa math": sdpa(SDPBackend.MATH), "flex": flex, "flash 3": flash(3)}


def attention(args: Namespace, device: torch.device, rows: Rows) -> None:
    setting = Setting(device, DTYPES[args.dtype], device.type == "cpu")
    best = ceilings(device)
    if setting.tiny:
        shapes, ways = [("tiny", (4, 2, 16), 3, 32, True), ("tiny", (4, 2, 16), 1, 32, False)], ON_A_CPU
    else:
        decodes = [(name, heads, *size, True) for name, heads in MODELS.items() for size in DECODES]
        ways, shapes = WAYS, decodes + [(name, heads, 1, n, False) for name, heads in MODELS.items() for n in PREFILLS]
    for i, (name, heads, count, length, decodes) in enumerate(shapes):
        case = f"{'decode' if decodes else 'prefill'} {count} x {length}"
        if not rows.wants(name, case):
            continue
        torch.manual_seed(args.seed + i)
        spec = AttentionSpec(*heads, 1 / math.sqrt(heads[2]))
        problem = Problem(setting, spec, count, length, decodes)
        begin = len(rows)
        for way, make in ways.items():
            head = {"heads": name, "case": case, "way": way, "kv_bytes": problem.kv_bytes}
            rows.attempt(head, lambda make=make, problem=problem: _row(make, problem, best))
        _compare(rows[begin:])


def _row(make: Callable[[Problem], Way], problem: Problem, best: Ceilings | None) -> dict[str, Any]:
    try:
        way = make(problem)
    except Missing as e:
        return {"note": str(e)}
    error = error_of(way(), problem.oracle)
    moved = problem.kv_bytes + 2 * problem.q.numel() * problem.q.itemsize
    row = measured(way, moved, problem.flops, best)
    return row | {"error_size": error, "right": error <= 12 * problem.setting.unit}


def _compare(rows: list[dict[str, Any]]) -> None:
    """How many times as fast as each of the others the first is: rows of one case."""
    for other in rows[1:]:
        both = rows[0].get("us"), other.get("us")
        if all(isinstance(us, float) for us in both):
            rows[0][f"times {other['way']}"] = round(both[1] / both[0], 2)
