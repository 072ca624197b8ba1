"""Cache writes, block copies and norms in the interpreter against their references. Run by test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from tolerances import ROUNDED

from minivllm.kernels import reference
from minivllm.kernels.triton import elementwise
from minivllm.kernels.triton.interpreted import INTERPRETED

assert INTERPRETED
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter truncates to bfloat16 where a GPU rounds: there, results are left in float32.
RESULT = {torch.bfloat16: torch.float32}
SLOTS = torch.tensor([33, 0, 95, 7, 16])  # of 6 blocks of 16


def caches(kv_heads: int, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.full((6, kv_heads, 16, head_size), torch.nan, dtype=dtype) for _ in range(2))


def equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads, head_size", [(3, 20), (1, 64)])
def test_write(dtype, kv_heads, head_size):
    qkv = torch.randn(5, 2 + 2 * kv_heads, head_size).to(dtype)
    k, v = qkv[:, 2 : 2 + kv_heads], qkv[:, 2 + kv_heads :]
    got, wanted = caches(kv_heads, head_size, dtype), caches(kv_heads, head_size, dtype)
    elementwise.write(k, v, *got, SLOTS)
    reference.write(k, v, *wanted, SLOTS)
    for a, b in zip(got, wanted, strict=True):
        equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_size", [16, 20])
def test_rope_norm_and_write(dtype, norm, head_size):
    heads, kv_heads = 3, 2
    qkv = torch.randn(5, heads + 2 * kv_heads, head_size).to(dtype)
    angles = torch.arange(50)[:, None] * 0.3 ** torch.arange(head_size // 2)
    weight = torch.randn(2, head_size).to(dtype) if norm else None
    positions = torch.tensor([0, 49, 3, 17, 1])
    results = []
    for function, out in ((elementwise.rope_write, RESULT.get(dtype, dtype)), (reference.rope_write, torch.float64)):
        kv = caches(kv_heads, head_size, out)
        q = torch.full((5, heads, head_size), torch.nan, dtype=out)
        function(qkv, q, *kv, SLOTS, positions, angles.cos().to(dtype), angles.sin().to(dtype), weight, 1e-5)
        results.append((q, *kv))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), wanted, **ROUNDED[dtype], equal_nan=True)


@pytest.mark.parametrize("inner, dtype", [((2, 16, 20), torch.float16), ((1, 4, 8), torch.bfloat16)])
@pytest.mark.parametrize("layers", [1, 3])
def test_blocks_are_copied_in_all_layers(inner, dtype, layers):
    sources = [torch.randn(2, 9, *inner).to(dtype) for _ in range(layers)]
    targets = [torch.randn(2, 5, *inner).to(dtype) for _ in range(layers)]
    pairs = torch.tensor([[8, 0], [0, 4], [3, 2]])
    for there in (targets, sources):  # to another pool; within one
        wanted = [x.clone() for x in there]
        reference.copy_blocks([x.clone() for x in sources], wanted, pairs[:1])
        elementwise.BlockCopier(sources, there)(pairs[:1])
        for got, want in zip(there, wanted, strict=True):
            equal(got, want)
    wanted = [x.clone() for x in targets]
    reference.copy_blocks(sources, wanted, pairs)
    elementwise.BlockCopier(sources, targets)(pairs)
    for got, want in zip(targets, wanted, strict=True):
        equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 48, 576])
def test_norm_and_activation(dtype, size):
    x, weight = torch.randn(4, 3 * size).to(dtype), torch.randn(size).to(dtype)
    rows = x[:, :size]  # apart in memory
    out = torch.empty(4, size, dtype=RESULT.get(dtype, dtype))
    got = elementwise.rms_norm(rows, weight, 1e-5, out).double()
    torch.testing.assert_close(got, reference.rms_norm(rows, weight, 1e-5), **ROUNDED[dtype])
    got = elementwise.silu_mul(x[:, : 2 * size], out).double()
    torch.testing.assert_close(got, reference.silu_mul(x[:, : 2 * size]), **ROUNDED[dtype])
