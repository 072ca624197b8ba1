"""How the model's forward is called: the `runner.forward` axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey


class ForwardRunner(Protocol):
    def key_for(self, num_reqs: int, num_tokens: int, max_query: int) -> BatchKey:
        """The padded shape that this batch will run in."""
        ...

    def warmup(self, make_dummy: Callable[[BatchKey], InputBatch]) -> None: ...

    def __call__(self, batch: InputBatch) -> Tensor:
        """Hidden states [padded T, hidden]. Runs inside the step's forward_context."""
        ...


class EagerForward:
    """Calls the model as it is."""

    def __init__(self, model: torch.nn.Module, device: torch.device):
        self.model = model
        self.device = device

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int) -> BatchKey:
        return BatchKey(num_tokens)  # any shape will do: no padding

    def warmup(self, make_dummy: Callable[[BatchKey], InputBatch]) -> None:
        """Eager code has nothing to warm."""

    def __call__(self, batch: InputBatch) -> Tensor:
        token_ids = torch.from_numpy(batch.token_ids).to(self.device)
        positions = torch.from_numpy(batch.positions).to(self.device)
        return self.model(token_ids, positions)
