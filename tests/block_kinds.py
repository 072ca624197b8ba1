"""Blocks of every kind of a GGUF file, made of random bytes: each byte but those of a float is a valid one."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from minivllm.kernels.cpu.blocks import SIZES, Blocks

# Where a block's fp16 numbers begin: scales, and minima (or what they are multiplied with).
FLOATS = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}


def random_blocks(kind: str, num_rows: int, n_in: int, seed: int = 0) -> Blocks:
    """Weights of a size of about 0.1."""
    weights, size = SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (num_rows * n_in // weights, size), np.uint8)
    largest = 0.1 / dequantized(kind, _with_floats(kind, raw.copy(), np.ones(len(raw)))).std()
    return Blocks(
        kind, torch.from_numpy(_with_floats(kind, raw, largest * generator.normal(size=len(raw)))).view(num_rows, -1)
    )


def dequantized(kind: str, raw: np.ndarray) -> np.ndarray:
    """By the `gguf` package: fp32."""
    return dequantize(raw, GGMLQuantizationType[kind])


def oracle(blocks: Blocks) -> torch.Tensor:
    """fp32 [rows, n_in]."""
    return torch.from_numpy(dequantized(blocks.kind, blocks.rows.numpy()))


def _with_floats(kind: str, raw: np.ndarray, values: np.ndarray) -> np.ndarray:
    for at in FLOATS.get(kind, (0,)):
        raw[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw
