"""compressed-tensors, as llm-compressor writes it: weights in the layouts of its `format`s, group of modules by group.

pack-quantized, codes of 2, 4 or 8 bits in words (W4A16, W8A16):

    weight_packed      int32 [n_out, n_in * bits / 32]: a stream of codes, each as q + 2^(bits - 1)
    weight_scale       [n_out, groups], of any float dtype
    weight_zero_point  int32 [n_out * bits / 32, groups], packed along the outputs as the codes are; only if asymmetric
    weight_shape       [n_out, n_in]

int-quantized (W8A8): weight int8 [n_out, n_in], and weight_zero_point int8 of weight_scale's shape if it is asymmetric.
float-quantized: FP8, a scale for the matrix, each output or a block. nvfp4-pack-quantized and mxfp4-pack-quantized:
FP4; the former's weight_global_scale divides.

w = (q - zero) * scale, rounded to the scale's dtype: that is what the library's decompress gives (version 0.20), and
what a dense weight is here, bit for bit. A kernel multiplies the same codes without that rounding: symmetric ones of 4
bits as GGUF's Q4_0, others as Q5_0, whose five bits hold q - zero, and 8 bits as Q8_0. Activations are never rounded:
where a file was made for a product of 8 bits with 8, its input_scale is read and left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import Axis, TensorSpec
from minivllm.patterns import Pattern, patterns
from minivllm.quantization.base import Scheme
from minivllm.quantization.codes import NO_BLOCK, centred, evenly, in_blocks, in_words, kind_for, scaled, unpack
from minivllm.quantization.floats import FP8, MX, MXFP4, NV, NVFP4, beside

REGEX = "re:"  # before a target that is a pattern
BITS = (4, 8, 2)  # of which a word has a whole number: with others versions of the library differ in where codes lie
STATIC = (*beside("input_scale"), *beside("input_zero_point", dtype=torch.int8))  # of activations


@dataclass(frozen=True, slots=True)
class PackQuantized:
    group_size: int | None  # None: one scale for all inputs of an output
    symmetric: bool
    bits: int = 4
    dense_because = NO_BLOCK

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        rows, columns, size = in_words(0, self.bits), in_words(1, self.bits), self.group_size
        if n_in % columns.numbers:
            raise ModelError(
                f"compressed-tensors: a matrix of {n_in} inputs does not fill its words of {columns.numbers}"
            )
        num_groups, groups = (1, None) if size is None else (n_in // size, Axis(1, size))
        zeros = TensorSpec("weight_zero_point", (rows.size(n_out), num_groups), torch.int32, rows, groups)
        return (
            TensorSpec("weight_packed", (n_out, columns.size(n_in)), torch.int32, inputs=columns),
            TensorSpec("weight_scale", (n_out, num_groups), inputs=groups),
            TensorSpec("weight_shape", (2,), torch.int64, None, None),
            *(() if self.symmetric else (zeros,)),
            *STATIC,
        )

    def kind(self, n_in: int) -> str | None:
        return _kind(self.bits, self.symmetric, n_in, self.group_size)

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        codes = self._centred(held)
        kind = self.kind(codes.shape[1])
        return None if kind is None else in_blocks(kind, codes, held["weight_scale"])

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return scaled(self._centred(held), held["weight_scale"])

    def _centred(self, held: Mapping[str, Tensor]) -> Tensor:
        codes, (n_out, num_groups) = unpack(held["weight_packed"], self.bits), held["weight_scale"].shape
        if self.symmetric:
            return codes.short() - (1 << (self.bits - 1))
        zeros = unpack(held["weight_zero_point"].T, self.bits).T[:n_out]
        return centred(codes, zeros, evenly(codes.shape[1], num_groups, codes.device))


def _kind(bits: int, symmetric: bool, n_in: int, group_size: int | None) -> str | None:
    half = 1 << (bits - 1)
    return kind_for(*((-half, half - 1) if symmetric else (1 - 2 * half, 2 * half - 1)), n_in, group_size)


@dataclass(frozen=True, slots=True)
class IntQuantized:
    group_size: int | None  # None: one scale for all inputs of an output
    symmetric: bool
    whole: bool = False  # one scale for the matrix
    dense_because = NO_BLOCK

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        size = self.group_size
        shape = (1,) if self.whole else (n_out, 1 if size is None else n_in // size)
        outputs, inputs = (None if self.whole else Axis(0)), (None if size is None else Axis(1, size))
        zeros = TensorSpec("weight_zero_point", shape, torch.int8, outputs, inputs)
        return (
            TensorSpec("weight", (n_out, n_in), torch.int8),
            TensorSpec("weight_scale", shape, None, outputs, inputs),
            *(() if self.symmetric else (zeros,)),
            *STATIC,
        )

    def kind(self, n_in: int) -> str | None:
        return _kind(8, self.symmetric, n_in, self.group_size)

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        kind = self.kind(held["weight"].shape[1])
        return None if kind is None else in_blocks(kind, *self._centred(held))

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return scaled(*self._centred(held))

    def _centred(self, held: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """With the scales, [n_out, groups]."""
        codes = held["weight"]
        (n_out, n_in), scales = codes.shape, held["weight_scale"]
        scales = scales.view(1, 1).expand(n_out, 1) if self.whole else scales
        if self.symmetric:
            return codes.short(), scales
        zeros = held["weight_zero_point"].view(-1, 1 if self.whole else scales.shape[1]).expand(n_out, -1)
        return centred(codes, zeros, evenly(n_in, scales.shape[1], codes.device)), scales


class Targets(NamedTuple):
    """What a list of modules names."""

    names: frozenset[str]  # of modules, and of classes
    patterns: Sequence[Pattern]

    def name(self, module: str) -> bool:
        return module in self.names or any(pattern.begins(module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    groups: Sequence[tuple[Targets, Scheme]]
    ignore: Targets
    name: str = "compressed-tensors"

    def scheme_for(self, module: str) -> Scheme | None:
        """By name before by class, as the library has it."""
        if self.ignore.name(module) or "Linear" in self.ignore.names:
            return None
        by_name = (scheme for targets, scheme in self.groups if targets.name(module))
        by_class = (scheme for targets, scheme in self.groups if "Linear" in targets.names)
        return next(by_name, None) or next(by_class, None)


def from_config(config: Mapping[str, Any], where: str) -> CompressedTensors:
    for field, fine in (
        ("quantization_status", ("compressed",)),
        ("kv_cache_scheme", (None,)),
        ("sparsity_config", (None, {})),
        ("transform_config", (None, {})),
    ):
        if (value := config.get(field, fine[0])) not in fine:
            raise _unsupported(where, f"{field}={value!r}")
    given = config["config_groups"].values()
    groups = [_group(group, config.get("format"), where) for group in given]
    is_rounded = any(group.get("input_activations") for group in given)
    name = f"compressed-tensors{' (activations are not rounded)' if is_rounded else ''}"
    return CompressedTensors(groups, _targets(config.get("ignore") or ()), name)


def _group(group: Mapping[str, Any], outer: Any, where: str) -> tuple[Sequence[str], Scheme]:
    if group.get("output_activations"):
        raise _unsupported(where, "output_activations: only what layers are given may be")
    layout, weights = group.get("format") or outer, _Weights(group["weights"], where)
    if layout == "naive-quantized":
        layout = f"{weights.only('type', 'int', 'float')}-quantized"
    if layout not in LAYOUTS:
        raise _unsupported(where, f'format "{layout}" (only {", ".join(LAYOUTS)})')
    weights.only("dynamic", False, None)
    weights.only("actorder", None, "weight", "static")
    return _targets(group["targets"]), LAYOUTS[layout](weights)


class _Weights:
    """The arguments of a group's weights."""

    def __init__(self, given: Mapping[str, Any], where: str):
        self.given, self.where, self.symmetric = given, where, bool(given.get("symmetric", True))

    def only(self, field: str, *fine: Any) -> Any:
        value = self.given.get(field)
        if not any(type(value) is type(one) and value == one for one in fine):
            raise _unsupported(self.where, f"{field}={value!r} of weights (only {', '.join(map(repr, fine))})")
        return value

    def group_size(self, *fine: int) -> int:
        size = self.given.get("group_size")
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0 or (fine and size not in fine):
            raise _unsupported(self.where, f"group_size={size!r}")
        return size

    def are_floats(self, bits: int) -> None:
        self.only("type", "float")
        self.only("num_bits", bits)
        if not self.symmetric:
            raise _unsupported(self.where, "symmetric=false of weights in floats")


def _packed(weights: _Weights) -> Scheme:
    weights.only("type", "int")
    bits, strategy = weights.only("num_bits", *BITS), weights.only("strategy", "group", "channel")
    return PackQuantized(weights.group_size() if strategy == "group" else None, weights.symmetric, bits)


def _integers(weights: _Weights) -> Scheme:
    weights.only("type", "int")
    weights.only("num_bits", 8)
    strategy = weights.only("strategy", "channel", "tensor", "group")
    return IntQuantized(weights.group_size() if strategy == "group" else None, weights.symmetric, strategy == "tensor")


def _floats(weights: _Weights) -> Scheme:
    weights.are_floats(8)
    match weights.only("strategy", "channel", "tensor", "block"):
        case "channel":
            return FP8("weight_scale", others=STATIC)
        case "tensor":
            return FP8("weight_scale", scale_shape=(1,), others=STATIC)
    rows, columns = weights.given["block_structure"]
    if not all(type(size) is int and size > 0 for size in (rows, columns)):
        raise _unsupported(weights.where, f"block_structure={[rows, columns]!r} of weights")
    return FP8("weight_scale", (rows, columns), others=STATIC)


def _nvfp4(weights: _Weights) -> Scheme:
    weights.are_floats(4)
    weights.only("strategy", "tensor_group")
    weights.group_size(NV)
    others = beside("input_global_scale")
    return NVFP4("weight_packed", "weight_global_scale", (1,), divides=True, gives=torch.bfloat16, others=others)


def _mxfp4(weights: _Weights) -> Scheme:
    weights.are_floats(4)
    weights.only("strategy", "group")
    weights.group_size(MX)
    return MXFP4("weight_packed", "weight_scale")


LAYOUTS: Mapping[str, Callable[[_Weights], Scheme]] = {
    "pack-quantized": _packed,
    "int-quantized": _integers,
    "float-quantized": _floats,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}


def _targets(value: Any) -> Targets:
    """Raises TypeError, ValueError."""
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"targets and ignore must be lists of names, got {value!r}")
    names = frozenset(text for text in value if not text.startswith(REGEX))
    return Targets(names, patterns(text.removeprefix(REGEX) for text in value if text.startswith(REGEX)))


def _unsupported(where: str, what: str) -> ModelError:
    return ModelError(
        f"{where}: quantization_config of compressed-tensors: {what} is not supported; take the plain model or a .gguf"
    )
