"""bitsandbytes (Dettmers et al. 2022, 2023): nf4 and fp4 with nested scales, and the weights of LLM.int8().

4 bits; all numbers of the matrix in one row after another, two in a byte, the first in the high nibble:

    weight                            uint8 [n_out * n_in / 2, 1]: indices of quant_map
    weight.quant_map                  float32 [16]
    weight.absmax                     a scale for `blocksize` numbers, 64 by default: float32; nested: uint8, indices of
    weight.nested_quant_map           float32 [256], times
    weight.nested_absmax              float32, a scale for 256 of the scales, plus
    weight.quant_state.bitsandbytes__nf4   uint8: JSON, with nested_offset, and the blocks' sizes, dtype and shape

8 bits: weight int8 [n_out, n_in], SCB float32 [n_out], w = q * SCB / 127. The columns of outliers that LLM.int8()
multiplies in fp16 are a matter of activations, which are not rounded here.

config.json does not say how long the JSON is, nor the blocks' size: 64 is what transformers writes, and another is
refused when the JSON is read. Few devices can share a matrix: a block goes on from one row to the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import ANY, Axis, TensorSpec
from minivllm.quantization.modules import ByModule, Settings, head_unless, unconverted

BLOCK, NESTED_BLOCK = 64, 256
RECIPROCAL = 1 / 127  # in float32, as the library has it
PREFIX = "weight.quant_state.bitsandbytes__"
NAME = "bitsandbytes"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class FourBits:
    kind_of_numbers: str  # nf4 or fp4
    nested: bool
    dense_because = "no kernel multiplies numbers out of bitsandbytes' tables"

    @property
    def _state(self) -> str:
        return PREFIX + self.kind_of_numbers

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        count = n_out * n_in
        if count % BLOCK or n_in % 2:
            raise ModelError(f"bitsandbytes: a matrix of {n_out} x {n_in} does not fill its blocks of {BLOCK}")
        # A rank may read some outputs where they are whole blocks. Inputs cannot be read alone: their axis says so.
        rows = n_in % BLOCK == 0 and not self.nested
        outputs = Axis(0, 1, n_in // 2) if rows else Axis(0, n_out, count // 2)
        scales = Axis(0, 1, n_in // BLOCK) if rows else Axis(0, n_out, count // BLOCK)
        inputs, num_scales = Axis(0, n_in, count // 2), count // BLOCK
        found = [
            TensorSpec("weight", (count // 2, 1), torch.uint8, outputs, inputs),
            TensorSpec("weight.quant_map", (16,), torch.float32, None, None),
            TensorSpec(
                "weight.absmax",
                (num_scales,),
                torch.uint8 if self.nested else torch.float32,
                scales,
                Axis(0, n_in, num_scales),
            ),
            TensorSpec(self._state, (ANY,), torch.uint8, None, None),
        ]
        if self.nested:
            groups = (-(-num_scales // NESTED_BLOCK),)
            found.append(TensorSpec("weight.nested_absmax", groups, torch.float32, None, None))
            found.append(TensorSpec("weight.nested_quant_map", (256,), torch.float32, None, None))
        return tuple(found)

    def kind(self, n_in: int) -> str | None:
        return None

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        return None

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """In the dtype that the weight had when it was rounded. Raises ModelError."""
        state = _read_state(held[self._state], self.nested)
        pairs, scales = held["weight"].flatten(), held["weight.absmax"]
        if self.nested:
            of = torch.arange(len(scales), device=scales.device) // NESTED_BLOCK
            scales = held["weight.nested_quant_map"][scales.int()] * held["weight.nested_absmax"][of]
            scales = scales + torch.tensor(state.offset, dtype=torch.float32)
        numbers = held["weight.quant_map"][torch.stack((pairs >> 4, pairs & 15), -1).int()].view(-1, BLOCK)
        return (numbers * scales[:, None]).view(-1, state.n_in).to(state.dtype)


class _State(NamedTuple):
    n_in: int
    dtype: torch.dtype
    offset: float


def _read_state(text: Tensor, nested: bool) -> _State:
    try:
        given = json.loads(bytes(text.tolist()))
        sizes = given["blocksize"], given["nested_blocksize"] if nested else NESTED_BLOCK
        dtype, offset = DTYPES[given["dtype"]], float(given["nested_offset"]) if nested else 0.0
        state = _State(int(given["shape"][1]), dtype, offset)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise ModelError(f"bitsandbytes: a quant_state is not its JSON ({type(e).__name__}: {e})") from None
    if sizes != (BLOCK, NESTED_BLOCK):
        raise ModelError(f"bitsandbytes: blocks of {sizes[0]} and {sizes[1]} numbers, only {BLOCK} and {NESTED_BLOCK}")
    return state


@dataclass(frozen=True, slots=True)
class EightBits:
    dense_because = "its scales are float32, and blocks have fp16"

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", (n_out, n_in), torch.int8),
            TensorSpec("SCB", (n_out,), torch.float32, Axis(0), None),
            TensorSpec("weight_format", (), torch.uint8, None, None, optional=True),
        )

    def kind(self, n_in: int) -> str | None:
        return None

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        return None

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """float32. Raises ModelError for a layout of another device."""
        if "weight_format" in held and held["weight_format"].any():
            raise ModelError("bitsandbytes: weight_format is not that of rows; save the model again with a new version")
        return held["weight"] * held["SCB"][:, None] * RECIPROCAL


def from_config(config: Mapping[str, Any], where: str) -> ByModule:
    settings = Settings(config, where, NAME)
    listed = settings.texts("llm_int8_skip_modules")
    rules = [
        unconverted(listed),
        *head_unless(bool(listed)),
    ]  # a list takes the place of the default, which is the head
    four = settings.only("load_in_4bit" if "load_in_4bit" in config else "_load_in_4bit", False, True)
    eight = settings.only("load_in_8bit" if "load_in_8bit" in config else "_load_in_8bit", False, True)
    if four == eight:
        raise settings.unsupported(f"load_in_4bit={four!r} with load_in_8bit={eight!r}")
    if eight:
        settings.only("llm_int8_has_fp16_weight", False)
        return ByModule(NAME, rules, EightBits())
    settings.only("bnb_4bit_quant_storage", "uint8")
    numbers = settings.only("bnb_4bit_quant_type", "fp4", "nf4")
    return ByModule(NAME, rules, FourBits(numbers, settings.only("bnb_4bit_use_double_quant", False, True)))
