"""From files to a model that is ready to run: allocate, fill, repack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.layers.experts import choose_experts, experts_of
from minivllm.loading.gguf_packed import stored_bits
from minivllm.loading.safetensors_io import read_tensors
from minivllm.loading.sources import ModelFiles, resolve, timed
from minivllm.models import ENCODERS, MODELS, EncoderSpec, ModelSpec
from minivllm.models.checkpoint import load_tensors
from minivllm.quantization.select import Choice, Quantised, choose, install

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: nn.Module
    spec: ModelSpec | EncoderSpec
    tokenizer_dir: Path  # holds tokenizer.json, tokenizer_config.json and maybe a chat template
    name: str
    source: str
    quantization: tuple[str, str]  # none, kept, int8 or int4, and why
    linear: tuple[str, str]  # how linear layers store their weights, and why
    seconds: dict[str, float]  # fetch, convert, tokenizer, allocate, pack, weights, finish, total
    quantised: Quantised | None = None  # what is packed; the limits between two forms are the worker's to settle


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    cache_dir: Path | str | None = None,
    tokenizer: str | None = None,
    quantization: str = "auto",
    dense_copy: bool = True,
    kernels: Dispatch | None = None,
) -> LoadedModel:
    """Find, fetch and convert if needed, then load. `seed` is of a dummy's weights; quantization and dense_copy are
    model.quantization and model.dense_copy; kernels: of the engine, None: no Triton kernel is asked for. Raises
    ModelError, and ConfigError for a quantization that cannot be.

    For models that generate; an engine that pools calls resolve and load."""
    start = time.perf_counter()
    files = resolve(path, cache_dir, tokenizer)
    if files.spec.architecture in ENCODERS or not files.spec.has_head:
        what = "" if files.spec.architecture in ENCODERS else " without its LM head"
        raise ModelError(f"{path}: a {files.spec.architecture}{what} reads texts and cannot generate any")
    loaded = load(files, dtype, device, seed, quantization, dense_copy, kernels)
    loaded.seconds["total"] = time.perf_counter() - start
    return loaded


def load(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantization: str = "auto",
    dense_copy: bool = True,
    kernels: Dispatch | None = None,
) -> LoadedModel:
    device, seconds, spec = torch.device(device), dict(files.seconds), files.spec
    choice = choose(quantization, device, dtype, files.packed is not None, kernels)
    model = timed(seconds, "allocate", lambda: _allocate(spec, dtype, device))
    choose_experts(model, dtype, kernels)
    linear = (type(model.linear_method).__name__, model.linear_reason)
    packed_file, quantised = None, None
    if choice.kind != "none":
        if choice.kind == "kept":
            packed_file = timed(seconds, "pack", files.packed)
        stored = stored_bits(packed_file) if packed_file else {}
        quantised = install(model, choice.kind, stored, dense_copy, choice.kernel)
        if not quantised.layers:
            choice = Choice("none", "no weight of this model is, or can be, in 4 or 8 bits")
        elif experts_of(model):
            kept = str(dtype).removeprefix("torch.")
            choice = choice._replace(reason=f"{choice.reason}; the matrices of experts stay in {kept}")
    timed(seconds, "weights", lambda: _fill(model, files, packed_file, seed))
    timed(seconds, "finish", model.finish)
    if quantised and quantised.layers:
        linear = ("dual" if quantised.is_dual else "packed", quantised.describe())
    else:
        quantised = None
    how = (choice[:2], linear)
    return LoadedModel(model, spec, files.tokenizer_dir, files.name, files.source, *how, seconds, quantised)


def _allocate(spec: ModelSpec | EncoderSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    try:
        return MODELS.get(spec.architecture)(spec, dtype, device).eval()
    except (RuntimeError, MemoryError) as e:
        if "alloc" not in str(e) and not isinstance(e, torch.OutOfMemoryError | MemoryError):
            raise
        size = spec.num_parameters * dtype.itemsize / 2**30
        raise ModelError(f"{spec.architecture} needs {size:.1f} GiB for its weights on {device}: {e}") from None


def _fill(model: nn.Module, files: ModelFiles, packed_file: Path | None, seed: int) -> None:
    if files.weights:
        load_tensors(model, _tensors(model, files, packed_file), files.weights[0].parent)
    else:
        from minivllm.loading.dummy import fill

        fill(model, seed)


def _tensors(model: nn.Module, files: ModelFiles, packed_file: Path | None) -> Iterator[tuple[str, Tensor, Path]]:
    """The checkpoint's tensors; of a matrix that the model keeps packed, its parts instead of the whole."""
    if packed_file is None:
        yield from read_tensors(files.weights)
        return
    wanted = set(model.checkpoint_tensors())
    yield from (found for found in read_tensors([packed_file]) if found[0] in wanted)
    for name, tensor, file in read_tensors(files.weights):
        if name in wanted or f"{name.removesuffix('.weight')}.codes" not in wanted:
            yield name, tensor, file
