"""`model.invariant`: the bits of a request's numbers depend on the request alone.

A scheduler may change timing, never output; yet a library whose products are cut by their number of rows rounds a
token's numbers otherwise when others are computed beside it, and an argmax that was close goes the other way
("Defeating Nondeterminism in LLM Inference", Thinking Machines 2025; vLLM's batch invariance). What it takes: products
that sum each row in an order of its own (all of kernels/cpu do), one form of a weight for any number of tokens,
attention whose sums end at absolute positions (kernels/cpu/plan.h), and norms by row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels.cpu import floats
from minivllm.kernels.cpu.dense import DenseMatrix
from minivllm.layers.experts import experts_of
from minivllm.layers.linear import RowwiseCPU, TiledCPU
from minivllm.quantization.packed import NEVER, AsStored, PackedMethod
from minivllm.quantization.select import linear_layers

EXPERTS = "a layer of experts multiplies the tokens of each together"
LATENT = "latent attention (MLA) has two forms, and takes one by the number of queries"


def demand(model: nn.Module, device: torch.device) -> None:
    """Give a model, before its weights are loaded, products and attention by row. Raises ConfigError."""
    if device.type != "cpu":
        raise _cannot(f"it is made for CPUs, and nobody has proven it on a {device.type} device")
    if experts_of(model):
        raise _cannot(EXPERTS)
    if any(layer.latent is not None for layer in model.attention_layers):
        raise _cannot(LATENT)
    if why := getattr(model, "by_row_unsupported_reason", None) or floats.unsupported_reason():
        raise _cannot(why)
    for layer, _ in linear_layers(model):
        if isinstance(layer.method, AsStored):
            layer.method.then = RowwiseCPU()  # where it is dense in the end
        elif not (_is_tiled(layer) or isinstance(layer.method, PackedMethod)):
            layer.method = RowwiseCPU()
    model.attention_layers[:] = [replace(layer, row_wise=True) for layer in model.attention_layers]


def _is_tiled(layer: nn.Module) -> bool:
    return isinstance(layer.method, TiledCPU) and DenseMatrix.fits(layer.weight)


def _cannot(why: str) -> ConfigError:
    return ConfigError(f"model.invariant=true: {why}. Use model.invariant=false")


def unsupported_reason(model: nn.Module) -> str | None:
    """Why a loaded model's layers are not invariant, asked for or not; or None."""
    if experts_of(model):
        return EXPERTS
    if (why := getattr(model, "by_row_unsupported_reason", None)) is not None:
        return why
    layers = [layer for layer, _ in linear_layers(model)]
    if any(isinstance(layer.method, PackedMethod) and layer.method.limit.tokens != NEVER for layer in layers):
        return "few tokens are multiplied with packed weights, many with a copy in bf16"
    return None if all(map(_is_by_row, layers)) else "a library's products, which it cuts by their number of rows"


def _is_by_row(layer: nn.Module) -> bool:
    method = layer.method
    if isinstance(method, TiledCPU):
        return layer.tiles is not None
    return isinstance(method, PackedMethod | RowwiseCPU)
