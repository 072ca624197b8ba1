"""The products of bench/gpu/run.py: LoRA's, those with 4-bit weights, and a layer of experts. Shapes are
Llama-3.1-8B's and Qwen3-30B-A3B's, or tiny ones for the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from case import Case, Setting
from torch import Tensor

from minivllm.kernels import reference
from minivllm.kernels.triton.lora import SlotTable, Tasks
from minivllm.kernels.triton.moe import moe
from minivllm.kernels.triton.w4a16 import Matrix
from minivllm.lora.layer import Delta, Group, Part, add_deltas
from minivllm.quantization.formats import Packed, dequantise, quantise


def lora_cases(setting: Setting) -> Iterator[Case]:
    for num_tokens in _sizes(setting):
        yield _lora(setting.device, setting.dtype, num_tokens, setting.tiny, 2.5 * setting.unit)


def w4a16_cases(setting: Setting) -> Iterator[Case]:
    for num_tokens in _sizes(setting):
        yield _w4a16(setting, num_tokens, setting.unit)


def experts_cases(setting: Setting) -> Iterator[Case]:
    for num_tokens in _sizes(setting):
        yield _moe(setting.device, setting.dtype, num_tokens, setting.tiny, 2.5 * setting.unit)


def _sizes(setting: Setting) -> tuple[int, ...]:
    """Tokens of a step. Operands are scaled for results of size 1; tolerances as tests/tolerances.py, PRODUCT, where u
    is half of setting.unit."""
    return (5,) if setting.tiny else (1, 16, 256, 2048)


def normal(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)


def _lora(device: torch.device, dtype: torch.dtype, num_tokens: int, tiny: bool, tolerance: float) -> Case:
    """Eight adapters of rank 16 on qkv, the tokens shared out among them."""
    n_in, bounds = (48, (0, 32, 48, 64)) if tiny else (4096, (0, 4096, 5120, 6144))
    columns = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    table = SlotTable(8, n_in, columns, 16, dtype, device)
    deltas = []
    for slot in range(8):
        bs = [normal(c.stop - c.start, 16, device=device, dtype=dtype).T for c in columns]
        parts = tuple(Part(slice(16 * i, 16 * i + 16), c, b) for i, (c, b) in enumerate(zip(columns, bs, strict=True)))
        deltas.append(Delta(normal(48, n_in, device=device, dtype=dtype), parts))
        table.fill(slot, *deltas[-1])
    found = [(slot, np.arange(slot, num_tokens, 8)) for slot in range(min(8, num_tokens))]
    tasks = Tasks(found, device)
    x, y = torch.randn(num_tokens, n_in, device=device).to(dtype), torch.zeros(num_tokens, bounds[-1], device=device)
    y = y.to(dtype)

    def call() -> Tensor:
        table.add(y, x, tasks)  # once where the result is looked at
        return y

    def oracle() -> Tensor:
        wide = [Delta(a.double(), tuple(p._replace(b=p.b.double()) for p in parts)) for a, parts in deltas]
        groups = [Group(slot, torch.from_numpy(rows).to(device)) for slot, rows in found]
        wanted = torch.zeros(y.shape, dtype=torch.float64, device=device)
        add_deltas(wanted, x.double(), groups, wide)
        return wanted

    matrices = (48 * n_in + 16 * bounds[-1]) * len(found)
    moved = (matrices + x.numel() + 2 * y.numel()) * dtype.itemsize
    flops = 2 * num_tokens * matrices // len(found)
    return Case("lora", f"{num_tokens} x {n_in}", call, oracle, tolerance, moved, flops)


def _w4a16(setting: Setting, num_tokens: int, tolerance: float) -> Case:
    device, dtype, sms = setting.device, setting.dtype, setting.num_sms
    n_in, n_out = (64, 80) if setting.tiny else (4096, 14336)
    packed = Packed(*(part.to(device) for part in quantise(torch.randn(n_out, n_in) / n_in**0.5, 4)))
    matrix, x = Matrix(packed), torch.randn(num_tokens, n_in, device=device).to(dtype)
    out = torch.full((num_tokens, n_out), torch.nan, device=device).to(dtype)
    dense = torch.randn(n_out, n_in, device=device).to(dtype)

    def oracle() -> Tensor:
        return x.double() @ dequantise(packed).double().T

    moved = n_in * n_out // 2 + 4 * packed.scales.numel() + (x.numel() + out.numel()) * dtype.itemsize
    label, flops = f"{num_tokens} x {n_in} x {n_out}", 2 * num_tokens * n_in * n_out
    rivals = {"bf16": lambda: F.linear(x, dense)}
    return Case(
        "w4a16 linear", label, lambda: matrix.multiply(x, out, sms), oracle, tolerance, moved, flops, rivals=rivals
    )


def _moe(device: torch.device, dtype: torch.dtype, num_tokens: int, tiny: bool, tolerance: float) -> Case:
    hidden, size, num_experts, top_k = (32, 16, 6, 2) if tiny else (2048, 768, 128, 8)
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    gate_up = normal(num_experts, 2 * size, hidden, device=device, dtype=dtype)
    down = normal(num_experts, hidden, size, device=device, dtype=dtype)
    weights, ids = torch.randn(num_tokens, num_experts, device=device).softmax(-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.full_like(x, torch.nan)

    def call() -> Tensor:
        return moe(x, ids, weights, gate_up, down, out)

    def oracle() -> Tensor:
        return reference.experts(x, ids, weights, gate_up, down)

    matrices = ids.unique().numel() * 3 * hidden * size
    flops = 6 * ids.numel() * hidden * size
    label = f"{num_tokens} x {hidden}, {top_k} of {num_experts}"
    return Case("layer of experts", label, call, oracle, tolerance, (matrices + 2 * x.numel()) * dtype.itemsize, flops)
