"""Rules: the layer computes what its reference does, whatever share of the experts has tokens; a router chooses as its
model was made to; a token's result does not depend on who is beside it."""

from __future__ import annotations

import pytest
import torch
from tolerances import PRODUCT

from minivllm.compile.breaks import Break, broken_off
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.kernels import reference
from minivllm.kernels.dispatch import Dispatch
from minivllm.layers.experts import Experts, Router, SparseMLP, TorchExperts, choose_experts

CPU = torch.device("cpu")
HIDDEN, SIZE, NUM_EXPERTS = 40, 24, 6


def make(dtype: torch.dtype, top_k: int, normalised: bool = False) -> SparseMLP:
    """With products of unit size."""
    generator = torch.Generator().manual_seed(0)
    layer = SparseMLP(Router(HIDDEN, NUM_EXPERTS, top_k, normalised), Experts(HIDDEN, SIZE, NUM_EXPERTS, dtype))
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer


def tokens(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens, top_k", [(0, 2), (1, 1), (1, 2), (3, 2), (50, 1), (50, 3), (20, NUM_EXPERTS)])
def test_the_layer_equals_its_reference(dtype, num_tokens, top_k):
    layer, x = make(dtype, top_k), tokens(num_tokens, dtype)
    routes = layer.router(x)
    wanted = reference.experts(x, *routes, layer.experts.gate_up.weight, layer.experts.down.weight)
    got = layer(x)
    assert got.dtype == dtype and got.shape == x.shape
    torch.testing.assert_close(got.double(), wanted, **PRODUCT[dtype])


@pytest.mark.parametrize("normalised", [False, True])
def test_a_router_takes_the_heaviest_by_a_softmax_over_all(normalised):
    router, x = make(torch.float32, 3, normalised).router, tokens(20, torch.float32)
    shares = (x.double() @ router.weight.double().T).softmax(-1)
    routes = router(x)
    for own, ids, weights in zip(shares, *routes, strict=True):
        heaviest = own.sort(descending=True).indices[:3]
        wanted = own[heaviest] / (own[heaviest].sum() if normalised else 1)
        assert ids.tolist() == heaviest.tolist()
        torch.testing.assert_close(weights.double(), wanted, atol=1e-6, rtol=1e-5)


def test_logits_of_bfloat16_are_not_rounded_to_it():
    """Two experts whose logits are equal in 8 bits: 1 and 1 + 2^-12."""
    router = Router(2, 2, 1, False)
    router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2**-12]]))
    assert router(torch.ones(1, 2, dtype=torch.bfloat16)).ids.tolist() == [[1]]


def test_one_token_reads_its_own_experts_alone():
    layer, x = make(torch.float32, 2), tokens(1, torch.float32)
    wanted, (ids, _) = layer(x), layer.router(x)
    others = [e for e in range(NUM_EXPERTS) if e not in ids.flatten().tolist()]
    layer.experts.gate_up.weight[others] = torch.nan
    layer.experts.down.weight[others] = torch.nan
    assert torch.equal(layer(x), wanted)


def test_a_tokens_neighbours_change_no_more_than_the_rounding_of_products():
    """Neither their number nor their choices nor their order."""
    layer, x = make(torch.float32, 3), tokens(50, torch.float32)
    alone = torch.cat([layer(row[None]) for row in x])
    together, reversed_order = layer(x), layer(x.flip(0)).flip(0)
    # Sums of 40 and 24 terms of size 1, taken in another order.
    torch.testing.assert_close(together, alone, **PRODUCT[torch.float32])
    torch.testing.assert_close(reversed_order, alone, **PRODUCT[torch.float32])


@pytest.mark.parametrize(
    "kernels", [None, Dispatch("torch", CPU), Dispatch("auto", CPU)], ids=["none", "torch", "auto"]
)
def test_without_a_device_for_the_kernel_the_layer_stays_in_torch(kernels):
    layer = make(torch.float32, 2)
    choose_experts(layer, torch.float32, kernels)
    assert isinstance(layer.experts.products, TorchExperts)


def test_torchs_experts_are_left_to_whoever_captures():
    """No capture may hold what asks the host. It is done later, and where the capture reads its result."""
    layer, x, breaks = make(torch.float32, 2), tokens(5, torch.float32), list[Break]()
    with forward_context(ForwardContext(None, None, [], [])):
        out = broken_off(layer, [x], breaks.append)
    (broken,) = breaks
    out.fill_(torch.nan)
    broken.do()
    assert torch.equal(out, layer(x)) and layer.experts.products.capture_unsupported_reason
