"""Every backend gives the dense float64 answer, whatever the batch is made of and wherever its blocks lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import ATTENTION

from minivllm.attention import sdpa, sdpa_plan
from minivllm.attention.reference import ReferenceAttention, visible
from minivllm.attention.sdpa import SDPAAttention

MIXED = [(40, 1), (0, 7), (16, 1), (20, 13), (0, 1), (15, 17), (31, 1), (3, 2)]  # (computed earlier, new)


def assert_right(backend_class, case: Case, **options) -> None:
    layers = case.spec, case.writing
    backend, writer = (backend_class([x], case.kv_spec, case.num_blocks + 1, CPU, **options) for x in layers)
    out = case.run(backend, case.cache(backend, writer))
    num_tokens = len(out) - case.padding
    torch.testing.assert_close(out[:num_tokens].double(), case.expected(), **ATTENTION[case.dtype])
    assert out[num_tokens:].isfinite().all()


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and on a busy machine wait for them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=["fused", "products"])
def sdpa_class(request, monkeypatch):
    """sdpa, with either of its two ways for decodes of any size."""
    monkeypatch.setattr(sdpa_plan, "FUSED_KEYS", 10**9 if request.param == "fused" else 0)
    return SDPAAttention


@pytest.fixture(params=["reference", "fused", "products"])
def backend_class(request, monkeypatch):
    if request.param == "reference":
        return ReferenceAttention
    monkeypatch.setattr(sdpa_plan, "FUSED_KEYS", 10**9 if request.param == "fused" else 0)
    return SDPAAttention


def test_the_oracle_in_float64_is_exact():
    assert_right(ReferenceAttention, Case(spec(), MIXED, dtype=torch.float64), compute_dtype=torch.float64)


@pytest.mark.parametrize("kept_in", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("options", [{}, {"head_size": 20, "window": 20}, {"num_heads": 3, "num_kv_heads": 1}], ids=str)
def test_the_oracle_keeps_fewer_bits(kept_in, options):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(spec(**options), MIXED, dtype=dtype, kv_dtype=kept_in, padding=2)
        assert_right(ReferenceAttention, case, compute_dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decodes_prefills_and_chunks_mix_in_one_batch(backend_class, dtype):
    assert_right(backend_class, Case(spec(), MIXED, dtype=dtype, padding=3, spare_columns=5))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_lengths_around_a_block_boundary(backend_class, block_size, shuffle):
    lengths = sorted({n for n in (1, block_size - 1, block_size, block_size + 1, 3 * block_size) if n > 0})
    decodes = [(n - 1, 1) for n in lengths]
    chunks = [(n, m) for n in lengths for m in (1, 2, block_size) if n <= 65]
    prefills = [(0, n) for n in lengths]
    for requests in (decodes, prefills, chunks, chunks + decodes + prefills):
        assert_right(backend_class, Case(spec(), requests, block_size, shuffle=shuffle))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_a_single_decode_over_consecutive_and_scattered_blocks(backend_class, length):
    for shuffle in (True, False):
        assert_right(backend_class, Case(spec(), [(length - 1, 1)], shuffle=shuffle))


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (4, 4), (4, 2), (9, 3), (7, 1), (16, 2)])
def test_any_ratio_of_query_heads_to_kv_heads(backend_class, num_heads, num_kv_heads):
    assert_right(backend_class, Case(spec(num_heads, num_kv_heads), MIXED))


@pytest.mark.parametrize("head_size", [1, 8, 20, 33, 64, 80])
def test_any_head_size(backend_class, head_size):
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(backend_class, Case(spec(head_size=head_size), MIXED, dtype=dtype))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 24, 1000])
def test_sliding_windows_shorter_and_longer_than_the_sequence(backend_class, window, soft_cap):
    for shuffle in (True, False):
        assert_right(backend_class, Case(spec(window=window, soft_cap=soft_cap), MIXED, shuffle=shuffle, padding=1))


SLOPES = tuple(2.0**-i for i in range(6))


@pytest.mark.parametrize("shape", [{}, {"window": 20}, {"soft_cap": 2.0}, {"num_kv_heads": 6}], ids=str)
def test_scores_with_slopes(backend_class, shape):
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(backend_class, Case(spec(**shape, slopes=SLOPES), MIXED, dtype=dtype, padding=3))
        assert_right(backend_class, Case(spec(**shape, slopes=SLOPES), [(40, 1)], dtype=dtype, shuffle=False))


def test_slopes_change_the_answer():
    case = Case(spec(slopes=SLOPES), MIXED)
    plain = replace(case, spec=spec())
    assert (case.expected() - plain.expected()).abs().max() > 0.1


def test_soft_capped_scores(backend_class):
    for dtype in (torch.float32, torch.bfloat16):
        assert_right(backend_class, Case(spec(soft_cap=0.5), MIXED, dtype=dtype))


def test_a_huge_score_does_not_overflow_the_soft_cap(backend_class):
    case = Case(replace(spec(soft_cap=2.0), scale=1e4), MIXED)
    assert_right(backend_class, case)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"window": 50}, {"soft_cap": 1.0}], ids=str)
def test_long_queries_are_masked_tile_by_tile(monkeypatch, options):
    monkeypatch.setattr(sdpa_plan, "QUERY_TILE", 8)
    assert_right(SDPAAttention, Case(spec(**options), [(30, 33), (0, 29), (5, 8), (0, 8), (64, 9)]))


@pytest.mark.parametrize("window", [None, 5])
def test_a_mask_is_right_whatever_was_asked_for_before(monkeypatch, window):
    monkeypatch.setattr(sdpa_plan, "QUERY_TILE", 8)
    planner = sdpa_plan.Planner(16, 4, torch.float32, torch.float32, CPU)
    for num_queries, num_keys in [(5, 9), (8, 16), (5, 17), (1, 1), (8, 32), (3, 33), (8, 80), (5, 12)]:
        mask = planner.corner(window, num_queries, num_keys)
        seen = visible(num_queries, num_keys, window, CPU)
        assert torch.equal(mask, torch.zeros(num_queries, num_keys).masked_fill(~seen, -torch.inf))


@pytest.mark.parametrize("num_tokens", [19, 20, 21])
def test_a_prompt_around_the_length_of_the_window(backend_class, num_tokens):
    assert_right(backend_class, Case(spec(window=20), [(0, num_tokens)]))


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [9, 1, 4, 9, 2, 300, 1, 8, 80, 81], list(range(50))])
@pytest.mark.parametrize("split, group", [(0, 1 << 30), (64, 1 << 30), (1 << 30, 64), (1 << 30, 0)])
def test_groups_are_a_partition_in_batch_order(monkeypatch, lengths, split, group):
    monkeypatch.setattr(sdpa_plan, "SPLIT_BYTES", split)
    monkeypatch.setattr(sdpa_plan, "GROUP_BYTES", group)
    groups = sdpa_plan.split_by_length(np.array(lengths), block_bytes=1)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for members in groups:
        assert (np.diff(members) > 0).all()
        longest = max(lengths[i] for i in members)
        assert len(members) == 1 or len(members) * longest <= group
    assert split > 0 or all(len({lengths[i] for i in members}) == 1 for members in groups)


@pytest.mark.parametrize("window", [None, 20])
def test_grouping_by_length_changes_no_result(sdpa_class, monkeypatch, window):
    lengths = [300, 3, 17, 120, 299, 64, 1, 16, 33, 18]
    case = Case(spec(window=window), [(n, 1) for n in lengths] + [(7, 5)])
    for split, group in ((0, 1 << 30), (1 << 30, 1 << 30), (4096, 1 << 30), (1 << 30, 8192), (1 << 30, 0)):
        monkeypatch.setattr(sdpa_plan, "SPLIT_BYTES", split)
        monkeypatch.setattr(sdpa_plan, "GROUP_BYTES", group)
        assert_right(sdpa_class, case)


def test_layers_of_different_windows_share_a_step():
    """Layers alternate in Gemma; prepare() serves them all."""
    near, far = Case(spec(window=8), MIXED), Case(spec(), MIXED)
    backend = SDPAAttention([far.spec, near.spec] * 2, far.kv_spec, far.num_blocks + 1, CPU)
    caches = [case.cache(backend) for case in (far, near)]
    meta = backend.prepare(far.batch(far.now))
    for case, kv in zip((far, near), caches, strict=True):
        q, k, v = case.inputs(case.now)
        out = torch.empty_like(q)
        backend.forward(q, k, v, kv, meta, case.spec, out)
        torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def test_only_the_batchs_slots_are_written(backend_class):
    case = Case(spec(), MIXED, padding=2)
    backend = backend_class([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv = case.cache(backend)
    before = kv.clone()
    case.run(backend, kv)
    changed = (kv != before) & ~(kv.isnan() & before.isnan())
    num_tokens = sum(new for _, new in case.requests)
    # Padding rows are NaN in these tests, as is the spare block that they are written to.
    assert changed.sum() == 2 * num_tokens * case.spec.num_kv_heads * case.spec.head_size


def test_inputs_may_be_views_of_one_packed_projection(backend_class):
    case = Case(spec(), MIXED)
    backend = backend_class([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv = case.cache(backend)
    q, k, v = torch.cat(case.inputs(case.now), dim=1).split([6, 2, 2], dim=1)
    out = torch.empty_like(q)
    backend.forward(q, k, v, kv, backend.prepare(case.batch(case.now)), case.spec, out)
    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def test_the_builders_arrays_may_change_after_prepare(backend_class):
    """A batch's arrays are views of buffers that the next build() rewrites."""
    case = Case(spec(), MIXED)
    backend = backend_class([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv, batch = case.cache(backend), case.batch(case.now)
    batch.block_tables = batch.block_tables.copy()
    meta = backend.prepare(batch)
    for array in (batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_tables):
        array.fill(0)
    q, k, v = case.inputs(case.now)
    out = torch.empty_like(q)
    backend.forward(q, k, v, kv, meta, case.spec, out)
    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


@pytest.mark.parametrize("requests", [MIXED, [(40, 1), (16, 1)], [(0, 7), (3, 2)]], ids=str)
def test_columns_may_be_on_the_device(requests):
    assert_right(ReferenceAttention, Case(spec(), requests, padding=3, spare_columns=5, device=CPU))


def test_nothing_is_waited_for_to_prepare_from_columns_on_the_device(apart):
    case = Case(spec(), MIXED, padding=3, device=apart)
    backend = ReferenceAttention([case.spec], case.kv_spec, case.num_blocks + 1, apart)
    assert backend.prepare(case.batch(case.now, 3)).slots.device == apart


def test_sixteen_bit_cpus_without_16_bit_products_compute_in_float32(sdpa_class, monkeypatch):
    monkeypatch.setattr(sdpa, "matmul_dtype", lambda dtype, device: torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        assert_right(sdpa_class, Case(spec(), MIXED, dtype=dtype))
        assert_right(sdpa_class, Case(spec(soft_cap=1.0), MIXED, dtype=dtype))


@st.composite
def cases(draw) -> Case:
    num_kv_heads = draw(st.integers(1, 3))
    lengths = st.integers(0, 70)
    return Case(
        spec=spec(
            num_heads=num_kv_heads * draw(st.integers(1, 8)),
            num_kv_heads=num_kv_heads,
            head_size=draw(st.sampled_from([4, 16, 24])),
            window=draw(st.none() | st.integers(1, 90)),
            soft_cap=draw(st.none() | st.just(4.0)),
        ),
        requests=draw(st.lists(st.tuples(lengths, st.just(1) | st.integers(1, 40)), min_size=1, max_size=12)),
        block_size=draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        shuffle=draw(st.booleans()),
        padding=draw(st.integers(0, 4)),
        spare_columns=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), fused_keys=st.sampled_from([0, 400, 10**9]), split_bytes=st.sampled_from([0, 2048, 1 << 30]))
def test_any_batch(case, fused_keys, split_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_plan, "FUSED_KEYS", fused_keys)
        patch.setattr(sdpa_plan, "SPLIT_BYTES", split_bytes)
        assert_right(SDPAAttention, case)
    assert_right(ReferenceAttention, case)
