"""What `model.quantization` means for this model on this machine, and which layers it reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels.cpu import linear as kernels
from minivllm.quantization.formats import GROUP
from minivllm.quantization.packed import (
    CPU,
    NEVER,
    TRITON,
    TYPICAL,
    KeptPacked,
    Kernel,
    Limit,
    QuantisedAtLoad,
    proves_triton,
)

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch

BITS = {"int4": 4, "int8": 8}
HEAD = "lm_head"  # rounded to 8 bits where others get 4: 4 bits there cost most of the quality (bench/LOG.md)


class Choice(NamedTuple):
    kind: str  # none | kept | int8 | int4
    reason: str
    kernel: Kernel = CPU


def choose(
    asked: str, device: torch.device, dtype: torch.dtype, is_packed: bool, kernels: Dispatch | None = None
) -> Choice:
    """is_packed: the checkpoint itself holds codes that the kernels read. kernels: of the engine; None: no Triton
    kernel is asked for. Raises ConfigError for what cannot be."""
    if asked == "none":
        return Choice("none", "model.quantization=none")
    is_wanted = asked in BITS or (is_packed and dtype is not torch.float32)
    if is_wanted and kernels and kernels.uses("w4a16 linear", lambda device: proves_triton(device, dtype)):
        return _choose_on_gpu(asked)
    if asked in BITS:
        if why := _impossible(device, dtype):
            raise ConfigError(f"model.quantization={asked}: {why}. Use model.quantization=none")
        reason = f"rounded to {BITS[asked]} bits, a scale for {GROUP} weights, the LM head to 8"
        return Choice(asked, f"{reason}: model.quantization={asked}")
    if not is_packed:
        return Choice("none", "the checkpoint's weights are not in 4 or 8 bits")
    if dtype is torch.float32:
        return Choice("none", "in fp32 the checkpoint's 4- and 8-bit weights are de-quantised, exactly")
    if why := _impossible(device, dtype):
        return Choice("none", f"the checkpoint's 4- and 8-bit weights are de-quantised: {why}")
    return Choice("kept", "the checkpoint's own 4- and 8-bit weights")


def _choose_on_gpu(asked: str) -> Choice:
    if asked == "int8":
        raise ConfigError("model.quantization=int8: on a GPU weights are kept in 4 bits or dense. Use int4 or none")
    if asked == "int4":
        reason = f"rounded to 4 bits, a scale for {GROUP} weights, the LM head dense: model.quantization=int4"
        return Choice("int4", reason, TRITON)
    return Choice("kept", "the checkpoint's own 4-bit weights; those in 8 bits are de-quantised", TRITON)


def _impossible(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return (
            f"packed weights are computed with on a CPU only, or by a Triton kernel on a GPU, not on this {device.type}"
        )
    if dtype not in kernels.DTYPES:
        return f"the kernels compute in bfloat16 or float32, not in {str(dtype).removeprefix('torch.')}"
    return kernels.obstacle()


@dataclass(slots=True)
class Quantised:
    """What `install` did."""

    stack: Limit
    head: Limit
    is_dual: bool
    layers: list[nn.Module] = field(default_factory=list)
    left: int = 0  # layers whose weights stay dense

    def describe(self) -> str:
        counts = Counter(layer.method.bits for layer in self.layers)
        packed = " and ".join(f"{count} in {bits} bits" for bits, count in sorted(counts.items()))
        return packed + (f", {self.left} dense" if self.left else "")


def install(
    model: nn.Module, kind: str, stored: Mapping[str, int], dense_copy: bool, kernel: Kernel = CPU
) -> Quantised:
    """Give the model's linear layers their methods; call before the weights are loaded.

    stored: {module of the checkpoint: bits}, of those whose codes it holds. A layer of several such modules is kept
    packed if all have equal bits. Layers that cannot be packed keep the method that they have.
    """
    dtype = model.embedding.weight.dtype
    is_dual = dense_copy and dtype is torch.bfloat16 and kernel.beside_dense
    stack, head = (Limit(TYPICAL if is_dual else NEVER) for _ in range(2))
    dense = model.linear_method if is_dual else None
    method = KeptPacked if kind == "kept" else QuantisedAtLoad
    kinds = {(bits, limit): method(bits, dense, limit, kernel) for bits in kernel.bits for limit in (stack, head)}
    done = Quantised(stack, head, is_dual)
    for layer, modules in linear_layers(model):
        bits = {stored.get(name) for name in modules} if kind == "kept" else {8 if HEAD in modules else BITS[kind]}
        n_out, n_in = layer.weight.shape
        if len(bits) > 1 or not bits <= set(kernel.bits) or n_in % GROUP:
            done.left += 1
            continue
        layer.method = kinds[bits.pop(), head if HEAD in modules else stack]
        if kind == "kept":
            layer.method.create(layer, n_in, n_out, dtype)
        done.layers.append(layer)
    return done


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """(layer, the checkpoint's modules that are its rows)."""
    modules: dict[str, list[str]] = {}
    for theirs, (ours, _) in model.checkpoint_modules().items():
        modules.setdefault(ours, []).append(theirs)
    for name, layer in model.named_modules():
        if hasattr(layer, "method") and name in modules:
            yield layer, modules[name]
