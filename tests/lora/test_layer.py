"""Rule: the grouped product adds to each token its own adapter's change, as a token at a time in float32 does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.kernels.cpu import lora as cpu_kernel
from minivllm.layers.linear import Linear, Unquantized
from minivllm.lora.layer import (
    Delta,
    KernelGroups,
    KernelProducts,
    LoRAMethod,
    Part,
    TorchProducts,
    add_deltas_naive,
    choose_products,
)

# Both sides round a product of n_in <= 150 terms of size 1/sqrt(n_in) and one of rank <= 256 terms of size 1/sqrt(rank)
# once more or less; sums of normal numbers keep the error near a few u (2^-24, 2^-8) of values up to about 5. bf16 also
# rounds the hidden vector: rank terms of relative error u average out to u of the result.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8 * 2**-8}
N_IN = 150  # no multiple of a vector; nor are the parts
PARTS = {"q": 100, "k": 16, "v": 21}


def linear(dtype) -> Linear:
    layer = Linear(N_IN, PARTS, dtype=dtype, method=Unquantized())
    layer.weight.data.normal_(0, N_IN**-0.5)
    return layer


def delta(layer: Linear, rank: int, names, dtype) -> Delta:
    parts = tuple(
        Part(slice(i * rank, (i + 1) * rank), layer.rows[name], torch.randn(rank, PARTS[name]).to(dtype) / rank**0.5)
        for i, name in enumerate(names)
    )
    return Delta((torch.randn(len(names) * rank, N_IN) / N_IN**0.5).to(dtype), parts)


def found_of(slots: list[int]) -> list[tuple[int, np.ndarray]]:
    return [(slot, np.flatnonzero(np.array(slots) == slot)) for slot in sorted(set(slots) - {-1})]


@pytest.fixture(params=[TorchProducts, KernelProducts, "both"])
def kind(request, monkeypatch):
    if request.param is not TorchProducts and (why := cpu_kernel.unsupported_reason()):
        pytest.skip(why)
    if request.param == "both":  # the kernel takes the smaller groups, torch the others
        monkeypatch.setattr(KernelGroups, "MAX_TOKENS", 2)
        return KernelProducts
    return request.param


SLOTS = (
    [0],
    [-1, 1, 1, 1, -1],
    [0, 1, 2, -1, 2, 1, 0, 0],
    [2] * 40 + [-1] * 9 + [1, 0, 1],
    [0] * 9 + [1] * 7 + [2] * 17,
)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [(8, 8, 8), (8, 64, 256), (256, 16, 1), (3, 7, 12)])
@pytest.mark.parametrize("slots", SLOTS, ids=len)
@torch.inference_mode()
def test_grouped_equals_naive(kind, dtype, ranks, slots):
    torch.manual_seed(1)
    layer = linear(dtype)
    products = kind(kind.Step(torch.device("cpu")), 3, layer)
    for slot, (rank, names) in enumerate(zip(ranks, ("qkv", "q", "kv"), strict=True)):
        products.fill(slot, delta(layer, rank, names, dtype))
    products.step.set(found_of(slots))
    x = torch.randn(len(slots), N_IN).to(dtype)
    before = torch.randn(len(slots), sum(PARTS.values())).to(dtype)
    got, wanted = before.clone(), before.clone()
    products.add(got, x)
    groups = TorchProducts.Step(torch.device("cpu"))
    groups.set(found_of(slots))
    add_deltas_naive(wanted, x, groups.groups, products.deltas)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for t, slot in enumerate(slots):
        touched = (got[t] != before[t]).nonzero().flatten().tolist()
        names = ("qkv", "q", "kv", "")[slot]
        allowed = {i for name in names for i in range(layer.rows[name].start, layer.rows[name].stop)}
        assert set(touched) <= allowed and bool(touched) == (slot >= 0)


@torch.inference_mode()
def test_the_decorated_layer_adds_only_what_the_groups_say(kind):
    torch.manual_seed(2)
    layer = linear(torch.float32)
    products = kind(kind.Step(torch.device("cpu")), 2, layer)
    x = torch.randn(6, N_IN)
    bare = layer(x)
    layer.method = LoRAMethod(layer.method, products)
    assert torch.equal(layer(x), bare)
    products.fill(1, delta(layer, 8, "k", torch.float32))
    products.step.set(found_of([-1, 1, 0, 1, -1, -1]))  # slot 0 has an adapter that leaves this layer alone
    changed = (layer(x) != bare).any(dim=1).tolist()
    assert changed == [False, True, False, True, False, False]
    products.step.set([])
    assert torch.equal(layer(x), bare)
    products.fill(1, None)
    products.step.set(found_of([1] * 6))
    assert torch.equal(layer(x), bare)


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit: who else is in the batch, and in what order, changes nothing."""
    if why := cpu_kernel.unsupported_reason():
        pytest.skip(why)
    torch.manual_seed(3)
    layer = linear(torch.bfloat16)
    products = KernelProducts(KernelGroups(torch.device("cpu")), 2, layer)
    for slot in (0, 1):
        products.fill(slot, delta(layer, 12, "qkv", torch.bfloat16))
    x, y = torch.randn(11, N_IN).bfloat16(), torch.randn(11, sum(PARTS.values())).bfloat16()
    slots = [0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1]
    together = y.clone()
    products.step.set(found_of(slots))
    products.add(together, x)
    for t, slot in enumerate(slots):
        alone = y[t : t + 1].clone()
        products.step.set([(slot, np.zeros(1, np.int64))])
        products.add(alone, x[t : t + 1])
        assert torch.equal(alone[0], together[t])


def test_the_choice_has_a_reason():
    assert choose_products(torch.device("cuda"), torch.bfloat16).kind is TorchProducts
    assert choose_products(torch.device("cpu"), torch.float16).kind is TorchProducts
    for dtype in TOLERANCE:
        kind, reason = choose_products(torch.device("cpu"), dtype)
        assert reason and (kind is KernelProducts) == (cpu_kernel.unsupported_reason() is None)
