"""Checkpoints of a dummy's shape with weights in any format: random tensors of what a scheme declares, and their twins,
plain checkpoints of the same numbers. Whether these numbers are the library's is for test_vectors.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.layers.experts import MatrixStack
from minivllm.layers.linear import Linear
from minivllm.layers.stored import TensorSpec
from minivllm.loading.dummy import hf_config, write_tokenizer
from minivllm.loading.dummy_weights import fill
from minivllm.models import MODELS, read_spec
from minivllm.quantization.base import Scheme, read_format
from minivllm.quantization.gguf import dequantise

Draw = Callable[[TensorSpec, torch.Generator], "Tensor | None"]  # None: any numbers of its dtype


def write(
    folder: Path,
    quantization: Mapping[str, Any],
    draw: Draw = lambda spec, generator: None,
    shape: str = "tiny-short",
    scale: float = 0.01,
) -> None:
    """folder/quantised, folder/dense (as `dequantise` gives each matrix), and folder/exact (as blocks do, where there
    are some). scale: about the largest of a float tensor that `draw` leaves to chance."""
    config = hf_config(shape)
    model = MODELS.get(config["architectures"][0])(read_spec(config), torch.bfloat16, torch.device("cpu"))
    fill(model, 0)
    format, generator = read_format({"quantization_config": quantization}), torch.Generator().manual_seed(0)
    kinds = {name: model.get_submodule(ours) for name, (ours, _) in model.checkpoint_modules().items()}
    quantised, dense, exact = {}, {}, {}
    for name, tensor in model.checkpoint_tensors().items():
        module, _, what = name.rpartition(".")
        is_matrix = what == "weight" and isinstance(kinds.get(module), Linear | MatrixStack)
        scheme = format.scheme_for(module) if is_matrix else None
        if scheme is None:
            quantised[name] = dense[name] = exact[name] = tensor.clone()
            continue
        held = random_tensors(scheme, *tensor.shape, draw, generator, scale)
        quantised |= {f"{module}.{key}": value for key, value in held.items()}
        dense[name] = scheme.dequantise(held, torch.float32)
        blocks = scheme.blocks(held) if scheme.kind(tensor.shape[1]) else None
        exact[name] = dense[name] if blocks is None else dequantise(blocks)
    for kind, tensors in (("quantised", quantised), ("dense", dense), ("exact", exact)):
        path = folder / kind
        path.mkdir(parents=True)
        named = {"quantization_config": quantization} if kind == "quantised" else {}
        (path / "config.json").write_text(json.dumps(config | named))
        write_tokenizer(path, config["vocab_size"])
        save_file({key: value.contiguous() for key, value in tensors.items()}, path / "model.safetensors")


def random_tensors(
    scheme: Scheme, n_out: int, n_in: int, draw: Draw, generator: torch.Generator, scale: float
) -> dict[str, Tensor]:
    found = {}
    for spec in scheme.tensors(n_out, n_in):
        drawn = draw(spec, generator)
        if drawn is None and not spec.optional:
            drawn = _any(spec, generator, scale)
        if drawn is not None:
            found[spec.name] = drawn
    return found


def _any(spec: TensorSpec, generator: torch.Generator, scale: float) -> Tensor:
    dtype = spec.dtype or torch.float16
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (torch.rand(spec.shape, generator=generator).add_(0.1) * scale).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    limits = torch.iinfo(min(dtype, torch.int32, key=lambda kind: kind.itemsize))
    return torch.randint(limits.min, limits.max + 1, spec.shape, generator=generator).to(dtype)
