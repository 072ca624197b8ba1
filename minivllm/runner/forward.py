"""How the model's forward is called: the `runner.forward` axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minivllm.compile.graphs import Captures, Exact
from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey
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


def device_inputs(batch: InputBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """token_ids and positions [padded T] int64."""
    return upload(batch.token_ids, device), upload(batch.positions, device)


class EagerForward:
    """Calls the model as it is; where forwards are captured, between its attentions."""

    decision = ("eager", "as it is written")

    def __init__(self, model: torch.nn.Module, device: torch.device, options: ForwardOptions):
        assert options.compile == "off", "resolve() refuses it"
        self.device = device
        self._shapes = options.shapes
        self._forward = options.shapes.wrap_forward(model)

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        return BatchKey(self._shapes.fit(num_tokens))

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        for size in self._shapes.sizes:
            run_dummy(BatchKey(size))
        self._shapes.seal()

    def __call__(self, batch: InputBatch) -> Tensor:
        return self._forward(*self._shapes.inputs(*device_inputs(batch, self.device)))
