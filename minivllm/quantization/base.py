"""A format: how a checkpoint keeps its weights, module by module. One file a format, and one row of FORMATS.

A format gives each linear module of the checkpoint its `Scheme`, or none for one that is kept as [n_out, n_in]. A
scheme declares the tensors of a matrix, and makes of them either blocks that a kernel multiplies (what the file says,
unrounded) or the dense matrix. What is done with it is not the format's affair (select.py), nor whose layer it is: an
expert's matrix has a scheme like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import TensorSpec
from minivllm.registry import Registry


class Scheme(Protocol):
    """How one matrix is kept. `held`: its tensors as they were read, by the names that it declares."""

    @property
    def dense_because(self) -> str:
        """Said at start of a matrix that has no kind."""
        ...

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]: ...

    def kind(self, n_in: int) -> str | None:
        """Of the blocks that hold such a matrix without rounding it: a name of gguf.GGMLQuantizationType, or None."""
        ...

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        """Of that kind; None if these numbers do not fit it."""
        ...

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[n_out, n_in]: in `dtype`, or in whatever dtype the format's own library gives."""
        ...


class Format(Protocol):
    name: str

    def scheme_for(self, module: str) -> Scheme | None:
        """Of a linear module, by its name in the checkpoint. None: its weight is as it is in any checkpoint."""
        ...


# `quant_method` of a config.json's quantization_config -> from_config(quantization_config, where) -> Format. It raises
# ModelError for every setting that would be computed otherwise than it says.
FORMATS: Registry[Callable[[Mapping[str, Any], str], Format]] = Registry(
    "quantization_config",
    {
        "bitsandbytes": "minivllm.quantization.bitsandbytes:from_config",
        "compressed-tensors": "minivllm.quantization.compressed_tensors:from_config",
        "auto-round": "minivllm.quantization.auto_round:from_config",
        "awq": "minivllm.quantization.awq:from_config",
        "fp8": "minivllm.quantization.fp8:from_config",
        "gptq": "minivllm.quantization.gptq:from_config",
        "hqq": "minivllm.quantization.hqq:from_config",
        "modelopt": "minivllm.quantization.modelopt:from_config",
        "mxfp4": "minivllm.quantization.mxfp4:from_config",
    },
)


def read_format(config: Mapping[str, Any], where: str = "config.json") -> Format | None:
    """Of the contents of config.json, which `where` names. Raises ModelError for a format that is not supported."""
    given = config.get("quantization_config")
    if not given:
        return None
    name = given.get("quant_method", "unknown") if isinstance(given, Mapping) else "unknown"
    if name not in FORMATS.names():
        raise ModelError(
            f'{where}: the checkpoint is quantised ("{name}"), which is not supported; take the plain model or '
            f"a .gguf. Supported: {', '.join(FORMATS.names())}"
        )
    try:
        return FORMATS.get(name)(given, where)
    except (TypeError, ValueError, AttributeError, KeyError) as e:
        raise ModelError(f"{where}: a field of quantization_config is missing or of the wrong kind ({e})") from e


class Plain:
    """The scheme of a module that has none, beside others of its layer that have one."""

    dense_because = "not packed in the file"

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("weight", (n_out, n_in)),)

    def kind(self, n_in: int) -> str | None:
        return None

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        return None

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return held["weight"]
