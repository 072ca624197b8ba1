"""Rule: packed attention gives each sequence what it gets alone, whatever lies beside it."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from tolerances import ATTENTION

from minivllm.attention.base import AttentionSpec
from minivllm.attention.packed import MAX_RATIO, PackedAttention, runs
from minivllm.attention.reference import attend_dense

CPU = torch.device("cpu")
KINDS = {
    "encoder": AttentionSpec(6, 6, 16, 0.25, causal=False),
    "decoder": AttentionSpec(6, 6, 16, 0.25),
    "grouped": AttentionSpec(6, 2, 16, 0.25),
    "window": AttentionSpec(6, 2, 16, 0.25, sliding_window=5),
}
LENGTHS = {
    "sorted": [1, 1, 2, 3, 3, 5, 8, 9, 17, 33],
    "unsorted": [9, 1, 33, 2, 2, 17, 1, 40],
    "equal": [7] * 5,
    "one": [12],
}


def random_rows(spec: AttentionSpec, lengths: list[int], seed: int = 0, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(sum(lengths), n, spec.head_size, generator=generator).to(dtype) for n in heads]


def packed(spec: AttentionSpec, lengths: list[int], q, k, v) -> torch.Tensor:
    backend, out = PackedAttention([spec], CPU), torch.full_like(q, math.nan)
    backend.forward(q, k, v, torch.empty(0), backend.prepare_lengths(lengths), spec, out)
    return out


def each_alone(spec: AttentionSpec, lengths: list[int], q, k, v) -> torch.Tensor:
    rows = zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True)
    attend = attend_dense if spec.causal else attend_both_ways
    return torch.cat([attend(*row, spec) for row in rows])


def attend_both_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """[L, heads, D] each; every token sees every other."""
    weights = (torch.einsum("nhd,lhd->hnl", q, k) * spec.scale).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_packed_attention_equals_the_dense_oracle_of_each_sequence(spec, lengths, dtype):
    q, k, v = random_rows(spec, lengths, dtype=dtype)
    found = packed(spec, lengths, q, k, v).double()
    torch.testing.assert_close(found, each_alone(spec, lengths, q, k, v), **ATTENTION[dtype])


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_what_a_neighbour_holds_never_shows(spec):
    lengths = [3, 4, 5]
    q, k, v = random_rows(spec, lengths)
    before = packed(spec, lengths, q, k, v)
    for x in (q, k, v):
        x[3:7] = math.nan
    after = packed(spec, lengths, q, k, v)
    assert torch.equal(after[:3], before[:3]) and torch.equal(after[7:], before[7:])


def test_an_encoders_token_sees_what_follows():
    spec, lengths = KINDS["encoder"], [6]
    q, k, v = random_rows(spec, lengths)
    before = packed(spec, lengths, q, k, v)
    v[5] += 1
    assert (packed(spec, lengths, q, k, v)[0] != before[0]).all()


def test_sorted_texts_take_few_calls_and_little_padding():
    rng = random.Random(0)
    lengths = sorted(rng.randrange(1, 257) for _ in range(128))
    found = list(runs(lengths))
    assert len(found) <= 1 + math.log(256, MAX_RATIO)
    assert [length for _, run in found for length in run] == lengths
    assert all(max(run) <= MAX_RATIO * min(run) for _, run in found)


def test_texts_of_one_length_are_not_copied(monkeypatch):
    spec, lengths = KINDS["encoder"], LENGTHS["equal"]
    q, k, v = random_rows(spec, lengths)
    seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: seen.append(a[0]) or attend(*a, **o))
    packed(spec, lengths, q, k, v)
    assert [x.data_ptr() for x in seen] == [q.data_ptr()]
