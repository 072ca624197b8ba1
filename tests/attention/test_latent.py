"""Rules: over pages of latent vectors both forms of latent attention give what K and V of each head would, whichever
steps a request is cut into; each request is computed in the form that multiplies less; pages cost what they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case
from naive_attention import NaiveLatentAttention
from tolerances import ATTENTION
from torch import Tensor

from minivllm.attention.base import AttentionSpec, kv_spec
from minivllm.attention.latent import LatentReference, absorbs, attend_absorbed, attend_expanded
from minivllm.attention.latent_cpu import LatentCPU
from minivllm.attention.select import choose
from minivllm.errors import ConfigError
from minivllm.features import ATTENTION as BY_HEADS
from minivllm.features import LATENT_ATTENTION
from minivllm.kernels.cpu import build
from minivllm.kernels.cpu import latent as kernel
from minivllm.kv_groups import LATENT, Latent, group_layers
from minivllm.runner.block_copy import TorchMove

needs_compiler = pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))

HEADS, NOPE, VALUE, KEPT = 3, 10, 7, Latent(12, 4)
LAYER = AttentionSpec(HEADS, HEADS, NOPE + KEPT.rope_size, 0.25, latent=KEPT)
MIXED = [(0, 33), (40, 1), (16, 17), (15, 1), (5, 11), (0, 1)]  # (tokens computed earlier, tokens of this step)


@dataclass
class LatentCase:
    """Requests with random queries and vectors, over pages."""

    requests: list[tuple[int, int]]
    kv_dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        lengths = [sum(request) for request in self.requests]
        self.queries = [draw(n, HEADS, LAYER.head_size) for n in lengths]
        self.latents = [draw(n, KEPT.size) for n in lengths]
        self.expand = draw(HEADS, NOPE + VALUE, KEPT.rank)
        self.places = Case(replace(LAYER, latent=None), self.requests, block_size=8)
        self.backend = LatentReference(
            [LAYER], kv_spec([LAYER], 8, self.kv_dtype), self.places.num_blocks, CPU, torch.float64
        )
        self.kv = torch.full(self.backend.kv_shape(self.places.num_blocks + 1), torch.nan, dtype=self.kv_dtype)

    def step(self, spans: dict[int, tuple[int, int]], padding: int = 0) -> Tensor:
        """-> [padded T, heads, VALUE]"""
        batch = self.places.batch(spans, padding)
        q, latent = (
            torch.cat([of[r][begin:end] for r, (begin, end) in spans.items()] + [of[0][:1]] * padding)
            for of in (self.queries, self.latents)
        )
        out = torch.full((len(q), HEADS, VALUE), torch.nan, dtype=torch.float64)
        self.backend.forward(q, latent, self.expand, self.kv, self.backend.prepare(batch), LAYER, out)
        return out

    def wanted(self, spans: dict[int, tuple[int, int]]) -> Tensor:
        """Of whole sequences, without a cache, in float32."""
        parts = []
        for r, (begin, end) in spans.items():
            out = torch.empty(end, HEADS, VALUE, dtype=torch.float64)
            NaiveLatentAttention().forward(
                self.queries[r][:end], self.latents[r][:end], self.expand, None, None, LAYER, out
            )
            parts.append(out[begin:])
        return torch.cat(parts)

    def both_steps(self) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
        earlier = {r: (0, before) for r, (before, _) in enumerate(self.requests) if before}
        return earlier, {r: (before, before + new) for r, (before, new) in enumerate(self.requests)}


def test_whatever_steps_a_request_is_cut_into_the_result_is_that_of_k_and_v_of_each_head():
    case = LatentCase(MIXED)
    for spans in case.both_steps():
        found, wanted = case.step(spans, padding=2), case.wanted(spans)
        # The oracle multiplies in float32: what it errs is float32's.
        torch.testing.assert_close(found[:-2], wanted, **{k: 4 * v for k, v in ATTENTION[torch.float32].items()})
        assert (found[-2:] == 0).all()  # padding


def test_both_forms_are_equal_and_the_backend_takes_the_one_that_multiplies_less():
    generator = torch.Generator().manual_seed(1)
    expand = torch.randn(HEADS, NOPE + VALUE, KEPT.rank, generator=generator, dtype=torch.float64)
    for num_queries, num_keys in ((1, 1), (1, 50), (3, 50), (50, 50)):
        q = torch.randn(num_queries, HEADS, LAYER.head_size, generator=generator, dtype=torch.float64)
        kept = torch.randn(num_keys, KEPT.size, generator=generator, dtype=torch.float64)
        forms = [attend(q, kept, expand, LAYER) for attend in (attend_expanded, attend_absorbed)]
        torch.testing.assert_close(*forms, **ATTENTION[torch.float64])
    assert absorbs(1, 50, expand, LAYER) and not absorbs(50, 50, expand, LAYER)


def test_of_deepseeks_sizes_prompts_are_expanded_and_decodes_and_short_chunks_absorbed():
    layer = AttentionSpec(128, 128, 192, 192**-0.5, latent=Latent(512, 64))
    expand = torch.empty(128, 256, 512, device="meta")
    absorbed = {(n, keys) for n in (1, 4, 128, 2048) for keys in (2048, 65_536) if absorbs(n, keys, expand, layer)}
    assert absorbed == {(1, 2048), (4, 2048), (128, 2048), (1, 65_536), (4, 65_536), (128, 65_536)}


def test_vectors_are_rounded_to_the_caches_dtype_and_no_further():
    case, exact = LatentCase(MIXED, torch.float16), LatentCase(MIXED)
    exact.latents = [latent.half().double() for latent in exact.latents]
    for spans in case.both_steps():
        torch.testing.assert_close(case.step(spans), exact.step(spans), **ATTENTION[torch.float64])


def test_blocks_move_whole():
    case = LatentCase([(16, 1)])
    case.step({0: (0, 16)})
    host = torch.zeros(case.backend.kv_shape(2), dtype=torch.float64)
    pairs = [(int(block), i) for i, block in enumerate(case.places.tables[0, :2])]
    move = TorchMove(case.backend.block_axis)
    move([case.kv], [host], pairs)
    case.kv.fill_(torch.nan)
    move([host], [case.kv], [(there, here) for here, there in pairs])
    spans = {0: (16, 17)}
    torch.testing.assert_close(case.step(spans), case.wanted(spans), atol=1e-4, rtol=1e-4)


def test_a_block_costs_one_vector_a_token_and_layer():
    layers = [replace(LAYER, num_heads=128, num_kv_heads=128, head_size=192, latent=Latent(512, 64))] * 61
    assert kv_spec(layers, 16, torch.bfloat16).bytes_per_block == 61 * 16 * 576 * 2  # DeepSeek V3's
    assert kv_spec([replace(LAYER, latent=None)], 16, torch.float32).bytes_per_block == 2 * 16 * HEADS * 14 * 4


def test_latent_layers_are_one_group_with_pages():
    assert LAYER.kind == LATENT
    groups = group_layers([LATENT] * 5)
    assert groups.windows == (None,) and groups.num_tensors == 5


@needs_compiler
def test_auto_takes_a_backend_of_latent_layers_and_says_why_no_other():
    backend, choice = choose("auto", CPU, [LAYER], LATENT_ATTENTION)
    assert backend is LatentCPU and "preferred to reference" in choice.reason
    with pytest.raises(ConfigError, match=r"runner.attention=sdpa cannot run here: it keeps K and V of each head"):
        choose("sdpa", CPU, [LAYER], LATENT_ATTENTION)
    assert choose("reference", CPU, [replace(LAYER, latent=None)], BY_HEADS)[0].kv_layout != "latent"


# ---------------------------------------------------------------- the kernel in C++

DTYPES = [(torch.float32, None), (torch.float32, torch.float16), (torch.bfloat16, None), (torch.float16, None)]


@needs_compiler
@pytest.mark.parametrize("sizes", [(HEADS, NOPE, VALUE, KEPT), (13, 16, 24, Latent(40, 9)), (4, 24, 8, Latent(48, 16))])
@pytest.mark.parametrize("dtype, kv_dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_references_answer(dtype, kv_dtype, sizes):
    heads, nope, value, kept = sizes
    layer = AttentionSpec(heads, heads, nope + kept.rope_size, 0.25, latent=kept)
    generator = torch.Generator().manual_seed(2)
    requests = [*MIXED, (70, 1), (200, 3), (31, 1), (32, 2)]
    places = Case(replace(layer, latent=None), requests, block_size=8)
    spec = kv_spec([layer], 8, kv_dtype or dtype)
    kinds = LatentCPU([layer], spec, places.num_blocks, CPU), LatentReference([layer], spec, places.num_blocks, CPU)
    caches = [torch.full(kind.kv_shape(places.num_blocks + 1), torch.nan, dtype=spec.dtype) for kind in kinds]
    expand = (torch.randn(heads, nope + value, kept.rank, generator=generator) / kept.rank**0.5).to(dtype)
    earlier = {r: (0, before) for r, (before, _) in enumerate(requests) if before}
    for spans in (earlier, {r: (before, before + new) for r, (before, new) in enumerate(requests)}):
        batch = places.batch(spans, 2)
        q = torch.randn(batch.padded_tokens, heads, layer.head_size, generator=generator).to(dtype)
        latent = torch.randn(batch.padded_tokens, kept.size, generator=generator).to(dtype)
        outs = [torch.full((len(q), heads, value), torch.nan, dtype=dtype) for _ in kinds]
        for kind, kv, out in zip(kinds, caches, outs, strict=True):
            kind.forward(q, latent, expand, kv, kind.prepare(batch), layer, out)
        torch.testing.assert_close(*outs, **ATTENTION[dtype])


@needs_compiler
def test_one_query_is_cut_by_heads_into_two_tasks_for_each_thread_and_gives_the_same_bits():
    assert [
        kernel._heads_each(heads, n, 2) for heads, n in ((16, 1), (16, 2), (16, 4), (128, 1), (128, 9), (3, 1))
    ] == [*(4, 8, 16, 24, 24, 1)]
    generator = torch.Generator().manual_seed(3)
    q, cache = torch.randn(1, 16, 40, generator=generator), torch.randn(9, 16, 40, generator=generator)
    table, one, limit = np.arange(9, dtype=np.int32)[None], np.zeros(1, np.int32), np.full(1, 131, np.int32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(kernel.attend(q, cache, table, one, limit, 32, 0.2))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_without_a_compiler_the_reference_serves(monkeypatch):
    monkeypatch.setattr(kernel, "unsupported_reason", lambda: "no compiler on the PATH")
    backend, choice = choose("auto", CPU, [LAYER], LATENT_ATTENTION)
    assert backend is LatentReference and "cpu off: no compiler on the PATH" in choice.reason
