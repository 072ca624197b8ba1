"""Every kernel with what it is for, its reference and whether it is used: the dispatch table. Imports nothing heavy.

A kernel that serves has a reader in the engine; with runner.kernels, dispatch.py says whether it is used. One that
waits is proven (tests/kernels) and called by nobody yet. None of the Triton kernels has been timed: bench/gpu/run.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    name: str
    family: str  # a row of minivllm.kernels.report
    source: str  # "module:name"
    reference: str  # "module:name", the oracle
    used_by: str  # "": nobody yet


def _triton(name: str, source: str, reference: str, used_by: str = "") -> Kernel:
    return Kernel(name, "triton", f"minivllm.kernels.triton.{source}", reference, used_by)


_ATTENTION = "minivllm.attention.reference:ReferenceAttention"
_REFERENCE = "minivllm.kernels.reference"
_GATHER = "runner.kernels, runner.inputs=gather"

KERNELS: tuple[Kernel, ...] = (
    Kernel("attention", "cpu", "minivllm.attention.cpu:CPUAttention", _ATTENTION, "runner.attention=cpu"),
    Kernel(
        "packed linear",
        "cpu",
        "minivllm.kernels.cpu.linear:PackedMatrix",
        "minivllm.quantization.formats:dequantise",
        "model.quantization",
    ),
    Kernel(
        "dense linear",
        "cpu",
        "minivllm.kernels.cpu.dense:DenseMatrix",
        "minivllm.layers.linear:Unquantized",
        "bf16 on a CPU with AMX or AVX-512 BF16",
    ),
    Kernel(
        "lora", "cpu", "minivllm.kernels.cpu.lora:SlotTable", "minivllm.lora.layer:add_deltas_naive", "lora.enabled"
    ),
    Kernel(
        "grammar masks",
        "cpu",
        "minivllm.kernels.cpu.mask:apply_masks",
        "minivllm.sampling.grammar_mask:apply_masks_slowly",
        "structured.backend",
    ),
    Kernel(
        "latent attention",
        "cpu",
        "minivllm.attention.latent_cpu:LatentCPU",
        "minivllm.attention.latent:LatentReference",
        "runner.attention=cpu, models of latent attention",
    ),
    _triton("decode attention", "paged:decode", _ATTENTION, "runner.attention"),
    _triton("prefill attention", "paged:prefill", _ATTENTION, "runner.attention"),
    _triton("cache write", "elementwise:write", f"{_REFERENCE}:write", "runner.attention"),
    _triton(
        "cache write in 8 bits", "elementwise:write_quantised", f"{_REFERENCE}:write_quantised", "runner.attention"
    ),
    _triton("rope + norm + cache write", "elementwise:rope_write", f"{_REFERENCE}:rope_write", "runner.kernels"),
    _triton("rope + norm + write in 8 bits", "elementwise:rope_write", f"{_REFERENCE}:rope_write", "runner.kernels"),
    _triton(
        "block copy", "elementwise:BlockCopier", f"{_REFERENCE}:copy_blocks", "runner.kernels, kv.fork, kv.preemption"
    ),
    _triton("draw", "draw:draw", "minivllm.sampling.draw:draw", "runner.kernels"),
    _triton("top-k, top-p and min-p", "draw:find_cuts", "minivllm.sampling.draw:find_cuts_by_sort", "runner.kernels"),
    _triton("rejection sampling", "draw:reject", "minivllm.sampling.rejection:reject", "runner.kernels"),
    _triton("lora", "lora:SlotTable", "minivllm.lora.layer:add_deltas_naive", "runner.kernels, lora.enabled"),
    _triton(
        "w4a16 linear", "w4a16:Matrix", "minivllm.quantization.formats:dequantise", "runner.kernels, model.quantization"
    ),
    _triton("layer of experts", "moe:moe", f"{_REFERENCE}:experts", "runner.kernels, models with experts"),
    _triton("gather inputs", "gather:gather_tokens", f"{_REFERENCE}:gather_tokens", _GATHER),
    _triton("gather rows", "gather:gather_rows", f"{_REFERENCE}:gather_rows", _GATHER),
    _triton("staged writes", "gather:write_rows", f"{_REFERENCE}:write_rows", _GATHER),
    _triton("rms norm", "elementwise:rms_norm", f"{_REFERENCE}:rms_norm"),
    _triton("silu mul", "elementwise:silu_mul", f"{_REFERENCE}:silu_mul"),
)
