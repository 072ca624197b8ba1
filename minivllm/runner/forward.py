"""How the model's forward is called: the `runner.forward` axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minivllm.batch import BatchKey, InputBatch
from minivllm.compile.graphs import Captures, Exact
from minivllm.upload import upload


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    compile: str  # off | background | wait
    max_tokens: int  # a forward has no more
    num_threads: int
    cache: Path  # where compiled pieces are kept
    shapes: Exact | Captures = field(default_factory=Exact)  # in which a forward runs


class ForwardRunner(Protocol):
    """One registry entry of the `runner.forward` axis, made with (model, device, options). `decision`: what runs,
    and why."""

    decision: tuple[str, str]

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        """The padded shape that this batch will run in. adapted: some request in it uses an adapter."""
        ...

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        """Before the first step. run_dummy(key) runs a whole forward of that shape, which no request sees, and may be
        called until this runner is gone, between steps."""
        ...

    def __call__(self, batch: InputBatch) -> Tensor:
        """Hidden states [padded T, hidden]. Runs inside the step's forward_context."""
        ...


def first_inputs(
    model: torch.nn.Module, batch: InputBatch, device: torch.device, shapes: Exact | Captures
) -> tuple[Tensor, Tensor]:
    """What a forward begins with, where `shapes` wants it: x [padded T, hidden] and positions [padded T], or [3, ...]
    where the model turns by three."""
    x = model.embed(upload(batch.token_ids, device), shapes.room(batch.padded_tokens))
    for first, end, given in batch.overlays:
        x[first:end] = given
    positions = batch.positions if batch.rope_positions is None else batch.rope_positions
    return shapes.inputs(x, upload(positions, device))


class AnnouncedForward:
    """A ForwardRunner around another: says in each step that the device is at work."""

    def __init__(self, inner: ForwardRunner, tell: Callable[[], None], blocks: bool):
        """blocks: a call of `inner` returns when the device is done, and not when it has been given its work."""
        self._inner, self._tell, self._blocks = inner, tell, blocks
        self.decision = inner.decision

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        return self._inner.key_for(num_reqs, num_tokens, max_query, adapted)

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        self._inner.warmup(run_dummy)

    def __call__(self, batch: InputBatch) -> Tensor:
        if self._blocks:
            self._tell()
        hidden = self._inner(batch)
        if not self._blocks:
            self._tell()
        return hidden


class EagerForward:
    """Calls the model as it is; where forwards are captured, between its attentions."""

    decision: tuple[str, str] = ("eager", "as it is written")

    def __init__(self, model: torch.nn.Module, device: torch.device, options: ForwardOptions):
        assert options.compile == "off", "EngineConfig.build refuses it"
        self.model, self.device = model, device
        self._shapes = options.shapes
        self._forward = options.shapes.wrap_forward(model)

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        return BatchKey(self._shapes.fit(num_tokens))

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        for size in self._shapes.sizes:
            run_dummy(BatchKey(size))
        self._shapes.seal()

    def __call__(self, batch: InputBatch) -> Tensor:
        return self._forward(*first_inputs(self.model, batch, self.device, self._shapes))
