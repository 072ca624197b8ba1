"""Rule: attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

import pytest
import torch
from parallel.threads import all_ranks, on_all
from tolerances import ATTENTION
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.attention.reference import attend_dense
from minivllm.parallel.context import is_kept_here, merge, merge_over, num_kept_here
from minivllm.parallel.group import Ranks
from minivllm.parallel.placement import Placement

LAYER = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)


def attend_part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query, q [1, heads, D], over the keys of a rank -> its result, and the log of its sum of exponentials."""
    k, v = (x.repeat_interleave(LAYER.num_heads // LAYER.num_kv_heads, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->nhl", q, k) * LAYER.scale
    return torch.einsum("nhl,lhd->nhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("length", [1, 2, 3, 50])  # the first leave some rank without a key
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decode_over_spread_keys_equals_one_over_all(size, length, dtype):
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, 4, 16, generator=generator)
    k, v = torch.randn(2, length, 2, 16, generator=generator)

    def run(own: Ranks) -> Tensor:
        kept = is_kept_here(torch.arange(length), own.cp)
        assert int(kept.sum()) == num_kept_here(length, own.cp)
        part, lse = attend_part(q, k[kept], v[kept])
        return merge_over(own.cp, part.to(dtype), lse)

    wanted = attend_dense(q, k, v, LAYER)
    for found in on_all(all_ranks(Placement(cp=size)), run):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, **ATTENTION[dtype])


def test_scores_too_large_for_an_exponential_are_merged():
    parts, lse = torch.randn(2, 1, 1, 4), torch.tensor([[[500.0]], [[500.0]]])
    torch.testing.assert_close(merge(parts, lse), parts.mean(0))


def test_what_a_part_without_keys_holds_is_not_read():
    parts = torch.stack([torch.full((1, 1, 4), torch.nan), torch.ones(1, 1, 4)])
    assert torch.equal(merge(parts, torch.tensor([[[-torch.inf]], [[0.0]]])), parts[1])
