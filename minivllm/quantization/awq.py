"""AWQ (Lin et al. 2023), as AutoAWQ writes it ("gemm"): codes of 4 bits along the outputs, in an order of its own.

    qweight  int32 [n_in, n_out / 8]    of 8 outputs the first is in the lowest nibble, and the second in the fifth
    qzeros   int32 [groups, n_out / 8]  zero points in that order
    scales   fp16  [groups, n_out]

w = (q - zero) * scale, rounded to the scale's dtype; a zero point is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import Axis, TensorSpec
from minivllm.quantization.codes import NO_BLOCK, centred, evenly, in_blocks, in_words, kind_for, scaled, unpack
from minivllm.quantization.modules import ByModule, Rule, Settings, head_unless

BITS = 4
NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # in which each of 8 outputs lies
LAYOUTS = ("gemm", "GEMM")


@dataclass(frozen=True, slots=True)
class AlongOutputs:
    group_size: int | None  # None: one scale for all inputs of an output
    symmetric: bool
    dense_because = NO_BLOCK

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        words, size = in_words(1, BITS), self.group_size or n_in
        if n_out % words.numbers or n_in % size:
            raise ModelError(f"AWQ: a matrix of {n_out} x {n_in} does not fill its words, or its groups of {size}")
        groups = None if self.group_size is None else Axis(0, size)
        return (
            TensorSpec("qweight", (n_in, words.size(n_out)), torch.int32, words, Axis(0)),
            TensorSpec("qzeros", (n_in // size, words.size(n_out)), torch.int32, words, groups),
            TensorSpec("scales", (n_in // size, n_out), None, Axis(1), groups),
        )

    def kind(self, n_in: int) -> str | None:
        return kind_for(*((-8, 7) if self.symmetric else (-15, 15)), n_in, self.group_size)

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        kind = self.kind(len(held["qweight"]))
        return None if kind is None else in_blocks(kind, _centred(held), held["scales"].T)

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return scaled(_centred(held), held["scales"].T)


def _centred(held: Mapping[str, Tensor]) -> Tensor:
    codes, zeros = _codes(held["qweight"]), _codes(held["qzeros"])
    return centred(codes, zeros, evenly(codes.shape[1], zeros.shape[1], codes.device))


def _codes(words: Tensor) -> Tensor:
    """int32 [rows, n_out / 8] -> uint8 [n_out, rows]."""
    return unpack(words, BITS).unflatten(1, (-1, len(NIBBLES)))[..., NIBBLES].flatten(1).T


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    """Names of fields are those of transformers; AutoAWQ's own quant_config.json has others for two of them."""
    renamed = {"w_bit": "bits", "q_group_size": "group_size"}
    settings = Settings({renamed.get(key, key): value for key, value in config.items()}, where, "AWQ")
    settings.only("version", *LAYOUTS)
    settings.only("bits", BITS)
    parts = settings.texts("modules_to_not_convert")
    left = Rule(lambda module: any(part in module for part in parts), None)  # anywhere in a name, as AutoAWQ has it
    scheme = AlongOutputs(settings.group_size(128), not settings.only("zero_point", True, False))
    return ByModule("AWQ", [left, *head_unless(settings.only("lm_head", False, True))], scheme)
