"""Caches in 8 bits, ALiBi and sinks in the interpreter against dense float64 attention over what the reference wrote.
Run by test_interpreter.py."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from attention.batches import CPU, Case
from attention.batches import spec as spec_of
from tolerances import ATTENTION, ENCODED, ROUNDED
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.attention.triton import TritonAttention
from minivllm.kernels import reference
from minivllm.kernels.triton import elementwise, paged
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.tiles import Tile

assert INTERPRETED
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUANTISED = [torch.int8, torch.float8_e4m3fn]
SMALL = Tile(16, 16, 4)
PAGE = 4


def poisoned(num_blocks: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """Every scale is NaN."""
    return torch.full((num_blocks, kv_heads, PAGE * (head_size + 4)), -1, dtype=torch.int8).view(dtype)


@pytest.mark.parametrize("codes", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads, head_size", [(3, 20), (1, 64)])
def test_what_is_written_equals_the_references(codes, dtype, kv_heads, head_size):
    scales = torch.tensor([1.0, 1e-6, 300.0, 0.0, 1.0, 5.0])[:, None, None]
    qkv = (torch.randn(6, 2 + 2 * kv_heads, head_size) * scales).to(dtype)
    qkv[:, :, 1] /= 500  # among small numbers, for e4m3
    k, v = qkv[:, 2 : 2 + kv_heads], qkv[:, 2 + kv_heads :]
    slots = torch.tensor([11, 0, 19, 7, 4, 5])
    got, wanted = ([poisoned(5, kv_heads, head_size, codes) for _ in range(2)] for _ in range(2))
    elementwise.write_quantised(k, v, *got, slots)
    reference.write_quantised(k, v, *wanted, slots)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_code_of_e4m3_is_written_and_read_exactly():
    """One head of all finite codes, whose largest is 448: its scale is 1. A query with one key returns its value."""
    codes = torch.arange(256).to(torch.uint8)
    codes[127], codes[255] = 126, 254  # instead of the two NaN
    numbers = codes.view(torch.float8_e4m3fn).float()[None, None]
    cache, expected = poisoned(1, 1, 256, torch.float8_e4m3fn), numbers.clone()
    elementwise.write_quantised(numbers, numbers, cache, cache.clone(), torch.tensor([0]))
    assert torch.equal(reference.quantised_pages(cache, 256)[0][0, 0, 0].view(torch.uint8), codes)
    out = run([1], [1], cache, cache, torch.zeros(1, 1, 256), spec_of(1, 1, 256))
    assert torch.equal(out, expected)
    between = (numbers[..., :126] + numbers[..., 1:127]) / 2  # ties, to even
    rounded = poisoned(1, 1, 127, torch.float8_e4m3fn)
    row = torch.cat([between, torch.full((1, 1, 1), 448.0)], -1)
    elementwise.write_quantised(row, row, rounded, rounded.clone(), torch.tensor([0]))
    got = reference.quantised_pages(rounded, 127)[0][0, 0, 0]
    assert torch.equal(got.view(torch.uint8), row[0, 0].to(torch.float8_e4m3fn).view(torch.uint8))


def within_half_a_step(cache: Tensor, slots: Tensor, exact: Tensor) -> None:
    """What slots of a quantised cache hold is the nearest that their scales can say; nothing else was written. exact
    [n, kv_heads, head_size] float64."""
    codes, scales = reference.quantised_pages(cache, exact.shape[-1])
    codes = codes.transpose(1, 2).flatten(0, 1).contiguous()  # [slots of the cache, kv_heads, head_size]
    scales = scales.transpose(1, 2).flatten(0, 1).contiguous().view(torch.float32).double()
    largest = exact.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scales[slots], largest / reference.LARGEST[cache.dtype], rtol=ENCODED, atol=0)
    numbers, step = codes[slots].double() * scales[slots], scales[slots]
    if cache.dtype == torch.float8_e4m3fn:  # three bits of fraction; under 2^-6 steps are 2^-9
        code = exact.abs() / step.clamp(min=1e-30)
        step = step * 2.0 ** (code.clamp(min=2**-6).log2().floor() - 3)
    assert ((numbers - exact).abs() <= step / 2 + ENCODED * largest).all()
    untouched = torch.ones(len(scales), dtype=torch.bool).index_fill_(0, slots, False)
    assert scales[untouched].isnan().all()


@pytest.mark.parametrize("codes", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_size", [16, 20])
def test_rope_norm_and_write(codes, dtype, norm, head_size):
    """One launch and its reference, against what the reference leaves in float64 in a cache without codes."""
    heads, kv_heads, slots = 3, 2, torch.tensor([11, 0, 19, 7, 5])
    qkv = torch.randn(5, heads + 2 * kv_heads, head_size).to(dtype)
    qkv[3, heads:] = 0
    qkv[4, heads + kv_heads :] *= 1000
    angles = torch.arange(50)[:, None] * 0.3 ** torch.arange(head_size // 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = torch.randn(2, head_size).to(dtype) if norm else None
    step = slots, torch.tensor([0, 49, 3, 17, 1]), *tables, weight, 1e-5
    exact = [torch.zeros(5, kv_heads, PAGE, head_size, dtype=torch.float64) for _ in range(2)]
    wanted = torch.empty(5, heads, head_size, dtype=torch.float64)
    reference.rope_write(qkv, wanted, *exact, *step)
    for function in (elementwise.rope_write, reference.rope_write):
        caches = [poisoned(5, kv_heads, head_size, codes) for _ in range(2)]
        q = torch.full_like(wanted, torch.nan, dtype=torch.float32)
        function(qkv, q, *caches, *step)
        torch.testing.assert_close(q.double(), wanted, **ROUNDED[torch.float32])
        for cache, numbers in zip(caches, exact, strict=True):
            within_half_a_step(cache, slots, numbers[slots // PAGE, :, slots % PAGE])


def run(
    lengths: list[int],
    queries: list[int],
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor,
    spec: AttentionSpec,
    by_head: paged.ByHead = paged.NOTHING,
    num_splits: int = 1,
) -> Tensor:
    """Requests one after the other in blocks 0, 1, 2, ..."""
    counts = [-(-n // PAGE) for n in lengths]
    firsts = [0, *accumulate(counts)][:-1]
    tables = torch.tensor([list(range(first, first + max(counts))) for first in firsts])
    starts = torch.tensor([0, *accumulate(queries)])
    arrays = starts[:-1], torch.tensor(lengths), tables, starts
    requests = paged.Requests(*(x.to(torch.int32) for x in arrays), sum(queries))
    heads = spec.num_heads, spec.num_kv_heads, spec.head_size
    head = paged.Head(*heads, spec.scale, spec.sliding_window or 0, spec.soft_cap or 0.0)
    out = torch.full_like(q, torch.nan)
    if max(queries) == 1:
        paged.decode(q, k_cache, v_cache, requests, head, out, paged.Scratch(CPU), SMALL, num_splits, by_head)
    else:
        paged.prefill(q, k_cache, v_cache, requests, head, out, SMALL, by_head)
    return out


def right(
    lengths: list[int],
    queries: list[int],
    spec: AttentionSpec,
    dtype: torch.dtype,
    codes: torch.dtype | None,
    by_head: paged.ByHead = paged.NOTHING,
    num_splits: int = 1,
) -> None:
    num_blocks = sum(-(-n // PAGE) for n in lengths)
    shape = num_blocks * PAGE, spec.num_kv_heads, spec.head_size
    k, v = (torch.randn(shape).to(dtype) for _ in range(2))
    q = torch.randn(sum(queries), spec.num_heads, spec.head_size).to(dtype)
    if codes is None:
        caches = [torch.empty(num_blocks, shape[1], PAGE, shape[2], dtype=dtype) for _ in range(2)]
        reference.write(k, v, *caches, torch.arange(len(k)))
        held = caches
    else:
        caches = [poisoned(num_blocks, *shape[1:], codes) for _ in range(2)]
        reference.write_quantised(k, v, *caches, torch.arange(len(k)))
        held = [reference.read_quantised(cache, spec.head_size) for cache in caches]
    got = run(lengths, queries, *caches, q, spec, by_head, num_splits)
    k, v = (cache.transpose(1, 2).flatten(0, 1).double() for cache in held)
    wanted, first_block, first_query = [], 0, 0
    extra = [None if x is None else x.double() for x in by_head]
    for length, count in zip(lengths, queries, strict=True):
        own = slice(first_block * PAGE, first_block * PAGE + length)
        asked = q[first_query : first_query + count].double()
        wanted.append(reference.attend_with(asked, k[own], v[own], spec, *extra))
        first_block, first_query = first_block + -(-length // PAGE), first_query + count
    torch.testing.assert_close(got.double(), torch.cat(wanted), **ATTENTION[dtype])


DECODES = [1, 16, 17, 40], [1] * 4
PREFILLS = [20, 33, 3], [7, 33, 2]


@pytest.mark.parametrize("codes", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_codes(codes, dtype):
    right(*DECODES, spec_of(), dtype, codes, num_splits=3)
    right(*PREFILLS, spec_of(), dtype, codes)


def heads(count: int, slopes: bool, sinks: bool) -> paged.ByHead:
    steep = 2.0 ** -torch.arange(1, count + 1)
    return paged.ByHead(steep if slopes else None, torch.linspace(-3, 4, count) if sinks else None)


@pytest.mark.parametrize("slopes, sinks", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("codes", [None, torch.int8], ids=str)
def test_slopes_and_sinks(slopes, sinks, codes):
    by_head = heads(6, slopes, sinks)
    for num_splits in (1, 4):
        right(*DECODES, spec_of(window=20, soft_cap=3.0), torch.float32, codes, by_head, num_splits)
    right(*PREFILLS, spec_of(window=9), torch.float16, codes, by_head)
    right(*PREFILLS, spec_of(), torch.float16, codes, by_head)


def test_a_sink_takes_the_weight_that_it_is_due():
    """One key of score 0 and a sink of log(3): a quarter is left of the value."""
    cache = torch.ones(1, 1, PAGE, 16)
    by_head = paged.ByHead(sinks=torch.tensor([math.log(3)]))
    for queries in ([1], [2]):
        out = run(queries, queries, cache, cache, torch.zeros(queries[0], 1, 16), spec_of(1, 1, 16), by_head)
        torch.testing.assert_close(out[0], torch.full((1, 16), 0.25))


@pytest.mark.parametrize("codes", QUANTISED, ids=str)
@pytest.mark.parametrize("head_size, block_size", [(16, 16), (20, 1), (96, 256)])
def test_the_backend_writes_and_reads_codes(codes, head_size, block_size):
    layer = spec_of(head_size=head_size, window=30)
    case = Case(layer, [(20, 5), (40, 1), (0, 9)], block_size, kv_dtype=codes, padding=2)
    backend = TritonAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU, (SMALL, Tile(32, 16, 4)))
    kv = torch.full(backend.kv_shape(case.num_blocks + 1), -1, dtype=torch.int8).view(codes)
    for r, (computed, _) in enumerate(case.requests):
        slots = torch.from_numpy(case.slots(r, 0, computed))
        reference.write_quantised(*(x[:computed] for x in case.qkv[r][1:]), *kv, slots)
    out = case.run(backend, kv)
    torch.testing.assert_close(out[:-2].double(), case.expected(), **ATTENTION[case.dtype])
