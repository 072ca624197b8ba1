"""Rule: a layer of cross attention reads all positions of its request's slot, whichever backend computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minivllm import features
from minivllm.attention.base import AttentionSpec, kv_spec
from minivllm.attention.cross import (
    CrossReference,
    CrossSDPA,
    Slots,
    WithCrossAttention,
    _by_products,
    _fused,
    slot_shape,
)
from minivllm.attention.groups import backends_of, in_groups, make_backend
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.select import backend_beside
from minivllm.batch import InputBatch
from minivllm.kv_groups import CROSS, FULL, group_layers, one_group
from minivllm.runner.dummies import DummyBatches

CPU = torch.device("cpu")
LAYER = AttentionSpec(num_heads=6, num_kv_heads=2, head_size=8, scale=0.3, cross=11)
QUERIES, SLOTS = [3, 1, 5, 1], [2, 0, 2, 3]  # of each request; two read one slot
PADDING = 4
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def batch_of(queries: list[int], slots: list[int]) -> InputBatch:
    ends = torch.tensor([0, *queries]).cumsum(0).int().numpy()
    batch = DummyBatches(spare_block=0, block_size=16, max_model_len=64).make(sum(queries))
    batch.query_start, batch.encoded = ends, torch.tensor(slots).numpy()
    return batch


def slots_of(count: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32) -> Slots:
    return {slot: torch.randn(slot_shape(LAYER), generator=generator).to(dtype) for slot in range(count)}


def textbook(q: Tensor, kv: Slots) -> Tensor:
    """Query by query and head by head, in float64."""
    out, owners = torch.zeros(sum(QUERIES), 6, 8).double(), [i for i, num in enumerate(QUERIES) for _ in range(num)]
    for t, owner in enumerate(owners):
        for h in range(LAYER.num_heads):
            k, v = kv[SLOTS[owner]][:, h * LAYER.num_kv_heads // LAYER.num_heads].double()
            out[t, h] = (k @ q[t, h].double() * LAYER.scale).softmax(0) @ v
    return out


@pytest.mark.parametrize("kind", [CrossReference, CrossSDPA])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_query_reads_all_of_its_requests_slot(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(QUERIES)
    q = torch.randn(num_tokens + PADDING, 6, 8, generator=generator).to(dtype)
    kv = slots_of(4, generator, dtype)
    backend, out, before = kind(), torch.full_like(q, torch.nan), {slot: x.clone() for slot, x in kv.items()}
    backend.forward(q, kv, backend.prepare(batch_of(QUERIES, SLOTS)), LAYER, out)
    torch.testing.assert_close(out[:num_tokens].double(), textbook(q, kv), rtol=0, atol=TOLERANCES[dtype])
    assert not out[num_tokens:].any()  # padding passes through the layers that follow
    assert all(torch.equal(kv[slot], before[slot]) for slot in kv)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_queries", [1, 2, 7])
def test_the_fused_kernel_and_two_products_give_the_same(num_queries, dtype):
    q, kv = torch.randn(num_queries, 6, 8).to(dtype), slots_of(1, dtype=dtype)[0]
    fused, products = (attend(q.transpose(0, 1), *kv, LAYER) for attend in (_fused, _by_products))
    assert fused.shape == products.shape == (6, num_queries, 8)
    torch.testing.assert_close(products, fused, rtol=0, atol=TOLERANCES[dtype])


def test_what_others_have_in_their_slots_changes_nothing():
    q, kv = torch.randn(sum(QUERIES), 6, 8), slots_of(4)
    backend, results = CrossSDPA(), []
    for _ in range(2):
        results.append(torch.empty_like(q))
        backend.forward(q, kv, backend.prepare(batch_of(QUERIES, SLOTS)), LAYER, results[-1])
        kv[1].fill_(torch.nan)
    assert torch.equal(*results)


def test_cross_layers_are_in_no_group_and_have_a_backend_beside_that_of_the_others():
    kinds = [FULL, CROSS, FULL, CROSS]
    groups = group_layers(kinds)
    assert groups == one_group(kinds) and groups.places() == {0: (0, 0), 2: (0, 1)} and groups.num_tensors == 2
    plain = AttentionSpec(num_heads=6, num_kv_heads=2, head_size=8, scale=0.3)
    layers = in_groups([plain, LAYER], group_layers([plain.kind, LAYER.kind]))
    backend = make_backend(ReferenceAttention, layers, kv_spec(layers[:1], 16, torch.float32), 4, CPU, None, CrossSDPA)
    assert isinstance(backend, WithCrossAttention) and isinstance(backends_of(backend)[0], ReferenceAttention)
    batch = batch_of([5], [1])
    q, own, kv = torch.randn(5, 6, 8), torch.zeros(backend.kv_shape(4)), slots_of(2)
    meta, out, alone = backend.prepare(batch), torch.empty_like(q), torch.empty_like(q)
    for layer, cache, kind in (plain, own, backend.attention), (LAYER, kv, backend.cross):
        backend.forward(q, q[:, :2], q[:, 2:4], cache, meta, layer, out)
        given = (q, q[:, :2], q[:, 2:4], cache) if layer is plain else (q, cache)
        kind.forward(*given, kind.prepare(batch), layer, alone)
        assert torch.equal(out, alone)


@pytest.mark.parametrize("name", features.ATTENTION.names())
def test_every_backend_has_one_for_cross_layers_beside_it(name):
    kind = backend_beside(name, CROSS, [LAYER], features.CROSS_ATTENTION)
    assert kind is (CrossReference if name == "reference" else CrossSDPA)
    assert backend_beside(name, CROSS, [AttentionSpec(6, 2, 8, 0.3)], features.CROSS_ATTENTION) is None
