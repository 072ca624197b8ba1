"""FlexAttention over blocks gives the dense float64 answer, and lists for compiled kernels every block that is seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED, assert_right

from minivllm.attention import flex
from minivllm.attention.base import KVSpec
from minivllm.attention.flex import FlexBackend
from minivllm.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decodes_prefills_and_chunks_mix_in_one_batch(dtype):
    assert_right(FlexBackend, Case(spec(), MIXED, dtype=dtype, padding=3, spare_columns=5))


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_lengths_around_a_block_boundary(block_size):
    lengths = sorted({n for n in (1, block_size - 1, block_size, block_size + 1) if n > 0})
    decodes, prefills = [(n - 1, 1) for n in lengths], [(0, n) for n in lengths]
    for requests in (decodes, prefills, decodes + [(n, 2) for n in lengths]):
        assert_right(FlexBackend, Case(spec(), requests, block_size))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [1, 17, 1000])
def test_windows_and_soft_caps(window, soft_cap):
    assert_right(FlexBackend, Case(spec(window=window, soft_cap=soft_cap), MIXED, padding=1))


@pytest.mark.parametrize("num_heads, num_kv_heads, head_size", [(1, 1, 8), (9, 3, 64), (7, 1, 20)])
def test_heads_of_any_number_and_size(num_heads, num_kv_heads, head_size):
    assert_right(FlexBackend, Case(spec(num_heads, num_kv_heads, head_size), MIXED))


def shared_beginning(case: Case) -> None:
    """Requests 0 and 1, which are longer, read the same first block."""
    case.tables[1, 0] = case.tables[0, 0]
    for i in (1, 2):
        case.qkv[1][i][: case.block_size] = case.qkv[0][i][: case.block_size]


def test_requests_that_share_a_block_see_it_once():
    case = Case(spec(), [(20, 3), (17, 5), (25, 1)])
    shared_beginning(case)
    assert_right(FlexBackend, case)


@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("tile", [1, 8, 128])
def test_the_lists_of_blocks_hold_exactly_those_in_which_a_query_sees_a_key(monkeypatch, window, tile):
    """Over the whole cache, as it is compiled: a block is listed for a tile if and only if the mask lets one of its
    queries see a key there."""
    monkeypatch.setattr(flex, "QUERY_TILE", tile)
    case = Case(spec(window=window), [(40, 6), (16, 13), (30, 1), (0, 7), (15, 1), (31, 1)])
    shared_beginning(case)
    backend = FlexBackend([case.spec], case.kv_spec, case.num_blocks + 1, CPU, compiled=True)
    for part, packed, masks in backend.prepare(case.batch(case.now)).calls:
        mask, num_queries = masks[window], part.query_start[-1]
        keys = torch.arange((case.num_blocks + 1) * case.block_size)
        row = torch.arange(num_queries)[:, None]
        seen = mask.mask_mod(row, row, row, keys)  # [queries, keys]
        tiles = seen.split(tile if packed else 1)
        blocks = [x.unflatten(1, (-1, case.block_size)).any(2).any(0).nonzero().flatten().tolist() for x in tiles]
        counts, indices = mask.kv_num_blocks.flatten(), mask.kv_indices.flatten(0, 2)
        assert [sorted(row[:n].tolist()) for row, n in zip(indices, counts, strict=True)] == blocks


def test_lists_of_unequal_lengths_are_padded():
    assert flex.padded([np.array([3]), np.array([1, 2])]).tolist() == [[3, 0], [1, 2]]


def test_blocks_that_a_gpu_cannot_tile_are_refused():
    with pytest.raises(ConfigError, match="kv.block_size"):
        FlexBackend([spec()], KVSpec(1, 2, 16, 20, torch.float16), 4, torch.device("cuda"), compiled=False)
