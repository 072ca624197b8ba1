"""Rules: over pages that are K and V elsewhere a recurrent state takes a request's tokens as one after the other would,
whichever steps and blocks they are cut into; each full block has the state behind it; what was a state is no key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case
from naive_attention import take_tokens
from torch import Tensor

from minivllm import features
from minivllm.attention.base import AttentionSpec, StateBackend, kv_spec
from minivllm.attention.groups import HybridAttention, in_groups, make_backend
from minivllm.attention.select import backend_beside, choose
from minivllm.attention.state import CHUNK, FEW, StateChunked, StateReference, take_chunk
from minivllm.attention.state_cpu import StateCPU
from minivllm.batch import InputBatch
from minivllm.kernels.cpu import build
from minivllm.kv_groups import FULL, STATE, StateSpec, block_size_for, group_layers

OF = StateSpec(num_k_heads=2, num_v_heads=4, k_size=8, v_size=6, kernel=4, rule="gated_delta")
SSD = OF._replace(num_k_heads=1, rule="ssd")
ATTENTION = AttentionSpec(4, 2, 16, 0.25)
LAYER = replace(ATTENTION, state=OF)
MIXED = [(0, 33), (40, 1), (16, 17), (15, 3), (47, 40), (5, 11), (0, 1), (30, 1), (31, 1), (32, 1), (0, 150)]
# All is float32, some ten operations a token. What a state errs fades with it or stays; a chunk's sums have 64 terms.
EXACT = {"atol": 2e-5, "rtol": 1e-4}


@dataclass
class StateCase:
    """Requests (tokens computed earlier, tokens of this step) with random inputs, over pages of one block size."""

    kind: type[StateBackend]
    attention: str = "reference"
    requests: list[tuple[int, int]] = field(default_factory=lambda: MIXED)
    kv_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32  # of the model
    of: StateSpec = OF

    def __post_init__(self) -> None:
        generator, of = torch.Generator().manual_seed(0), self.of
        self.layer = layer = replace(ATTENTION, state=of)
        lengths = [sum(request) for request in self.requests]
        self.qkv = [torch.randn(n, of.channels, generator=generator).to(self.dtype) for n in lengths]
        sizes = [(n, 2, of.num_v_heads) for n in lengths]
        self.gates = [torch.rand(size, generator=generator) * torch.tensor([[-3.0], [1.0]]) for size in sizes]
        self.weights = torch.randn(of.weights_shape, generator=generator)
        size = block_size_for(of, kv_spec([layer], 1, self.kv_dtype).bytes_per_block, 16)
        self.places = Case(ATTENTION, self.requests, block_size=size)
        spec, blocks = kv_spec([layer], size, self.kv_dtype), self.places.num_blocks + 1
        beside = features.ATTENTION.get(self.attention)([ATTENTION], spec, blocks, CPU)
        self.backend = self.kind([layer], spec, blocks, CPU, beside.block_axis)
        self.kv = torch.zeros(beside.kv_shape(blocks), dtype=self.kv_dtype)
        self.kv.view(torch.uint8).fill_(255)  # NaN, in all dtypes that have such

    def step(self, spans: dict[int, tuple[int, int]], padding: int = 0) -> Tensor:
        """-> [padded T, heads, value size]"""
        batch = self.places.batch(spans, padding)
        qkv, gates = (
            torch.cat([of[r][begin:end] for r, (begin, end) in spans.items()] + [of[0][:1]] * padding)
            for of in (self.qkv, self.gates)
        )
        wider = torch.nn.functional.pad(qkv, (2, 3))[:, 2:-3]  # as of a product that has more outputs
        out = torch.full((len(qkv), self.of.num_v_heads, self.of.v_size), torch.nan)
        self.backend.forward(wider, gates, self.weights, self.kv, self.backend.prepare(batch), self.layer, out)
        return out

    def wanted(self, spans: dict[int, tuple[int, int]]) -> Tensor:
        """Of whole sequences, from nothing."""
        parts = []
        for r, (begin, end) in spans.items():
            out = torch.empty(end, self.of.num_v_heads, self.of.v_size)
            take_tokens(self.qkv[r][:end], self.gates[r][:end], self.weights, self.layer, out)
            parts.append(out[begin:])
        return torch.cat(parts)

    @property
    def both_steps(self) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
        earlier = {r: (0, before) for r, (before, _) in enumerate(self.requests) if before}
        return earlier, self.places.now

    def check(self) -> None:
        for spans in self.both_steps:
            found = self.step(spans, padding=2)
            torch.testing.assert_close(found[:-2], self.wanted(spans), **EXACT)
            assert (found[-2:] == 0).all()  # padding


needs_compiler = pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))
HALF, CODES = torch.bfloat16, torch.int8
KINDS = (StateReference, StateChunked, StateCPU)
OWN = [StateReference, StateChunked, pytest.param(StateCPU, marks=needs_compiler)]
WAYS = [
    *((kind, "reference", kv_dtype, torch.float32) for kind in KINDS[:2] for kv_dtype in (torch.float32, HALF, CODES)),
    *((kind, "sdpa", kv_dtype, HALF) for kind in KINDS[:2] for kv_dtype in (torch.float32, HALF)),
    *(
        pytest.param(kind, "cpu", kv_dtype, dtype, marks=needs_compiler)
        for kind in KINDS
        for kv_dtype in (torch.float32, HALF, CODES)
        for dtype in (torch.float32, HALF, torch.float16)
    ),
]


@pytest.mark.parametrize("of", [OF, SSD], ids=["gated_delta", "ssd"])
@pytest.mark.parametrize(("kind", "attention", "kv_dtype", "dtype"), WAYS)
def test_whatever_steps_a_request_is_cut_into_the_result_is_that_of_its_tokens_one_by_one(
    kind, attention, kv_dtype, dtype, of
):
    StateCase(kind, attention, kv_dtype=kv_dtype, dtype=dtype, of=of).check()


SIZES = [
    StateSpec(1, 3, 17, 83, 3, "gated_delta"),
    StateSpec(3, 3, 64, 64, 2, "gated_delta"),
    StateSpec(2, 2, 5, 1, 1, "gated_delta"),
    StateSpec(1, 2, 40, 150, 5, "gated_delta"),
    StateSpec(1, 7, 33, 49, 4, "ssd"),
    StateSpec(2, 6, 8, 32, 1, "ssd"),
]


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("of", SIZES, ids=str)
def test_heads_may_have_any_size(of, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        StateCase(StateCPU, "cpu", of=of).check()
        StateCase(StateCPU, "cpu", [(60, 1)], of=of).check()  # fewer requests than threads: they share its heads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", OWN)
def test_every_full_block_has_the_state_behind_it(kind):
    """Another request goes on from each, as one does that finds a prefix."""
    case = StateCase(kind, "cpu" if kind is StateCPU else "reference", requests=[(0, 100)] * 2)
    case.step({0: (0, 100)})
    size, tables = case.places.block_size, case.places.tables
    case.qkv[1], case.gates[1] = case.qkv[0], case.gates[0]
    for full in range(1, 100 // size + 1):
        tables[1, full - 1] = tables[0, full - 1]
        spans = {1: (full * size, 100)}
        torch.testing.assert_close(case.step(spans), case.wanted(spans), **EXACT)


@pytest.mark.parametrize("rule", ["gated_delta", "ssd"])
@pytest.mark.parametrize("num_tokens", [1, FEW, FEW + 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_chunk_is_its_tokens_one_by_one_however_fast_all_fades(num_tokens, rule):
    generator = torch.Generator().manual_seed(num_tokens)
    matrices = torch.randn(4, 8, 6, generator=generator)
    q, k = (torch.nn.functional.normalize(torch.randn(num_tokens, 4, 8, generator=generator), dim=-1) for _ in "qk")
    v, rate = torch.randn(num_tokens, 4, 6, generator=generator), torch.rand(num_tokens, 4, generator=generator)
    for fade in (0.0, 1e-3, 1.0, 50.0):  # in 64 tokens by e^-3200
        gates = torch.stack((-fade * torch.rand(num_tokens, 4, generator=generator), rate), 1)
        wanted = StateReference.take(None, rule, matrices, q, k, v, gates)
        for found, expected in zip(take_chunk(rule, matrices, q, k, v, gates), wanted, strict=True):
            torch.testing.assert_close(found, expected, **EXACT)


def test_a_page_that_is_too_small_is_no_place_for_a_state():
    case = StateCase(StateReference)
    large, batch = replace(LAYER, state=OF._replace(v_size=60)), case.places.batch({0: (0, 1)})
    with pytest.raises(AssertionError, match="does not fit"):
        case.backend.forward(None, None, None, case.kv, case.backend.prepare(batch), large, None)


# ---------------------------------------------------------------------------------------------- beside attention layers


@pytest.mark.parametrize("name", ["reference", "sdpa", pytest.param("cpu", marks=needs_compiler)])
def test_what_was_a_state_is_no_key(name):
    """A block goes from a group of states to one of attention as it is: full of what need be no number. Some backends
    read keys that they mask."""
    layers = in_groups([ATTENTION, LAYER], group_layers([FULL, STATE]))
    spec, requests = kv_spec(layers[:1], 32, torch.bfloat16), [(0, 40), (40, 1), (31, 2)]
    case = Case(ATTENTION, requests, block_size=32, dtype=torch.bfloat16)
    kind = features.ATTENTION.get(name)
    hybrid = make_backend(kind, layers, spec, case.num_blocks + 1, CPU, StateChunked)
    assert isinstance(hybrid, HybridAttention) and hybrid.graphs == "none"
    alone = kind([ATTENTION], spec, case.num_blocks + 1, CPU)
    found, wanted = [], []
    dirty, clean = (torch.zeros(hybrid.kv_shape(case.num_blocks + 1), dtype=torch.bfloat16) for _ in range(2))
    dirty.view(torch.uint8).fill_(255)
    for spans in ({1: (0, 40), 2: (0, 31)}, case.now):
        batch, inputs = case.batch(spans), case.inputs(spans)
        for backend, kv, outs in ((hybrid, dirty, found), (alone, clean, wanted)):
            out = torch.empty_like(inputs[0])
            of = in_two_groups(batch) if backend is hybrid else batch
            backend.forward(*inputs, kv, backend.prepare(of), layers[0], out)
            outs.append(out)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    of_requests = dirty.movedim(hybrid.block_axis, 0)[np.concatenate([case.tables[0, :2], case.tables[2, :2]])]
    assert of_requests.isfinite().all()


def in_two_groups(batch: InputBatch) -> InputBatch:
    both = [np.stack([column, column]) for column in (batch.block_tables, batch.slot_mapping)]
    return replace(batch, block_tables=both[0], slot_mapping=both[1])


def test_a_backend_of_attention_without_one_for_states_has_products_beside_it():
    registry = features.STATE_ATTENTION
    assert backend_beside("reference", STATE, [ATTENTION, LAYER], registry) is StateReference
    assert backend_beside("cpu", STATE, [LAYER, ATTENTION], registry) is StateCPU
    assert backend_beside("triton", STATE, [LAYER, ATTENTION], registry) is StateChunked
    assert backend_beside("cpu", STATE, [ATTENTION], registry) is None
    assert choose("auto", CPU, [LAYER, ATTENTION], features.ATTENTION)[1].name in ("cpu", "sdpa")
