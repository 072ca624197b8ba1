"""Paged attention in the interpreter gives the dense float64 answer. Run by test_interpreter.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED, SLOPES
from tolerances import ATTENTION

from minivllm.attention.triton import TritonAttention
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.tiles import Tile

assert INTERPRETED
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = Tile(16, 16, 4), Tile(32, 16, 4)  # several tiles in a short sequence
SEVERAL = [(20, 13), (40, 1), (0, 40), (0, 1), (15, 17)]


def filled(case: Case, backend: TritonAttention, kv: torch.Tensor | None = None) -> torch.Tensor:
    """A cache that is NaN where nobody wrote. Case.cache() would attend too, which takes long in the interpreter."""
    kv = torch.full(backend.kv_shape(case.num_blocks + 1), torch.nan, dtype=case.dtype) if kv is None else kv
    for r, (computed, _) in enumerate(case.requests):
        slots = torch.from_numpy(case.slots(r, 0, computed))
        for half, x in zip(kv, case.qkv[r][1:], strict=True):
            half[slots // case.block_size, :, slots % case.block_size] = x[:computed]
    return kv


def right(*args, tiles=SMALL, num_sms=1, **options) -> None:
    case = Case(*args, **options)
    backend = TritonAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU, tiles, num_sms)
    out = case.run(backend, filled(case, backend))
    num_tokens = len(out) - case.padding
    torch.testing.assert_close(out[:num_tokens].double(), case.expected(), **ATTENTION[case.dtype])
    assert (out[num_tokens:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decodes_prefills_and_chunks_mix_in_one_batch(dtype):
    right(spec(), MIXED, dtype=dtype, padding=3, spare_columns=5)


@pytest.mark.parametrize("requests", [SEVERAL, [(40, 1), (16, 1)]], ids=str)
def test_columns_may_be_on_the_device(requests):
    right(spec(), requests, padding=3, spare_columns=5, device=CPU)


def test_nothing_is_waited_for_to_prepare_from_columns_on_the_device(apart):
    case = Case(spec(), SEVERAL, padding=3, device=apart)
    backend = TritonAttention([case.spec], case.kv_spec, case.num_blocks + 1, apart, SMALL, 1)
    meta = backend.prepare(case.batch(case.now, 3))
    assert {x.device for x in (meta.slots, meta.decodes.tables, meta.others.tables)} == {apart}


@pytest.mark.parametrize("num_sms", [1, 3, 40])
def test_splits_of_unequal_requests(num_sms):
    """Some requests are too short for some of the splits, whose scratch is then never written."""
    right(spec(), [(n, 1) for n in (0, 15, 16, 17, 63)], num_sms=num_sms)
    right(spec(window=20, soft_cap=2.0), [(n, 1) for n in (0, 15, 19, 20, 63)], num_sms=num_sms)


@pytest.mark.parametrize("block_size", [1, 16, 20, 64, 256])
def test_any_block_size(block_size):
    right(spec(), SEVERAL, block_size, dtype=torch.float16)


@pytest.mark.parametrize("head_size", [8, 20, 64, 80, 256])
def test_any_head_size(head_size):
    right(spec(4, 2, head_size), SEVERAL)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (9, 3), (7, 1), (16, 2), (20, 1)])
def test_any_ratio_of_query_heads_to_kv_heads(num_heads, num_kv_heads):
    right(spec(num_heads, num_kv_heads), SEVERAL, tiles=(Tile(32, 16, 4), Tile(32, 16, 4)))


@pytest.mark.parametrize("window", [1, 5, 16, 17, 33, 1000])
def test_sliding_windows(window):
    right(spec(window=window), SEVERAL)


def test_a_window_wider_than_a_tile_has_keys_that_all_queries_see():
    right(spec(2, 2, window=70), [(100, 40), (90, 1)])


def test_soft_caps_and_scores_that_overflow():
    right(spec(soft_cap=0.5), SEVERAL)
    right(replace(spec(soft_cap=2.0), scale=1e4), SEVERAL)


def test_slopes():
    right(spec(slopes=SLOPES), SEVERAL, padding=3)
    right(spec(window=20, soft_cap=2.0, slopes=SLOPES), SEVERAL)


def test_the_shipped_tiles():
    right(spec(4, 2, 64), [(100, 1), (30, 100), (0, 7)], dtype=torch.float16, tiles=None)


def test_a_block_past_two_to_the_31_elements():
    """Offsets are 64 bits wide: the last block of a cache of 2^31 elements and more, of which few pages are touched."""
    case = Case(spec(2, 2, 256), [(33, 1), (20, 3)], 16, torch.float16)
    num_blocks = 2**31 // (2 * 16 * 256) + case.num_blocks
    case.tables += num_blocks - case.num_blocks - 1
    backend = TritonAttention([case.spec], case.kv_spec, num_blocks, CPU, SMALL, 3)
    kv = torch.empty(backend.kv_shape(num_blocks), dtype=torch.float16)  # never filled, so never resident
    case.num_blocks = num_blocks - 1
    kv[:, -40:] = torch.nan
    torch.testing.assert_close(
        case.run(backend, filled(case, backend, kv)).double(), case.expected(), **ATTENTION[torch.float16]
    )


def test_views_of_one_projection():
    case = Case(spec(), SEVERAL)
    backend = TritonAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU, SMALL)
    kv = filled(case, backend)
    q, k, v = torch.cat(case.inputs(case.now), 1).split([6, 2, 2], 1)
    out = torch.full(q.shape, torch.nan)
    backend.forward(q, k, v, kv, backend.prepare(case.batch(case.now)), case.spec, out)
    torch.testing.assert_close(out.double(), case.expected(), **ATTENTION[case.dtype])


def test_only_the_batchs_slots_are_written():
    case = Case(spec(), SEVERAL, padding=2)
    backend = TritonAttention([case.spec], case.kv_spec, case.num_blocks + 1, CPU, SMALL)
    kv = filled(case, backend)
    before = kv.clone()
    case.run(backend, kv)
    changed = ((kv != before) & ~(kv.isnan() & before.isnan())).any(-1).any(2).any(0)  # [blocks, block_size]
    slots = case.batch(case.now, case.padding).slot_mapping
    assert set(np.flatnonzero(changed)) <= set(slots.tolist())
