"""Rule: the grouped product adds to each token its own adapter's change, as a token at a time in float32 does."""

from __future__ import annotations

import pytest
import torch

from minivllm.layers.linear import Linear, Unquantized
from minivllm.lora.layer import Delta, Group, LoRAMethod, Part, TokenGroups, add_deltas, add_deltas_naive

# Both sides round a product of n_in <= 96 terms of size 1/sqrt(n_in) and one of rank <= 256 terms of size 1/sqrt(rank)
# once more or less; sums of normal numbers keep the error near a few u (2^-24, 2^-8) of values up to about 5. bf16 also
# rounds the hidden vector: rank terms of relative error u average out to u of the result.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8 * 2**-8}
PARTS = {"q": 48, "k": 16, "v": 16}


def linear(dtype) -> Linear:
    layer = Linear(96, PARTS, dtype=dtype, method=Unquantized())
    layer.weight.data.normal_(0, 96**-0.5)
    return layer


def delta(layer: Linear, rank: int, names, dtype) -> Delta:
    parts = tuple(
        Part(slice(i * rank, (i + 1) * rank), layer.rows[name], torch.randn(rank, PARTS[name]).to(dtype) / rank**0.5)
        for i, name in enumerate(names)
    )
    return Delta((torch.randn(len(names) * rank, 96) / 96**0.5).to(dtype), parts)


def groups_of(slots: list[int]) -> list[Group]:
    at = torch.tensor(slots)
    found = [(slot, torch.nonzero(at == slot).flatten()) for slot in sorted(set(slots) - {-1})]
    return [
        Group(slot, slice(int(t[0]), int(t[-1]) + 1) if int(t[-1] - t[0]) + 1 == len(t) else t) for slot, t in found
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [(8, 8, 8), (8, 64, 256), (256, 16, 1)])
@pytest.mark.parametrize("slots", [[0], [-1, 1, 1, 1, -1], [0, 1, 2, -1, 2, 1, 0, 0], [2] * 40 + [-1] * 9 + [1, 0, 1]])
@torch.inference_mode()
def test_grouped_equals_naive(dtype, ranks, slots):
    torch.manual_seed(1)
    layer = linear(dtype)
    deltas = [delta(layer, r, names, dtype) for r, names in zip(ranks, ("qkv", "q", "kv"), strict=True)]
    x = torch.randn(len(slots), 96).to(dtype)
    got, wanted = torch.randn(2, len(slots), 80).to(dtype)[:1].repeat(2, 1, 1)
    before = got.clone()
    add_deltas(got, x, groups_of(slots), deltas)
    add_deltas_naive(wanted, x, groups_of(slots), deltas)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for t, slot in enumerate(slots):
        touched = (got[t] != before[t]).nonzero().flatten().tolist()
        names = ("qkv", "q", "kv", "")[slot]
        allowed = {i for name in names for i in range(layer.rows[name].start, layer.rows[name].stop)}
        assert set(touched) <= allowed and bool(touched) == (slot >= 0)


@torch.inference_mode()
def test_the_decorated_layer_adds_only_what_the_groups_say():
    torch.manual_seed(2)
    layer, step = linear(torch.float32), TokenGroups()
    x = torch.randn(6, 96)
    bare = layer(x)
    layer.method = method = LoRAMethod(layer.method, step, num_slots=2)
    assert torch.equal(layer(x), bare)
    method.deltas[1] = delta(layer, 8, "k", torch.float32)
    step.groups = groups_of([-1, 1, 0, 1, -1, -1])  # slot 0 has an adapter that leaves this layer alone
    changed = (layer(x) != bare).any(dim=1).tolist()
    assert changed == [False, True, False, True, False, False]
    step.groups = ()
    assert torch.equal(layer(x), bare)
