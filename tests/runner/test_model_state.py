"""Rule: a model's own state has its say in a forward by two columns of the batch, however the forward is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from naive_attention import NaiveAttention
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.batch import InputBatch
from minivllm.compile.context import run_forward
from minivllm.compile.graphs import Captures, Exact, RecordedCalls
from minivllm.layers.rotary import MRotaryEmbedding
from minivllm.loading import load_model
from minivllm.plan import Join, StepPlan
from minivllm.request import Item, SamplingParams
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward import EagerForward, ForwardOptions
from minivllm.runner.forward_piecewise import PiecewiseForward
from minivllm.runner.model_state import NoState, PromptEmbeds, make_state

CPU = torch.device("cpu")
WIDTH = 4
DUMMIES = DummyBatches(spare_block=9, block_size=4, max_model_len=64)


def batch_of(pieces: list[tuple[int, int, int]]) -> InputBatch:
    """Of (row, first position, how many) each."""
    nums = [num for _, _, num in pieces]
    batch = DUMMIES.make(sum(nums))
    batch.rows = np.array([row for row, *_ in pieces])
    batch.query_start = np.cumsum([0, *nums]).astype(np.int32)
    batch.seq_lens = np.array([start + num for _, start, num in pieces], np.int32)
    return batch


@pytest.mark.parametrize("seed", range(10))
def test_vectors_stand_at_their_positions_in_whatever_pieces_a_prompt_comes(seed):
    draw, state = Random(seed), PromptEmbeds(WIDTH, torch.float32, CPU)
    given = torch.rand(2, 30, WIDTH)
    items = {0: [(3, 5, "a"), (8, 12, "b")], 5: [(0, 20, "b")]}  # by row: where, and of which vectors
    contents = {"a": given[0].numpy(), "b": given[1].numpy()}
    for row, places in items.items():
        ours = tuple(Item(offset, length, f"{name}{length}") for offset, length, name in places)
        state.contents |= {item.digest: contents[item.digest[0]][: item.length].tobytes() for item in ours}
        state.encode(StepPlan(0, encode=[item.digest for item in ours]))
        state.join(row, Join(str(row), [0] * 30, 30, SamplingParams(), items=ours))
    done = dict.fromkeys((0, 3, 5), 0)
    while any(num < 30 for num in done.values()):
        pieces = [(row, start, draw.randint(1, min(9, 30 - start))) for row, start in done.items() if start < 30]
        draw.shuffle(pieces)
        batch = batch_of(pieces)
        state.prepare(batch)
        x = torch.zeros(batch.num_tokens, WIDTH)
        for first, end, vectors in batch.overlays:
            assert not x[first:end].any()
            x[first:end] = vectors
        at = 0
        for row, start, num in pieces:
            for position in range(start, start + num):
                expected = torch.zeros(WIDTH)
                for offset, length, name in items.get(row, ()):
                    if offset <= position < offset + length:
                        expected = given["ab".index(name), position - offset]
                assert torch.equal(x[at], expected)
                at += 1
            done[row] += num
    state.leave(0), state.leave(5)
    batch = batch_of([(0, 0, 5)])
    state.prepare(batch)
    assert batch.overlays == ()


class ThreePositions(NoState):
    """Height and width as a picture of two rows would have them."""

    def prepare(self, batch: InputBatch) -> None:
        t = batch.positions
        batch.rope_positions = np.stack([t, t // 2, t % 2])


@pytest.fixture(scope="module")
def model():
    model = load_model("dummy:tiny", torch.float32, CPU).model
    spec = model.spec
    model.rotary = MRotaryEmbedding(spec.rope, spec.head_size, spec.max_position, torch.float32, (4, 6, 6))
    model.position_rows = 3
    return model


def eager(model, shapes=None) -> EagerForward:
    return EagerForward(model, CPU, ForwardOptions("off", 64, 1, Path(), shapes or Exact()))


def piecewise(model) -> PiecewiseForward:
    return PiecewiseForward(model, CPU, ForwardOptions("off", 64, 1, Path()))


WAYS = {"eager": eager, "pieces": piecewise, "captured": lambda m: eager(m, Captures((8, 5), RecordedCalls()))}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_may_turn_by_three_positions_a_token(model, way):
    forward, state = WAYS[way](model), ThreePositions()
    for num_tokens in (8, 5, 8):
        batch = DUMMIES.make(num_tokens)
        state.prepare(batch)
        found = run(model, forward, batch)
        x, positions = model.embed(torch.from_numpy(batch.token_ids)), torch.from_numpy(batch.rope_positions)
        expected = run(model, lambda _, x=x, positions=positions: model(x, positions), batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        of_one = run(model, lambda _, x=x, positions=positions: model(x, positions[0]), batch)
        assert not torch.allclose(found, of_one, atol=1e-3)


def test_a_model_declares_its_own_state():
    plain = SimpleNamespace(attention_layers=[AttentionSpec(2, 2, 4, 1.0)])
    own = SimpleNamespace(make_state=lambda device: ThreePositions())
    assert isinstance(make_state(own, WIDTH, torch.float32, CPU, []), ThreePositions)
    assert make_state(plain, WIDTH, torch.float32, CPU, [torch.zeros(1)]).width == WIDTH


class Doubles:
    """An encoder whose output is what it is given, and twice that in the second cross layer: of layers 1 and 2."""

    input_shape = (2, 1, 3, 1)
    attention_layers = (AttentionSpec(1, 1, 1, 1.0), *[AttentionSpec(1, 1, 1, 1.0, cross=3)] * 2)

    def encode(self, x: Tensor) -> list[tuple[int, Tensor]]:
        return [(1, x), (2, 2 * x)]


def test_an_encoders_output_has_a_slot_and_memory_while_a_request_names_it():
    model, caches = Doubles(), [torch.zeros(1), *({0: torch.zeros(2, 1, 3, 1)} for _ in range(2))]
    state = make_state(model, WIDTH, torch.float32, CPU, caches)
    state.contents |= {name: np.full(6, number, np.float32).tobytes() for number, name in enumerate("abcd", start=1)}

    def take(encode: str = "", forget: str = "", **joins: str) -> None:
        """encode, forget: digests; joins: {row: digest}."""
        state.encode(StepPlan(0, encode=list(encode), forget=list(forget)))
        assert all(cache.keys() == {0, *state._slots.values()} for cache in caches[1:])
        for row, digest in joins.items():
            item = Item(0, 1, digest)
            state.join(int(row[1:]), Join(row, [0], 1, SamplingParams(), items=(item,)))

    def read(*rows: int) -> list[float]:
        """What requests in these rows would read of each cross layer."""
        batch = batch_of([(row, 0, 1) for row in rows])
        state.prepare(batch)
        found = [caches[layer][slot].unique().tolist() for layer in (1, 2) for slot in batch.encoded]
        return [number for (number,) in found]

    assert state.width == 0
    take(encode="ab", r0="a", r1="b")
    assert read(0, 1) == [1, 2, 2, 4] and read(1) == [2, 4]
    take(encode="c", forget="a", r0="c")
    assert read(0, 1) == [3, 2, 6, 4]
    take(encode="b", forget="d", r1="b")  # a step that is tried again; and one that was taken back before it ran
    assert read(0, 1) == [3, 2, 6, 4]
    take(encode="d", forget="bc", r1="d")
    take(encode="a", r0="a")
    assert read(1, 0) == [4, 1, 8, 2]
    assert len(read(*range(40))) == 80  # a dummy batch may have more rows than there are


class Fails(Doubles):
    """Now and then, behind the first cross layer."""

    def __init__(self, draw: Random):
        self.draw = draw

    def encode(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        yield 1, x
        if self.draw.random() < 0.2:
            raise MemoryError
        yield 2, 2 * x


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_goes_and_fails_items_keep_their_numbers_and_nothing_stays(seed):
    draw = Random(seed)
    caches: list[Any] = [torch.zeros(1), *({0: torch.zeros(2, 1, 3, 1)} for _ in range(2))]
    state = make_state(Fails(draw), WIDTH, torch.float32, CPU, caches)
    state.contents |= {name: np.full(6, ord(name), np.float32).tobytes() for name in "abcdefgh"}
    held: dict[str, int] = {}  # by digest, its row
    for _ in range(300):
        left = draw.sample(sorted(held), draw.randint(0, len(held)))
        rest = sorted(set(state.contents) - held.keys())
        comes = draw.sample(rest, draw.randint(0, min(3, len(rest))))
        for name in left:
            state.leave(held.pop(name))
        while True:  # tried again until it passes
            try:
                state.encode(StepPlan(0, encode=comes, forget=left))
            except MemoryError:
                continue
            break
        for name in comes:
            held[name] = draw.choice(sorted(set(range(8)) - set(held.values())))
            state.join(held[name], Join(name, [0], 1, SamplingParams(), items=(Item(0, 1, name),)))
        batch = batch_of([(row, 0, 1) for row in held.values()] or [(9, 0, 1)])
        state.prepare(batch)
        for name, slot in zip(held, batch.encoded.tolist(), strict=False):
            assert caches[1][slot].unique().tolist() == [ord(name)] and caches[2][slot].unique().tolist() == [
                2 * ord(name)
            ]
    state.encode(StepPlan(0, forget=list(held)))
    assert [list(cache) for cache in caches[1:]] == [[0], [0]] and sorted(state._free)[0] == 0


@torch.inference_mode()
def run(model, forward, batch: InputBatch) -> Tensor:
    class Attention(NaiveAttention):
        def prepare(self, batch):
            return None

    layers = model.attention_layers
    return run_forward(forward, batch, Attention(), [torch.empty(0)] * len(layers), layers).clone()
