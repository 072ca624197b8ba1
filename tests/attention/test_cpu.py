"""The C++ kernels give the dense float64 answer for any batch, dtype and page, and the same bits whoever else runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case, quantised, spec
from attention.test_backends import MIXED, SLOPES, assert_right, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import ATTENTION

from minivllm.attention.base import KVSpec
from minivllm.attention.cpu import CPUAttention
from minivllm.batch import InputBatch
from minivllm.kernels.cpu import build

pytestmark = pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LONG = [(1500, 1), (700, 7), (511, 1), (512, 1), (0, 300), (600, 30), (1023, 2)]  # pieces of 512 keys, tiles of 32 rows


QUANTISED = [torch.int8, torch.float8_e4m3fn]


ROUNDED = (torch.float32, torch.float16)


@pytest.fixture(params=[*DTYPES, *QUANTISED, ROUNDED], ids=str)
def dtypes(request):
    """(of q, k and v; of the cache)"""
    if request.param is ROUNDED:
        return ROUNDED
    return (torch.bfloat16, request.param) if request.param in QUANTISED else (request.param, None)


def right(*args, **options) -> None:
    assert_right(CPUAttention, Case(*args, **options))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 20, 48, 200, 256])
@pytest.mark.parametrize("shuffle", [True, False])
def test_any_block_size(dtypes, block_size, shuffle):
    dtype, kv_dtype = dtypes
    right(spec(), MIXED, block_size, dtype, shuffle, padding=3, spare_columns=5, kv_dtype=kv_dtype)
    right(spec(9, 3, 64), LONG, block_size, dtype, shuffle, kv_dtype=kv_dtype)


@pytest.mark.parametrize("head_size", [1, 3, 8, 20, 33, 64, 80, 96, 128, 256])
def test_any_head_size(dtypes, head_size):
    dtype, kv_dtype = dtypes
    for block_size in (3, 16):
        right(spec(head_size=head_size), MIXED, block_size, dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (4, 4), (9, 3), (7, 1), (71, 1), (64, 8)])
def test_any_ratio_of_query_heads_to_kv_heads(dtypes, num_heads, num_kv_heads):
    right(spec(num_heads, num_kv_heads), MIXED, dtype=dtypes[0], kv_dtype=dtypes[1])


@pytest.mark.parametrize("window", [1, 5, 16, 17, 24, 513, 1000, 5000])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_sliding_windows_and_soft_caps(dtypes, window, soft_cap):
    for block_size in (5, 16):
        for requests in (MIXED, LONG):
            kinds = {"dtype": dtypes[0], "kv_dtype": dtypes[1]}
            right(spec(window=window, soft_cap=soft_cap), requests, block_size, **kinds)


@pytest.mark.parametrize("window, soft_cap", [(None, None), (600, None), (None, 3.0)])
def test_slopes(dtypes, window, soft_cap):
    for block_size in (5, 16):
        for requests in (MIXED, LONG):
            shape = spec(window=window, soft_cap=soft_cap, slopes=SLOPES)
            right(shape, requests, block_size, dtype=dtypes[0], kv_dtype=dtypes[1])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1024, 8192])
def test_lengths_around_blocks_chunks_and_pieces(dtypes, length):
    for block_size in (1, 16, 256):
        options = {"dtype": dtypes[0], "kv_dtype": dtypes[1]}
        shape = spec(9, 3, 64) if length < 2000 else spec(2, 1)
        right(shape, [(length - 1, 1), (length - min(length, 12), min(length, 12))], block_size, **options)


def test_a_huge_score_does_not_overflow_the_soft_cap():
    from dataclasses import replace

    right(replace(spec(soft_cap=2.0), scale=1e4), MIXED)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=cases(), kv_dtype=st.none() | st.sampled_from([torch.float16, *QUANTISED]))
def test_any_batch(case, kv_dtype):
    case.kv_dtype = kv_dtype
    assert_right(CPUAttention, case)


def test_layers_of_different_windows_share_a_step():
    near, far = Case(spec(window=8), MIXED + LONG), Case(spec(), MIXED + LONG)
    backend = CPUAttention([far.spec, near.spec] * 2, far.kv_spec, far.num_blocks + 1, CPU)
    caches = [case.cache(backend) for case in (far, near)]
    meta = backend.prepare(far.batch(far.now))
    for case, kv in zip((far, near) * 2, caches * 2, strict=True):  # twice: a layer leaves nothing behind in the plan
        q, k, v = case.inputs(case.now)
        out = torch.full_like(q, torch.nan)
        backend.forward(q, k, v, kv, meta, case.spec, out)
        torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def run(case: Case, backend: CPUAttention, kv: torch.Tensor, spans: dict[int, tuple[int, int]]) -> torch.Tensor:
    kv = kv.clone()
    q, k, v = case.inputs(spans)
    out = torch.full_like(q, torch.nan)
    backend.forward(q, k, v, kv, backend.prepare(case.batch(spans)), case.spec, out)
    return out


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_neither_the_batch_nor_the_threads_change_a_bit(dtypes, num_threads):
    case = Case(spec(9, 3, 64), MIXED + LONG, dtype=dtypes[0], kv_dtype=dtypes[1])
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv, before = case.cache(backend), torch.get_num_threads()
    alone = [run(case, backend, kv, {r: span}) for r, span in case.now.items()]
    try:
        torch.set_num_threads(num_threads)
        together = run(case, backend, kv, case.now)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("block_size", [16, 20])
@pytest.mark.parametrize("window", [None, 300])
def test_no_bit_depends_on_how_a_prompt_is_cut(dtypes, window, block_size):
    """In one step, in chunks, token by token: as it is computed again behind a cached prefix, or after a preemption."""
    if dtypes[0] is torch.bfloat16 and dtypes[1] is None and "AMX" in build.isa():
        pytest.skip("the matrix unit adds up many queries' products in another order than a vector adds up one's")
    case = Case(spec(9, 3, 64, window), [(0, 1100)], block_size, dtype=dtypes[0], kv_dtype=dtypes[1])
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv = case.cache(backend)
    (q, k, v), whole = case.inputs(case.now), torch.empty(1100, 9, 64, dtype=dtypes[0])
    backend.forward(q, k, v, kv, backend.prepare(case.batch(case.now)), case.spec, whole)
    spans = [
        (0, 1),
        (0, 5),
        (3, 520),
        (250, 262),
        (299, 302),
        (511, 512),
        (512, 513),
        (700, 701),
        (1020, 1040),
        (1099, 1100),
    ]
    for begin, end in spans:
        assert torch.equal(run(case, backend, kv, {0: (begin, end)}), whole[begin:end]), (begin, end)


def test_only_the_batchs_slots_are_written(dtypes):
    case = Case(spec(), MIXED, dtype=dtypes[0], kv_dtype=dtypes[1])
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv = case.cache(backend)
    before = kv.clone()
    case.run(backend, kv)
    changed = (kv.view(torch.uint8) != before.view(torch.uint8)).sum()
    num_tokens = sum(new for _, new in case.requests)
    per_token = case.kv_spec.bytes_per_block // case.block_size
    assert 0 < changed <= num_tokens * per_token  # a byte may be written and stay as it was
    assert changed > 0.9 * num_tokens * per_token


def test_a_page_takes_what_the_pool_is_sized_by(dtypes):
    for block_size in (1, 2, 16, 20, 256):
        kv_spec = KVSpec(1, 3, 64, block_size, dtypes[1] or dtypes[0])
        shape = CPUAttention([spec(9, 3, 64)], kv_spec, 8, CPU).kv_shape(8)
        assert np.prod(shape) * kv_spec.dtype.itemsize == 8 * kv_spec.bytes_per_block


def test_inputs_may_be_views_of_one_packed_projection(dtypes):
    case = Case(spec(), MIXED, dtype=dtypes[0], kv_dtype=dtypes[1])
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv = case.cache(backend)
    q, k, v = torch.cat(case.inputs(case.now), dim=1).split([6, 2, 2], dim=1)
    out = torch.empty(q.shape, dtype=q.dtype)
    backend.forward(q, k, v, kv, backend.prepare(case.batch(case.now)), case.spec, out)
    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def test_the_builders_arrays_may_change_after_prepare():
    case = Case(spec(), MIXED)
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv, batch = case.cache(backend), case.batch(case.now)
    meta = backend.prepare(batch)
    for array in (batch.slot_mapping, batch.block_tables, batch.query_start, batch.seq_lens):
        array[...] = 0
    q, k, v = case.inputs(case.now)
    out = torch.empty_like(q)
    backend.forward(q, k, v, kv, meta, case.spec, out)
    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def test_padding_alone_is_no_work():
    """What a warm-up of a padded shape gives: no request at all."""
    case = Case(spec(), [(0, 1)])
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    empty = np.zeros(0, np.int64)
    tables, start = np.zeros((0, 1), np.int32), np.zeros(1, np.int32)
    padding = np.zeros(2, np.int64)
    batch = InputBatch([], empty, padding, empty, empty, start, empty, tables, empty, empty, empty, 0, 0, 0)
    q, out = torch.full((2, 6, 16), torch.nan), torch.full((2, 6, 16), torch.nan)
    kv = case.cache(backend)
    backend.forward(q, q[:, :2], q[:, :2], kv, backend.prepare(batch), case.spec, out)
    assert not out.any() and kv.isnan().all()


@pytest.mark.parametrize("codes", QUANTISED, ids=str)
def test_a_nan_is_not_hidden_by_eight_bits(codes):
    case = Case(spec(), [(20, 1)], kv_dtype=codes)
    case.qkv[0][1][7, 0, 3] = torch.nan
    backend = CPUAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    out = case.run(backend)
    assert out[0, :3].isnan().all() and out[0, 3:].isfinite().all()


@pytest.mark.parametrize("head_size", [64, 128])
def test_eight_bits_err_by_no_more_than_their_rounding(head_size):
    """A key errs by at most half its scale in each element, so a score by e = scale * |q|_1 * largest(k) / 254, and a
    softmax weight by a factor of at most exp(2 e). The mean of values then moves by (exp(2 e) - 1) * largest |v|, and
    by half the value's scale."""
    plain = Case(spec(head_size=head_size), [(n - 1, 1) for n in (1, 40, 200, 1000)])
    eight = Case(plain.spec, plain.requests, kv_dtype=torch.int8)
    backend = CPUAttention([eight.spec], eight.kv_spec, eight.num_blocks + 1, CPU)
    error = (eight.run(backend).double() - plain.expected()).abs().amax(-1)  # [R, heads]
    for r, (q, k, v) in enumerate(plain.qkv):
        assert (quantised(k) - k).abs().max() <= k.abs().max() / 254 * 1.001
        score_error = plain.spec.scale * q[-1].abs().sum(-1).max() * k.abs().max() / 254
        bound = torch.expm1(2 * score_error) * v.abs().max() + v.abs().max() / 254 + 1e-5
        assert error[r].max() <= bound
        assert error[r].max() <= 0.05  # what random signs make of it: far below the bound
