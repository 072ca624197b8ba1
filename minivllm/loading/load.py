"""From files to a model that is ready to run: allocate, fill, repack."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.layers.experts import choose_experts, experts_of
from minivllm.loading.gguf_weights import GGUFWeights, Place
from minivllm.loading.safetensors_io import read_tensors, stored_tensors
from minivllm.loading.sources import ModelFiles, resolve, timed
from minivllm.models import ENCODERS, MODELS, EncoderSpec, ModelSpec
from minivllm.models.checkpoint import check_shape, is_part, load_tensors
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.quantization import rowwise
from minivllm.quantization.gguf import GGUFFormat
from minivllm.quantization.select import (
    HEAD,
    Choice,
    Quantised,
    choose,
    install,
    look_up_in_blocks,
    refuse_activation_bits,
    rounding,
)

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
    seconds: dict[str, float]  # fetch, convert, tokenizer, allocate, weights, finish, total
    network: tuple[str, str] | None = None  # whose code it is, and why, if that is not a file of ours
    activation_bits: tuple[int, str] | None = None  # to which packed weights' inputs are rounded, and why; if they are
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
    dtype_asked: bool = True,
    invariant: bool = False,
    ranks: Ranks = ONE_DEVICE,
    network: str = "auto",
    activation_bits: int | Literal["auto"] = "auto",
) -> LoadedModel:
    """Find, fetch and convert if needed, then load. `seed` is of a dummy's weights; quantization, dense_copy and
    invariant are those of the model's section; kernels: of the engine, None: no Triton kernel is asked for;
    dtype_asked: the user named the dtype, who then gets in fp32 what a GGUF file's weights mean exactly, and not
    integer products with them, unless activation_bits says of how many bits; ranks: which part of the model is loaded,
    and its weights alone are read; network: whose code it is. Raises ModelError, and ConfigError for a quantization, or
    a placement of this model, that cannot be.

    For models that generate; an engine that pools calls resolve and load."""
    start = time.perf_counter()
    files = resolve(path, cache_dir, tokenizer, network)
    if files.spec.architecture in ENCODERS or not files.spec.has_head:
        what = "" if files.spec.architecture in ENCODERS else " without its LM head"
        raise ModelError(f"{path}: a {files.spec.architecture}{what} reads texts and cannot generate any")
    how = (quantization, dense_copy, kernels, dtype_asked, invariant, ranks, activation_bits)
    loaded = load(files, dtype, device, seed, *how)
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
    dtype_asked: bool = True,
    invariant: bool = False,
    ranks: Ranks = ONE_DEVICE,
    activation_bits: int | Literal["auto"] = "auto",
) -> LoadedModel:
    device, seconds, spec = torch.device(device), dict(files.seconds), files.spec
    is_packed = files.is_gguf or files.format is not None
    choice = choose(quantization, device, dtype, is_packed, kernels, dtype_asked, activation_bits)
    if files.format is not None:
        choice = choice._replace(reason=f"{files.format.name}: {choice.reason}")
    model = timed(seconds, "allocate", lambda: _allocate(spec, dtype, device, ranks))
    choose_experts(model, dtype, kernels)
    linear = (type(model.linear_method).__name__, model.linear_reason)
    gguf = GGUFWeights(files.weights[0], files.folder) if files.is_gguf else None
    stored = _matrices(model, gguf) if gguf and choice.kind == "kept" else {}
    format = GGUFFormat({name: place.kind for name, place in stored.items()}) if gguf else files.format
    with_copy = dense_copy and not invariant
    quantised = install(model, choice.kind, format, with_copy, choice.kernel, reads_dense=files.is_gguf)
    if gguf:
        look_up_in_blocks(model, stored, gguf.blocks, choice.kernel, quantised)
    if invariant:
        rowwise.demand(model, device)
        linear = ("by row", "model.invariant=true: each row of a product by itself")
    timed(seconds, "weights", lambda: _fill(model, files, gguf, stored, quantised, seed))
    timed(seconds, "finish", model.finish)
    if gguf:
        gguf.release()
    if quantised.layers:
        linear = ("dual" if quantised.is_dual else "packed", quantised.describe())
    elif choice.kind != "none":
        choice = Choice("none", f"no weight of this model is multiplied in 4 or 8 bits: {quantised.describe()}")
        refuse_activation_bits(activation_bits, choice)
    if choice.kind != "none" and experts_of(model):
        kept = str(dtype).removeprefix("torch.")
        choice = choice._replace(reason=f"{choice.reason}; the matrices of experts are multiplied in {kept}")
    own_code = ("transformers", model.described) if spec.network == "transformers" else None
    packed = (rounding(activation_bits, choice), quantised) if quantised.layers else (None, None)
    how = (choice[:2], linear, seconds, own_code, *packed)
    return LoadedModel(model, model.spec, files.tokenizer_dir, files.name, files.source, *how)


def read_checkpoint(files: ModelFiles) -> Iterator[tuple[str, Tensor, Path]]:
    """(name, tensor, file) of all weights, de-quantised to fp32 where they are blocks: for whoever loads them otherwise
    than `load`. Tensors are views of mapped files: copy them."""
    return GGUFWeights(files.weights[0], files.folder).tensors() if files.is_gguf else read_tensors(files.weights)


def _allocate(spec: ModelSpec | EncoderSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> nn.Module:
    try:
        return MODELS.get(spec.network)(spec, dtype, device, ranks).eval()
    except (RuntimeError, MemoryError) as e:
        if "alloc" not in str(e) and not isinstance(e, torch.OutOfMemoryError | MemoryError):
            raise
        size = spec.num_parameters * dtype.itemsize / 2**30
        raise ModelError(f"{spec.architecture} needs {size:.1f} GiB for its weights on {device}: {e}") from None


def _matrices(model: nn.Module, gguf: GGUFWeights) -> dict[str, Place]:
    """{module of the checkpoint: where its whole matrix is}, of the shapes that the model asks for; a tied LM head has
    the embedding's."""
    destinations = model.weights.destinations(model)
    for place in gguf.places:
        if place.name in destinations:
            check_shape(place.name, place.shape, destinations[place.name].spec.shape, gguf.path)
    found = gguf.matrices()
    if model.spec.tie_embeddings and "model.embed_tokens" in found:
        found["lm_head"] = found["model.embed_tokens"]
    return found


def _fill(
    model: nn.Module,
    files: ModelFiles,
    gguf: GGUFWeights | None,
    stored: Mapping[str, Place],
    quantised: Quantised,
    seed: int,
) -> None:
    """stored: the matrices of a GGUF file, among them a tied head's, which is kept under its own name."""
    if gguf:
        as_stored = {f"{module}.weight" for module in quantised.as_stored}
        if is_part(model):  # a tied head of another stage than the embedding's is loaded by the embedding's name
            as_stored = {name for name, to in model.weights.destinations(model).items() if to.view is None}
        skip = {f"{module}.weight" for module in quantised.looked_up}
        is_tied = f"{HEAD}.weight" in as_stored and not stored[HEAD].name.startswith(HEAD)
        head = [(f"{HEAD}.weight", gguf.rows(stored[HEAD]), gguf.path)] if is_tied else []
        load_tensors(model, chain(gguf.tensors(skip, model.dtype, as_stored), head), gguf.path)
    elif files.weights:
        load_tensors(model, stored_tensors(files.weights), files.folder)
    elif is_part(model):
        from minivllm.loading.dummy_weights import tensors_of_all_ranks

        load_tensors(model, tensors_of_all_ranks(model, seed), Path("random weights"))
    else:
        from minivllm.loading.dummy_weights import fill

        fill(model, seed)
