"""K and V in 8 bits: what codes and their scales give back, and what they cost attention."""

from __future__ import annotations

import pytest
import torch
from attention.batches import quantised, spec

from minivllm.attention.quantised_kv import QUANTISED, pack, unpack
from minivllm.attention.reference import attend_dense

BOTH = sorted(QUANTISED, key=str)


@pytest.mark.parametrize("kind", BOTH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_packed_comes_back_within_half_a_step(kind, dtype):
    x = (torch.randn(6, 2, 20) * torch.tensor([1.0, 1e-6, 300.0, 0.0, 1.0, 5.0])[:, None, None]).to(dtype)
    packed = pack(x, kind)
    assert packed.shape == (6, 2, 24) and packed.dtype == torch.uint8
    back, largest = unpack(packed, kind, torch.float32), x.float().abs().amax(-1, keepdim=True)
    if kind == torch.int8:
        half_step = largest / 127 / 2
        assert torch.equal(back, quantised(x))
    else:  # three bits of fraction; no finer than 2^-9 of a scale
        half_step = torch.maximum(x.float().abs() / 16, largest / 448 / 2**10)
    assert ((back - x.float()).abs() <= half_step * (1 + 1e-5)).all()
    assert (back[3] == 0).all()


def error(kind: torch.dtype, outlier: float, tries: int = 20) -> float:
    """Relative, of attention outputs over 512 normal keys, of whose channels two are so many times as large."""
    layer, total = spec(8, 2, 64), 0.0
    for seed in range(tries):
        generator = torch.Generator().manual_seed(seed)
        shapes = (16, 8, 64), (512, 2, 64), (512, 2, 64)
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        q[..., [5, 40]] /= outlier  # else these channels alone would decide every score
        for x in (k, v):
            x[..., [5, 40]] *= outlier
        exact = attend_dense(q, k, v, layer)
        got = attend_dense(q, *(unpack(pack(x, kind), kind, torch.float64) for x in (k, v)), layer)
        total += float((got - exact).norm() / exact.norm())
    return total / tries


def test_int8_is_finer_and_e4m3_does_not_mind_outliers():
    """The numbers of quantised_kv.py's docstring."""
    measured = {kind: [error(kind, outlier) for outlier in (1, 30)] for kind in QUANTISED}
    assert measured[torch.int8] == pytest.approx([0.0086, 0.091], rel=0.1)
    assert measured[torch.float8_e4m3fn] == pytest.approx([0.037, 0.031], rel=0.1)
