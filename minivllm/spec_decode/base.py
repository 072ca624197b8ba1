"""The seam of speculative decoding: who guesses the tokens that come next.

A proposer lives in the worker and runs after each step's sampling. What it proposes goes up to the scheduler
(StepOutput.drafts), which cuts it to what the request, the budget and the blocks allow and puts it into the next plan
(StepPlan.drafts); the runner computes all of it in one forward, and sampling/verify.py decides what becomes output. So
a proposer can be wrong, late or silent without changing a token, and nothing else in the engine knows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.config import EngineConfig
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.plan import Join, StepPlan
from minivllm.sampling.sampler import Sampler
from minivllm.spec_decode.throttle import Throttle

if TYPE_CHECKING:
    from minivllm.batch import BatchKey, InputBatch
    from minivllm.runner.inputs import InputBuilder

Drafts = dict[str, list[int]]  # request -> tokens that may follow its known ones


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of the worker that a proposer may build on: the model whose tokens are guessed."""

    config: EngineConfig
    model: nn.Module
    inputs: InputBuilder
    make_key: Callable[[int], BatchKey]  # a batch of so many tokens, not padded
    sampler: Sampler
    kv_caches: list[Tensor]
    attention: AttentionBackend
    throttle: Throttle
    adapters: AdapterSlots | NoAdapters
    num_blocks: int  # of the pool, the spare one not counted
    max_model_len: int
    make_cache: Callable[[tuple[int, ...], torch.dtype], Tensor]  # a KV tensor of this shape


class OwnLayers(NamedTuple):
    """Attention layers of a proposer's own model, over a cache of its own under the pool's block ids."""

    layers: list[AttentionSpec]
    spec: KVSpec


@dataclass(frozen=True, slots=True)
class Recipe:
    """A proposer that is yet to be made. First an attention backend must be chosen, which has to suit its layers too,
    and the pool sized, for which this says what they take of a block."""

    make: Callable[[Target], Proposer]
    own: OwnLayers | None = None

    @property
    def bytes_per_block(self) -> int:
        return 0 if self.own is None else self.own.spec.bytes_per_block


class Proposer(Protocol):
    kv_caches: list[Tensor]  # of its own, under the pool's block ids: moved with the target's
    lookahead: int  # KV slots behind a request's tokens that propose() may write to, where its table reaches that far

    def join(self, row: int, join: Join) -> None:
        """A request enters, new or resumed; `row` is its permanent row."""
        ...

    def leave(self, row: int) -> None:
        """The request of a row has ended, or is preempted."""
        ...

    def propose(self, plan: StepPlan, batch: InputBatch, tokens: Drafts, hidden: Tensor) -> Drafts:
        """After every step, also one that sampled nothing.

        tokens: what the step made final, of each sampled request; they are known to the inputs already. hidden
        [padded T, hidden]: the model's last hidden states of `batch`.
        """
        ...

    def draft_probs(self, row: int, place: int) -> Tensor | None:
        """The distribution [V] that draft number `place` of the last proposal was drawn from, or None if it was
        proposed for sure (sampling/rejection.py)."""
        ...


class NoProposer:
    """No speculation."""

    kv_caches: list[Tensor] = []
    lookahead = 0

    def join(self, row: int, join: Join) -> None:
        pass

    def leave(self, row: int) -> None:
        pass

    def propose(self, plan: StepPlan, batch: InputBatch, tokens: Drafts, hidden: Tensor) -> Drafts:
        return {}

    def draft_probs(self, row: int, place: int) -> Tensor | None:
        return None
