"""How long a device takes for a step of a model: the roofline, operation by operation (Williams et al., 2009).

    an operation     max(its FLOPs / reached compute, its bytes / reached bandwidth), and a constant
    a step           the operations of each layer, of the LM head and of the choice of tokens; and the blocks it moves
    several devices  each does its part of every layer (shape.Shape.over), and two all-reduces a layer join them

How much of the peak rates is reached, and what a kernel takes besides, is measured, by kind of operation (fitted.py).
Nothing here knows how the host launches kernels: this is a device that captured forwards keep busy. Mixtures of experts
are taken to be used evenly, by chance. Where they are spread over the devices of an attention that is cut, all devices
have all tokens, each computes what its experts are drawn for, and the sum behind the layer is the one that joins the
parts of an MLP: so nothing is sent besides, and the device is waited for whose experts are drawn most.

Where devices that would have the same K and V each keep some tokens' of them (decode context parallelism, as in vLLM
0.11), each looks at its own with the queries of all, which are gathered before and whose results are joined behind, in
each layer. For a prompt's next piece the K and V of what came before it are gathered instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from minivllm.kv_groups import block_size_for
from minivllm.simulate import operations
from minivllm.simulate.devices import Device
from minivllm.simulate.operations import Work
from minivllm.simulate.shape import Experts, Shape
from minivllm.simulate.states import States
from minivllm.simulate.weights import FP8, WeightBytes

KEPT_SIZES = 1 << 14  # of steps, whose time but for attention is kept
SAMPLING_PASSES = 3  # over a row of logits in float32: written, divided and masked, drawn from


@dataclass(frozen=True, slots=True)
class Step:
    """What a step is, to a device."""

    num_new: np.ndarray  # [R] int64: tokens computed of each request
    start: np.ndarray  # [R] int64: tokens of it that are in the cache before
    num_samples: int  # rows of logits

    @classmethod
    def of(cls, num_tokens: int) -> Step:
        """One request's first tokens, each sampled from."""
        return cls(np.array([num_tokens]), np.zeros(1, np.int64), num_tokens)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a model's numbers are kept."""

    dtype: str  # of weights and activations, one of Device.flops
    size: int  # bytes of one
    kv_bytes: float  # bytes of one number of K and V
    kv_scale: int = 0  # bytes beside each head of a token's K, and of its V
    weights: WeightBytes | None = None  # of linear layers; None: as the others


class StepCost(Protocol):
    """What a simulated worker asks of a model on a device: by formulas (Cost), or by what was measured. Bytes are one
    device's, where several share the model."""

    shape: Shape
    numbers: Numbers
    kv_bytes_per_token: float

    @property
    def weight_bytes(self) -> int: ...
    def block_size(self, asked: int) -> int: ...
    def forward_bytes(self, num_tokens: int, num_samples: int) -> int: ...
    def step_seconds(self, step: Step) -> float: ...
    def move_seconds(self, num_tokens: float, across: bool) -> float: ...


class Held:
    """What each of the devices that share a model holds of it: a part."""

    def __init__(self, shape: Shape, numbers: Numbers, part: Shape | None = None):
        """part: None: one device has the whole."""
        self.shape, self.numbers = shape, numbers
        self._weights = numbers.weights or WeightBytes(numbers.size, numbers.size, numbers.dtype, "")
        self._part = part or shape
        self.kv_bytes_per_token = self._part.kv_bytes_per_token(numbers.kv_bytes, numbers.kv_scale)

    @property
    def weight_bytes(self) -> int:
        part, held = self._part, self._weights
        linear = part.linear_parameters * held.linear + part.expert_parameters * held.expert
        return int(linear) + part.other_parameters * self.numbers.size

    def block_size(self, asked: int) -> int:
        """Tokens a block, no fewer than asked: so many that K and V of a layer are no smaller than a state."""
        part = self._part
        if part.states is None:
            return asked
        return block_size_for(part.states.each, int(self.kv_bytes_per_token / part.num_attention_layers), asked)

    @property
    def expert_bytes(self) -> int:
        """Of these, what a mixture's experts are."""
        return int(self._part.expert_parameters * self._weights.expert)

    def forward_bytes(self, num_tokens: int, num_samples: int) -> int:
        """Of the largest activations that lie in memory together in a step."""
        shape = self._part
        widest = shape.experts.per_token * shape.experts.intermediate_size if shape.experts else shape.intermediate_size
        widest = max(widest, shape.num_heads * shape.head_size, shape.states.num_in if shape.states else 0)
        per_token = 4 * shape.hidden_size + 3 * widest
        return num_tokens * per_token * self.numbers.size + 2 * num_samples * self.shape.vocab_size * 4


class Cost(Held):
    def __init__(self, device: Device, shape: Shape, numbers: Numbers):
        super().__init__(shape, numbers, self._part_of(shape, device))
        self.device = device
        self._fp8 = self._weights.compute == FP8 and FP8 in device.flops
        self._bandwidth = device.reached_by(operations.PRODUCT).memory * device.bandwidth
        self._fixed_seconds = lru_cache(KEPT_SIZES)(self._fixed_seconds)

    @staticmethod
    def _part_of(shape: Shape, device: Device) -> Shape:
        return shape.over(device.count, device.spreads_experts, device.num_contexts)

    def step_seconds(self, step: Step) -> float:
        attention = sum(count * self.seconds(work) for count, work in self._attentions(step))
        attention += self._contexts_seconds(step) if self.device.num_contexts > 1 else 0.0
        return attention + self._fixed_seconds(int(step.num_new.sum()), step.num_samples)

    def _fixed_seconds(self, num_tokens: int, num_samples: int) -> float:
        """Of all that does not depend on whose tokens they are."""
        computing = sum(count * self.seconds(work) for count, work in self._operations(num_tokens, num_samples))
        return computing + self._joining_seconds(num_tokens, num_samples)

    def _joining_seconds(self, num_tokens: int, num_samples: int) -> float:
        """What several devices tell each other."""
        if (count := self.device.count) == 1:
            return 0.0
        assert (link := self.device.link) is not None
        return sum(times * link.all_reduce_seconds(count, size) for times, size in self._sums(num_tokens, num_samples))

    def _sums(self, num_tokens: int, num_samples: int) -> Iterator[tuple[int, float]]:
        """(how many all-reduces, bytes of each): behind the embedding, each attention and each MLP the sum of their
        parts; at the end the logits, of which each has some (a gathering is half of an all-reduce)."""
        shape, size = self.shape, self.numbers.size
        yield 2 * shape.num_layers + shape.embeds, num_tokens * shape.hidden_size * size
        if shape.sums_norms:  # two sums of squares a token, in float32
            yield shape.num_layers, num_tokens * 2 * 4
        if shape.heads:
            yield 1, num_samples * shape.vocab_size * size / 2

    def _contexts_seconds(self, step: Step) -> float:
        """What devices tell each other whose K and V are of other tokens. A gathering, and a sum of which each keeps a
        part, are half of an all-reduce."""
        part, count, link = self._part, self.device.num_contexts, self.device.link
        assert link is not None
        decodes = step.num_new == 1
        if (num_decodes := int(decodes.sum())) > 0:
            query, result = part.attention_widths
            heads, size = count * part.num_heads * num_decodes, self.numbers.size
            told = (heads * query * size, heads * 4, heads * result * size)  # with the logarithms of sums, in float32
            seconds = sum(link.all_reduce_seconds(count, each / 2) for each in told)
        else:
            seconds = 0.0
        if num_cached := int(step.start[~decodes].sum()):
            whole = num_cached * count * self.kv_bytes_per_token / part.num_attention_layers
            seconds += link.all_reduce_seconds(count, whole / 2)
        return part.num_attention_layers * seconds

    def move_seconds(self, num_tokens: float, across: bool) -> float:
        """Of so many tokens' K and V, copied on the device, or moved between it and the host (across)."""
        size = num_tokens * self.kv_bytes_per_token
        return size / self.device.host_link if across else 2 * size / self._bandwidth

    def seconds(self, work: Work) -> float:
        reached = self.device.reached_by(work.kind)
        peak = self.device.flops[FP8 if work.kind in operations.IN_FP8 else self.numbers.dtype]
        computing, moving = work.flops / (reached.compute * peak), work.bytes / (reached.memory * self.device.bandwidth)
        return max(computing, moving) + work.num_kernels * reached.constant

    # ---------------------------------------------------------------------------------------------------- operations

    def _attentions(self, step: Step) -> Iterator[tuple[int, Work]]:
        if (states := self._part.states) is not None:
            yield states.num_layers, self._state(step, states)
        for window, num_layers in self._part.windows.items():
            for is_decode in (True, False):
                if (chosen := (step.num_new == 1) == is_decode).any():
                    yield num_layers, self._attention(step.num_new[chosen], step.start[chosen], window, is_decode)

    def _operations(self, num_tokens: int, num_samples: int) -> Iterator[tuple[int, Work]]:
        """(how often, what): layers that are alike are counted once."""
        shape, hidden = self._part, self.shape.hidden_size
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        for num_in, num_out in self._projections():
            yield shape.num_attention_layers, self._linear(num_tokens, num_in, num_out)
        # two norms with what is added to them, and rope
        yield shape.num_attention_layers, self._elementwise(num_tokens, 8 * hidden + 2 * (queries + keys), 3)
        if (states := shape.states) is not None:
            yield states.num_layers, self._linear(num_tokens, hidden, states.num_in)
            yield states.num_layers, self._linear(num_tokens, states.num_out, hidden)
            # two norms, the convolution, and the norm and gate of what is answered
            yield states.num_layers, self._elementwise(num_tokens, 8 * hidden + 2 * states.num_in, 4)
        yield from self._mlps(num_tokens)
        if not shape.heads:
            return
        yield 1, self._product(num_samples, hidden, shape.vocab_size)
        logits = 4 * num_samples * self.shape.vocab_size
        yield 1, Work(operations.ELEMENTWISE, 0, SAMPLING_PASSES * 2 * logits, SAMPLING_PASSES)

    def _projections(self) -> list[tuple[int, int]]:
        """Of a layer's attention: inputs and outputs of each."""
        shape, hidden = self._part, self.shape.hidden_size
        queries = shape.num_heads * shape.head_size
        if (latent := shape.latent) is None:
            keys, gates = shape.num_kv_heads * shape.head_size, shape.gates * queries
            return [(hidden, queries + gates + 2 * keys), (queries, hidden)]
        ends = (hidden, latent.size + latent.query_rank), (shape.num_heads * latent.value_size, hidden)
        return [*ends, (latent.query_rank or hidden, queries)]

    def _mlps(self, num_tokens: int) -> Iterator[tuple[int, Work]]:
        shape = self._part
        if shape.num_dense_layers:
            yield from self._mlp(shape.num_dense_layers, num_tokens, shape.intermediate_size)
        if (of := shape.experts) is not None:
            yield of.num_layers, self._product(num_tokens, shape.hidden_size, of.total)
            yield of.num_layers, self._experts(num_tokens, of)
            if of.shared_size:
                yield from self._mlp(of.num_layers, num_tokens, of.shared_size)

    def _mlp(self, num_layers: int, num_tokens: int, size: int) -> Iterator[tuple[int, Work]]:
        hidden, num_in = self.shape.hidden_size, self.shape.mlp_matrices - 1
        yield num_layers, self._linear(num_tokens, hidden, num_in * size)
        yield num_layers, self._elementwise(num_tokens, (num_in + 1) * size, 1)
        yield num_layers, self._linear(num_tokens, size, hidden)

    def _experts(self, num_tokens: int, of: Experts) -> Work:
        sizes = self.shape.hidden_size, of.intermediate_size, self.shape.mlp_matrices
        held = self.numbers.size, self._weights.expert
        kind = operations.EXPERTS_FP8 if self._fp8 else operations.EXPERTS
        return operations.experts(num_tokens, of.number, of.per_token, *sizes, *held, kind, of.num_ranks)

    def _linear(self, num_rows: int, num_in: int, num_out: int) -> Work:
        """A product with weights of a layer, in however few bits."""
        kind = operations.PRODUCT_FP8 if self._fp8 else operations.PRODUCT
        return operations.product(num_rows, num_in, num_out, self.numbers.size, self._weights.linear, kind)

    def _product(self, num_rows: int, num_in: int, num_out: int) -> Work:
        size = self.numbers.size
        if not num_rows:
            return Work(operations.PRODUCT, 0, 0, 0)
        return operations.product(num_rows, num_in, num_out, size, size, operations.PRODUCT)

    def _elementwise(self, num_tokens: int, width: int, num_kernels: int) -> Work:
        """width: numbers that are read or written, a token."""
        return Work(operations.ELEMENTWISE, 0, num_tokens * width * self.numbers.size, num_kernels)

    def _state(self, step: Step, states: States) -> Work:
        """Of a layer: each request's state is read and written once, whatever it takes in."""
        num_decodes = int((step.num_new == 1).sum())
        num_tokens = int(step.num_new.sum())
        moved = num_tokens * (states.each.channels + states.num_out) * self.numbers.size
        flops = states.flops(num_decodes, num_tokens - num_decodes)
        return Work(operations.STATE, flops, 2 * len(step.num_new) * states.bytes + moved)

    def _attention(self, num_new: np.ndarray, start: np.ndarray, window: int | None, is_decode: bool) -> Work:
        """num_new, start [R] int64"""
        shape, size = self._part, self.numbers.size
        pairs, new = num_pairs(num_new, start, window), float(num_new.sum())
        seen = start + num_new if window is None else np.minimum(start + num_new, window + num_new - 1)
        cached, parts = float(seen.sum()) * self.kv_bytes_per_token / shape.num_attention_layers, shape.num_contexts
        if (latent := shape.latent) is None:
            if not is_decode:  # with all K and V, which were gathered
                return operations.attention(
                    pairs, parts * cached, new, shape.num_heads, shape.head_size, size, operations.PREFILL
                )
            heads = parts * shape.num_heads
            return operations.attention(pairs / parts, cached, new, heads, shape.head_size, size, operations.DECODE)
        sizes = shape.num_heads, latent.rank, latent.rope_size, latent.expanded, size
        if is_decode:
            return operations.absorbed(pairs, cached, new, *sizes, num_contexts=parts)
        return operations.expanded(pairs, float(seen.sum()), new, *sizes)


class RankCost(Cost):
    """Of data-parallel ranks that share a mixture's experts, each on a device with requests of its own (vLLM's data
    parallelism with expert parallelism). They meet in each of its layers: before it every rank gets the tokens of all,
    behind it the sum of its own (vLLM's default, allgather_reducescatter)."""

    def __init__(self, device: Device, shape: Shape, numbers: Numbers):
        super().__init__(device, shape, numbers)
        self.shared_seconds = lru_cache(KEPT_SIZES)(self.shared_seconds)

    @staticmethod
    def _part_of(shape: Shape, device: Device) -> Shape:
        return shape.rank(device.count)

    def step_seconds(self, step: Step) -> float:
        """All ranks doing alike."""
        return self.own_seconds(step) + self.shared_seconds(self.device.count * int(step.num_new.sum()))

    def own_seconds(self, step: Step) -> float:
        """Of all that a rank does alone."""
        return super().step_seconds(step)

    def shared_seconds(self, num_tokens: int) -> float:
        """num_tokens: of all ranks."""
        of, link, count = self._part.experts, self.device.link, self.device.count
        assert of is not None and link is not None
        half = num_tokens * self.shape.hidden_size * self.numbers.size / 2  # a gathering is half of an all-reduce
        exchanging = 2 * link.all_reduce_seconds(count, half)
        return of.num_layers * (self.seconds(super()._experts(num_tokens, of)) + exchanging)

    def forward_bytes(self, num_tokens: int, num_samples: int) -> int:
        """With what every rank gets of the others, and gives them back."""
        others = (self.device.count - 1) * num_tokens * self.shape.hidden_size * self.numbers.size
        return super().forward_bytes(num_tokens, num_samples) + 2 * others

    def _experts(self, num_tokens: int, of: Experts) -> Work:
        return Work(operations.EXPERTS, 0, 0, 0)  # shared

    def _joining_seconds(self, num_tokens: int, num_samples: int) -> float:
        return 0.0


def num_pairs(num_new: np.ndarray, start: np.ndarray, window: int | None) -> float:
    """Of a query and a key that it sees: num_new queries behind `start` tokens, [R] int64 each."""
    if window is None:
        return float((num_new * start + num_new * (num_new + 1) // 2).sum())
    growing = np.clip(window - start, 0, num_new)  # queries that see all before them
    return float((growing * start + growing * (growing + 1) // 2 + (num_new - growing) * window).sum())
