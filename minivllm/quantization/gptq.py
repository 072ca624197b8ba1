"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it: codes of 2 to 8 bits, packed along the inputs.

    qweight  int32 [n_in * bits / 32, n_out]    a stream of codes down the inputs; 3 bits straddle words
    qzeros   int32 [groups, n_out * bits / 32]  a stream of zero points along the outputs
    scales   fp16  [groups, n_out]
    g_idx    int32 [n_in]                       the group of each input; in some files absent where that is i // size

w = (q - zero) * scale, rounded to the scale's dtype. In version 1 ("gptq") a zero point is stored less one, so that 0
is stored as none, and the largest code means 2^bits; in version 2 ("gptq_v2") as it is. With act-order (`desc_act`) the
inputs of a group lie anywhere: such a matrix is de-quantised, because blocks are of neighbours.
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
from minivllm.patterns import Pattern, patterns
from minivllm.quantization.codes import NO_BLOCK, centred, in_blocks, in_words, kind_for, unpack
from minivllm.quantization.modules import ByModule, Rule, Settings, head_unless

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point
BITS = (4, 2, 3, 5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class AlongInputs:
    bits: int
    group_size: int | None  # None: one scale for all inputs of an output
    symmetric: bool
    added: int  # to a stored zero point
    act_order: bool = False

    @property
    def dense_because(self) -> str:
        return "act-order: a group's inputs are no neighbours" if self.act_order else NO_BLOCK

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        outputs, inputs = in_words(1, self.bits), in_words(0, self.bits)
        if n_in % inputs.numbers or n_out % outputs.numbers:
            raise ModelError(f"GPTQ: a matrix of {n_out} x {n_in} does not fill its words of {self.bits} bits")
        size = self.group_size or n_in
        num_groups = -(-n_in // size)
        # The groups of act-order are anybody's: all of them are read, whichever inputs are.
        groups = None if self.act_order or self.group_size is None else Axis(0, size)
        return (
            TensorSpec("qweight", (inputs.size(n_in), n_out), torch.int32, Axis(1), inputs),
            TensorSpec("qzeros", (num_groups, outputs.size(n_out)), torch.int32, outputs, groups),
            TensorSpec("scales", (num_groups, n_out), None, Axis(1), groups),
            TensorSpec("g_idx", (n_in,), torch.int32, None, Axis(0), optional=not self.act_order),
        )

    def kind(self, n_in: int) -> str | None:
        if self.act_order and self.group_size is not None:
            return None
        half = 1 << (self.bits - 1)
        low, high = (-half, half - 1) if self.symmetric else (-2 * half, 2 * half - 1)
        return kind_for(low, high, n_in, self.group_size)

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        kind, codes = self.kind(len(held["qweight"]) * 32 // self.bits), self._centred(held)
        return None if kind is None else in_blocks(kind, codes, held["scales"].T)

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, scales = self._centred(held), held["scales"].T
        return codes.to(scales.dtype) * scales[:, self._groups(held)]

    def _centred(self, held: Mapping[str, Tensor]) -> Tensor:
        codes = unpack(held["qweight"].T, self.bits)
        zeros = unpack(held["qzeros"], self.bits).T.short() + self.added
        return centred(codes, zeros, self._groups(held))

    def _groups(self, held: Mapping[str, Tensor]) -> Tensor:
        """int64 [n_in]. Raises ModelError for an order that config.json does not announce."""
        n_in = len(held["qweight"]) * 32 // self.bits
        in_order = torch.arange(n_in, device=held["qweight"].device) // (self.group_size or n_in)
        given = held.get("g_idx", in_order).long()
        if self.act_order:
            if given.min() < 0 or given.max() >= len(held["scales"]):
                raise ModelError(f"GPTQ: g_idx names groups that are none of the {len(held['scales'])} with scales")
            return given
        if not torch.equal(given - given[0], in_order):  # of a shard, the first is not 0
            raise ModelError("GPTQ: g_idx is not in order, and desc_act is false in config.json")
        return in_order


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings = Settings(config, where, "GPTQ")
    settings.only("is_marlin_format", False)
    settings.only("pack_dtype", "int32")
    settings.only("adapter", None)
    dynamic = dict(config.get("dynamic") or {})
    listed = patterns(key.removeprefix("-:").removeprefix("+:") for key in dynamic)
    rules = [_rule(key, names, dynamic[key], config, where) for key, names in zip(dynamic, listed, strict=True)]
    if blocks := config.get("modules_in_block_to_quantize"):
        ends = tuple(f".{name}" for names in blocks for name in ([names] if isinstance(names, str) else names))
        rules.append(Rule(lambda module: not module.endswith(ends), None))
    return ByModule("GPTQ", [*rules, *head_unless(settings.only("lm_head", False, True))], scheme_of(settings))


def scheme_of(settings: Settings) -> AlongInputs:
    version = settings.only("checkpoint_format" if settings.given.get("checkpoint_format") else "format", *VERSIONS)
    bits, size = settings.only("bits", *BITS), settings.group_size(128)
    symmetric, act_order = settings.only("sym", True, False), settings.only("desc_act", False, True)
    return AlongInputs(bits, size, symmetric, VERSIONS[version], act_order)


def _rule(key: str, names: Pattern, changes: Any, config: Mapping[str, Any], where: str) -> Rule:
    """Of `dynamic`: "-:pattern" leaves modules as they are, "+:pattern" or a pattern alone changes settings."""
    scheme = None if key.startswith("-:") else scheme_of(Settings({**config, **changes}, where, "GPTQ"))
    return Rule(names.begins, scheme)
