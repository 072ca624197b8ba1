"""Random weights, for models that have none. Apart from their shapes and tokenizers (dummy.py), which need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.models.checkpoint import whole_of


def fill(model: Any, seed: int) -> None:
    """Random weights, the same for equal seeds on equal devices."""
    generator = _generator(model, seed)
    for name, tensor in model.checkpoint_tensors().items():
        _randomise(name, tensor, generator)


def tensors_of_all_ranks(model: Any, seed: int) -> Iterator[tuple[str, Tensor, Path]]:
    """What `fill` gives the model of which this one is a part, as a checkpoint has it."""
    generator = _generator(model, seed)
    for name, shape in whole_of(model).checkpoint_tensors().items():
        tensor = torch.empty(shape.shape, dtype=shape.dtype, device=generator.device)
        _randomise(name, tensor, generator)
        yield name, tensor, Path("random weights")


def _generator(model: Any, seed: int) -> torch.Generator:
    return torch.Generator(next(model.parameters()).device).manual_seed(seed)


def _randomise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if "norm" in name:
        tensor.uniform_(0.75, 1.25, generator=generator)
    elif name.endswith(".bias"):
        tensor.normal_(0.0, 0.1, generator=generator)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
