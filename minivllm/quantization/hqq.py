"""HQQ (Badri and Shaji 2023), as its HQQLinear and transformers save it: codes of 1, 2, 3, 4 or 8 bits.

    W_q          uint8 (3 bits: int32) [codes' rows / codes in a word, columns]: the first part of the rows is highest
    scale, zero  of the compute dtype, one a group; shape: [n_out, n_in]; and settings, each a tensor of its own

Codes are the matrix as [groups, group_size] (axis 1) or [group_size, groups] (axis 0), zero a number with a fraction
unless it was rounded and then not optimised. w = (q - zero) * scale, each step rounded to their dtype; blocks hold it
where zero is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import ANY, Axis, TensorSpec
from minivllm.quantization.codes import NO_BLOCK, in_blocks, kind_for
from minivllm.quantization.modules import ByModule, Rule, Settings, unconverted

IN_WORD = {4: 2, 8: 1, 3: 10, 2: 4, 1: 8}
FLAGS = (
    *("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")


@dataclass(frozen=True, slots=True)
class ByGroup:
    bits: int
    group_size: int | None  # None: all inputs of an output
    axis: int

    @property
    def dense_because(self) -> str:
        return "axis 0: a group's inputs are no neighbours" if self.axis == 0 else NO_BLOCK

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        size = self.group_size or n_in
        groups = n_out * n_in // size
        rows, columns = (groups, size) if self.axis else (size, groups)
        in_word = IN_WORD[self.bits]
        if n_out * n_in % size or (rows % in_word and self.bits != 3):
            raise ModelError(f"HQQ: a matrix of {n_out} x {n_in} does not fill its groups of {size}, or its words")
        words = -(-rows // in_word)
        # What is in a word is far apart in the matrix: no part of it can be read alone, which these axes say.
        whole = {"outputs": Axis(0, n_out, words), "inputs": Axis(0, n_in, words)}
        parameters = (groups, 1) if self.axis else (1, groups)
        settings = [(name, (), torch.int32) for name in ("nbits", "group_size", "axis")]
        settings += [(name, (), torch.uint8) for name in FLAGS] + [(name, (ANY,), torch.uint8) for name in TEXTS]
        return (
            TensorSpec("W_q", (words, columns), torch.int32 if self.bits == 3 else torch.uint8, **whole),
            *(TensorSpec(name, parameters, None, None, None) for name in ("scale", "zero")),
            TensorSpec("shape", (2,), torch.int64, None, None),
            *(TensorSpec(name, shape, dtype, None, None, optional=True) for name, shape, dtype in settings),
        )

    def kind(self, n_in: int) -> str | None:
        top = (1 << self.bits) - 1
        return kind_for(-top, top, n_in, self.group_size) if self.axis else None

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        (n_out, n_in), zeros = held["shape"].tolist(), held["zero"]
        kind = self.kind(n_in)
        if kind is None or not torch.equal(zeros.round(), zeros) or zeros.abs().max() > 1 << self.bits:
            return None
        codes = self._codes(held).short() - zeros.short()
        return in_blocks(kind, codes.view(n_out, n_in), held["scale"].view(n_out, -1))

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Raises ModelError for settings that are not those of config.json."""
        for name, ours in (("nbits", self.bits), ("axis", self.axis), ("quant_scale", 0), ("quant_zero", 0)):
            if name in held and held[name].item() != ours:
                raise ModelError(f"HQQ: {name} is {held[name].item()} beside a matrix, and {ours} in config.json")
        zeros = held["zero"]
        return ((self._codes(held).to(zeros.dtype) - zeros) * held["scale"]).view(held["shape"].tolist())

    def _codes(self, held: Mapping[str, Tensor]) -> Tensor:
        words, mask = held["W_q"], (1 << self.bits) - 1
        parts = [words >> self.bits * i & mask for i in reversed(range(IN_WORD[self.bits]))]
        return torch.cat(parts)[: len(held["zero"]) if self.axis else self.group_size]


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings, given = Settings(config, where, "HQQ"), config["quant_config"]
    left = unconverted(settings.texts("skip_modules"))
    if "weight_quant_params" in given:
        return ByModule("HQQ", [left], _scheme(given, where))
    schemes = {name: _scheme(own, where) for name, own in given.items()}  # by the ends of modules' names
    rules = [Rule(lambda module, end=f".{name}": module.endswith(end), scheme) for name, scheme in schemes.items()]
    return ByModule("HQQ", [left, *rules], None)


def _scheme(given: Mapping[str, Any], where: str) -> ByGroup:
    for field in ("scale_quant_params", "zero_quant_params"):
        Settings(given, where, "HQQ").only(field, None)
    weights = Settings(given["weight_quant_params"], where, "HQQ")
    weights.only("view_as_float", False)
    axis = weights.only("axis", 1, 0)
    size = None if weights.given.get("group_size", 64) is None and axis else weights.group_size(64)
    return ByGroup(weights.only("nbits", *IN_WORD), size, axis)
