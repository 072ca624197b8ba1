"""From files to a model that is ready to run: allocate, fill, repack."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from minivllm.errors import ModelError
from minivllm.loading.safetensors_io import read_tensors
from minivllm.loading.sources import ModelFiles, resolve, timed
from minivllm.models import MODELS, ModelSpec
from minivllm.models.checkpoint import load_tensors


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: nn.Module
    spec: ModelSpec
    tokenizer_dir: Path  # holds tokenizer.json, tokenizer_config.json and maybe a chat template
    name: str
    source: str
    linear: tuple[str, str]  # how linear layers store their weights, and why
    seconds: dict[str, float]  # fetch, convert, tokenizer, allocate, weights, finish, total


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    cache_dir: Path | str | None = None,
    tokenizer: str | None = None,
) -> LoadedModel:
    """Find, fetch and convert if needed, then load. `seed` is of a dummy's weights. Raises ModelError."""
    start = time.perf_counter()
    files = resolve(path, cache_dir, tokenizer)
    loaded = load(files, dtype, device, seed)
    loaded.seconds["total"] = time.perf_counter() - start
    return loaded


def load(files: ModelFiles, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> LoadedModel:
    device, seconds, spec = torch.device(device), dict(files.seconds), files.spec
    model = timed(seconds, "allocate", lambda: _allocate(spec, dtype, device))
    timed(seconds, "weights", lambda: _fill(model, files, seed))
    timed(seconds, "finish", model.finish)
    method = (type(model.linear_method).__name__, model.linear_reason)
    return LoadedModel(model, spec, files.tokenizer_dir, files.name, files.source, method, seconds)


def _allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    try:
        return MODELS.get(spec.architecture)(spec, dtype, device).eval()
    except (RuntimeError, MemoryError) as e:
        if "alloc" not in str(e) and not isinstance(e, torch.OutOfMemoryError | MemoryError):
            raise
        size = spec.num_parameters * dtype.itemsize / 2**30
        raise ModelError(f"{spec.architecture} needs {size:.1f} GiB for its weights on {device}: {e}") from None


def _fill(model: nn.Module, files: ModelFiles, seed: int) -> None:
    if files.weights:
        load_tensors(model, read_tensors(files.weights), files.weights[0].parent)
    else:
        from minivllm.loading.dummy import fill

        fill(model, seed)
