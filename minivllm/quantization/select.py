"""What `model.quantization` means for this model on this machine, and which layers it reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.embedding import BlockEmbedding, Embedding, TiedLMHead
from minivllm.layers.experts import MatrixStack
from minivllm.layers.linear import Linear, QuantMethod
from minivllm.quantization.base import Format, Plain, Scheme
from minivllm.quantization.formats import GROUP
from minivllm.quantization.packed import (
    CPU,
    CPU_BY_BITS,
    EXACT,
    NEVER,
    TRITON,
    TYPICAL,
    AsStored,
    KeptPacked,
    Kernel,
    Limit,
    QuantisedAtLoad,
    StackAsStored,
    proves_triton,
)

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch

P = TypeVar("P")  # a place in a file
BITS = {"int4": 4, "int8": 8}
ROUNDED = {4: "Q4_1", 8: "Q8_0"}  # the blocks that rounded weights become
DTYPES = (torch.bfloat16, torch.float32)  # of activations
PLAIN = Plain()
HEAD = "lm_head"  # rounded to 8 bits where others get 4: 4 bits there cost most of the quality (bench/LOG.md)


class Choice(NamedTuple):
    kind: str  # none | kept | int8 | int4
    reason: str
    kernel: Kernel = CPU


def choose(
    asked: str,
    device: torch.device,
    dtype: torch.dtype,
    is_packed: bool,
    kernels: Dispatch | None = None,
    dtype_asked: bool = True,
    activation_bits: int | Literal["auto"] = "auto",
) -> Choice:
    """is_packed: the checkpoint's matrices may be blocks, or become some unrounded. kernels: of the engine; None: no
    Triton kernel is asked for. dtype_asked: the dtype was asked for by name: fp32 then means the exact product with
    de-quantised weights, and not only that the CPU has nothing narrower, unless activation_bits asks for another.
    Raises ConfigError for what cannot be."""
    is_exact = dtype is torch.float32 and dtype_asked and activation_bits == "auto"
    choice = _choose(asked, device, dtype, is_packed, kernels, is_exact)
    if activation_bits == "auto":
        return choice
    refuse_activation_bits(activation_bits, choice)
    return choice._replace(kernel=CPU_BY_BITS[activation_bits])


def refuse_activation_bits(bits: int | Literal["auto"], choice: Choice) -> None:
    """Raises ConfigError for bits that are asked for where nothing is rounded to any."""
    why = choice.reason if choice.kind == "none" else "a GPU's kernel rounds no input"
    if bits != "auto" and (choice.kind == "none" or choice.kernel.activation_bits is None):
        raise ConfigError(
            f"quantization.activation_bits={bits} is of packed weights on a CPU, and none is multiplied there: {why}"
        )


def rounding(asked: int | Literal["auto"], choice: Choice) -> tuple[int, str] | None:
    """(bits, why) of the inputs of packed weights; None: they are not rounded."""
    bits = choice.kernel.activation_bits
    if bits is None:
        return None
    if asked == "auto":
        return bits, "auto: no answer changes; 8 are faster in batches and prompts, and change some"
    return bits, "as asked: inputs of packed weights, a scale for 32 of them"


def _choose(
    asked: str, device: torch.device, dtype: torch.dtype, is_packed: bool, kernels: Dispatch | None, is_exact: bool
) -> Choice:
    if asked == "none":
        return Choice("none", "model.quantization=none")
    is_wanted = asked in BITS or (is_packed and not is_exact)
    if is_wanted and kernels and kernels.uses("w4a16 linear", lambda device: proves_triton(device, dtype)):
        return _choose_on_gpu(asked)
    if asked in BITS:
        if why := _impossible(device, dtype):
            raise ConfigError(f"model.quantization={asked}: {why}. Use model.quantization=none")
        reason = f"rounded to {BITS[asked]} bits, a scale for {GROUP} weights, the LM head to 8"
        return Choice(asked, f"{reason}: model.quantization={asked}", EXACT if is_exact else CPU)
    if not is_packed:
        return Choice("none", "the checkpoint's weights are not in 4 or 8 bits")
    if is_exact:
        return Choice("none", "model.dtype=float32: the file's weights are de-quantised, exactly")
    if why := _impossible(device, dtype):
        return Choice("none", f"the file's weights are de-quantised: {why}")
    return Choice("kept", "the file's own weights, multiplied as they are stored")


def _choose_on_gpu(asked: str) -> Choice:
    if asked == "int8":
        raise ConfigError("model.quantization=int8: on a GPU weights are kept in 4 bits or dense. Use int4 or none")
    if asked == "int4":
        reason = f"rounded to 4 bits, a scale for {GROUP} weights, the LM head dense: model.quantization=int4"
        return Choice("int4", reason, TRITON)
    return Choice("kept", "the file's own weights where they are Q4_0 or Q4_1; others are de-quantised", TRITON)


def _impossible(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return (
            f"packed weights are computed with on a CPU only, or by a Triton kernel on a GPU, not on this {device.type}"
        )
    if dtype not in DTYPES:
        return f"the kernels compute in bfloat16 or float32, not in {str(dtype).removeprefix('torch.')}"
    return kernels.unsupported_reason()


@dataclass(slots=True)
class Quantised:
    """What `install` did."""

    stack: Limit
    head: Limit
    is_dual: bool = False  # the layers of the stack have a dense copy
    head_is_dual: bool = False
    copy_bytes: int = 0  # that dense copies take
    layers: list[nn.Module] = field(default_factory=list)
    kinds: dict[nn.Module, list[str]] = field(default_factory=dict)  # of these layers: bits, or kinds of blocks
    as_stored: set[str] = field(default_factory=set)  # modules of the checkpoint whose layers take them as they are
    looked_up: set[str] = field(default_factory=set)  # modules of the checkpoint that stay in the mapped file
    left: Counter[str] = field(default_factory=Counter)  # matrices that are dense, by why

    @property
    def counts(self) -> Counter[str]:
        return Counter(kind for kinds in self.kinds.values() for kind in kinds)

    def unfit(self, layer: nn.Module) -> None:
        """A layer whose numbers fit no block of its kind."""
        if layer in self.kinds:
            self.layers.remove(layer)
            for kind in self.kinds.pop(layer):
                self.left[f"numbers that {kind} does not hold"] += 1

    def describe(self) -> str:
        packed = " and ".join(f"{count} in {what}" for what, count in sorted(self.counts.items()))
        dense = (f"{count} dense ({why})" if why else f"{count} dense" for why, count in sorted(self.left.items()))
        return ", ".join(filter(None, [packed, *dense]))


class _Packing(NamedTuple):
    """A layer that will be packed."""

    layer: nn.Module
    modules: list[str]
    schemes: dict[str, Scheme]  # by part
    kinds: list[str]  # of blocks


def install(
    model: nn.Module,
    kind: str,
    format: Format | None,
    dense_copy: bool,
    kernel: Kernel = CPU,
    reads_dense: bool = False,
) -> Quantised:
    """Give the model's layers their methods; call before the weights are loaded.

    format: of the checkpoint; None: its weights are as in any other. A layer of several of its modules is kept packed
    if the kernel takes each of them as it is. Layers that cannot be packed keep the method that they have; where the
    format keeps a matrix otherwise, it is de-quantised first, unless the file's reader does so (reads_dense).
    """
    done = Quantised(Limit(NEVER), Limit(NEVER))
    heads, stack = [], []
    for layer, modules in linear_layers(model):
        schemes = _schemes(layer, modules, format)
        why = _unsupported_reason(kind, layer, modules, schemes, kernel)
        if why is not None:
            done.left.update({why: len(modules)} if kind != "none" else {})
            if not reads_dense:
                _dequantise_first(layer, schemes, model.dtype)
            continue
        kinds = _kinds(schemes, _n_in(layer)) if kind == "kept" else [ROUNDED[_bits(kind, modules)]]
        (heads if HEAD in modules else stack).append(_Packing(layer, modules, schemes, kinds))
    done.is_dual = _pack(model, kind, stack, done.stack, dense_copy, kernel, done)
    done.head_is_dual = _pack(model, kind, heads, done.head, dense_copy and done.is_dual, kernel, done)
    if format is not None and not reads_dense:
        _dequantise_experts(model, format)
    return done


def _schemes(layer: nn.Module, modules: list[str], format: Format | None) -> dict[str, Scheme]:
    """Of the layer's parts: none if all are as in any checkpoint."""
    parts = list(getattr(layer, "rows", [""]))
    found = {part: scheme for part, name in zip(parts, modules, strict=True) if (scheme := _scheme(format, name))}
    return {part: found.get(part, PLAIN) for part in parts} if found else {}


def _scheme(format: Format | None, module: str) -> Scheme | None:
    return None if format is None else format.scheme_for(module)


def _kinds(schemes: Mapping[str, Scheme], n_in: int) -> list[str]:
    return [kind for scheme in schemes.values() if (kind := scheme.kind(n_in)) is not None]


def _n_in(layer: nn.Module) -> int:
    return layer.weight.shape[1]


def _unsupported_reason(
    kind: str, layer: nn.Module, modules: list[str], schemes: Mapping[str, Scheme], kernel: Kernel
) -> str | None:
    """Why a layer stays dense, or None."""
    if kind == "none":
        return ""
    if kind != "kept":
        is_possible = _bits(kind, modules) in kernel.bits and layer.weight.shape[1] % GROUP == 0
        return None if is_possible else ""
    if not schemes or PLAIN in schemes.values():
        return "not packed in the file"
    kinds = [(scheme.kind(_n_in(layer)), scheme.dense_because) for scheme in schemes.values()]
    others = dict.fromkeys(kind or because for kind, because in kinds if kind not in kernel.kinds)
    beside = "" if len(modules) == 1 else f" in a layer of {len(modules)}"
    return ", ".join(others) + beside if others else None


def _bits(kind: str, modules: list[str]) -> int:
    return 8 if HEAD in modules else BITS[kind]


def _pack(
    model: nn.Module,
    kind: str,
    packings: list[_Packing],
    limit: Limit,
    dense_copy: bool,
    kernel: Kernel,
    done: Quantised,
) -> bool:
    """The stack of layers, or the LM head, whose limit this is: all of them get a dense copy, or none. -> whether."""
    has_copy = dense_copy and bool(packings) and all(kernel.copied(p.kinds, model.dtype) for p in packings)
    dense, limit.tokens = (model.linear_method, TYPICAL) if has_copy else (None, NEVER)
    methods = {bits: QuantisedAtLoad(bits, dense, limit, kernel) for bits in kernel.bits}
    kept = KeptPacked(dense, limit, kernel)
    for layer, modules, schemes, kinds in packings:
        n_out, n_in = layer.weight.shape
        done.copy_bytes += 2 * n_out * n_in if has_copy else 0
        done.layers.append(layer)
        if kind == "kept":
            _give(layer, AsStored(schemes, layer.method, kept, done.unfit), model.dtype)
            done.kinds[layer] = kinds
            done.as_stored.update(modules)
        else:
            bits = _bits(kind, modules)
            layer.method = methods[bits]
            _dequantise_first(layer, schemes, model.dtype)
            done.kinds[layer] = [f"{bits} bits"]
    return has_copy


def _dequantise_first(layer: nn.Module, schemes: dict[str, Scheme], dtype: torch.dtype) -> None:
    if schemes:
        _give(layer, AsStored(schemes, layer.method), dtype)


def _dequantise_experts(model: nn.Module, format: Format) -> None:
    for name, modules in _modules_of(model).items():
        stack = model.get_submodule(name)
        if isinstance(stack, MatrixStack):
            found = {part: scheme for part, module in modules.items() if (scheme := format.scheme_for(module))}
            if found:
                schemes = {part: found.get(part, PLAIN) for part in stack.rows}
                _give(stack, StackAsStored(schemes, stack.method), model.dtype)


def _give(layer: nn.Module, method: QuantMethod, dtype: torch.dtype) -> None:
    """Another method, before anything is loaded."""
    n_out, n_in = layer.weight.shape[-2:]
    with layer.weight.device:
        layer.method = method
        method.create(layer, n_in, n_out, dtype)


def look_up_in_blocks(
    model: nn.Module, stored: Mapping[str, P], blocks_at: Callable[[P], Blocks], kernel: Kernel, done: Quantised
) -> None:
    """Rows of the embedding are then taken out of the mapped file: no table of it is made. stored: {module of the
    checkpoint: where its matrix is}. Of an embedding that has all rows: a rank's has a table of its own."""
    if type(model.embedding) is not Embedding:
        return
    name = next(theirs for theirs, (ours, _) in model.checkpoint_modules().items() if ours == "embedding")
    if kernel.looks_up and done.layers and name in stored and kernel.takes([blocks := blocks_at(stored[name])]):
        model.embedding = BlockEmbedding(blocks, model.embedding.weight.shape[1], model.dtype)
        done.looked_up.add(name)


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """(layer, the checkpoint's modules that are its rows, in their order)."""
    modules = _modules_of(model)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear | TiedLMHead) and name in modules:
            yield layer, [modules[name][part] for part in getattr(layer, "rows", [""])]


def _modules_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """{our module: {part of its rows: the checkpoint's module}}."""
    modules: dict[str, dict[str, str]] = {}
    for theirs, (ours, part) in model.checkpoint_modules().items():
        modules.setdefault(ours, {})[part] = theirs
    return modules
