"""The format of GGUF files: each matrix in blocks of a kind of its own, which a kernel multiplies as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu.blocks import SIZES, Blocks
from minivllm.layers.stored import Axis, TensorSpec

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class InBlocks:
    of: str  # kind
    dense_because = "no kernel"

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        weights, size = SIZES[self.of]
        return (TensorSpec("weight", (n_out, n_in // weights * size), torch.uint8, inputs=Axis(1, weights, size)),)

    def kind(self, n_in: int) -> str | None:
        return self.of

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        return Blocks(self.of, held["weight"])

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return dequantise(Blocks(self.of, held["weight"]), dtype)


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """kinds: {module: of its matrix}, F16 and the like among them. What no kernel takes, the file's reader
    de-quantises."""

    kinds: Mapping[str, str]
    name: str = "GGUF"

    def scheme_for(self, module: str) -> InBlocks | None:
        kind = self.kinds.get(module)
        return None if kind is None else InBlocks(kind)


def dequantise(blocks: Blocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, n_in], of any kind: what is stored as numbers is viewed as them, and not cast. Raises NotImplementedError
    for a kind that neither the kernels nor the `gguf` package know."""
    if blocks.kind in PLAIN:
        return blocks.rows.view(PLAIN[blocks.kind])
    if blocks.kind in kernels.KINDS and kernels.unsupported_reason() is None:
        return kernels.dequantise(blocks, dtype if dtype in kernels.DTYPES else torch.float32)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(blocks.rows.numpy(), GGMLQuantizationType[blocks.kind])).to(dtype)
