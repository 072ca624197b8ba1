"""Rule: a code is the nearest one, and a group's numbers depend on nothing outside of it."""

from __future__ import annotations

import pytest
import torch

from minivllm.quantization.formats import GROUP, dequantise, pack_nibbles, quantise, unpack_nibbles

FP16 = 2**-11  # half a unit in the last place, relative


def awkward(n_out: int = 24) -> torch.Tensor:
    """Normal weights, and groups that are all zero, constant, one-sided, tiny, or have one outlier."""
    torch.manual_seed(0)
    w = torch.randn(n_out, 4 * GROUP) * 0.05
    w[1] = 0
    w[2] = 0.37
    w[3] = w[3].abs() + 1
    w[4] *= 1e-4
    w[5, 7] = 60.0
    w[6, :GROUP] = -0.0
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_moves_by_more_than_half_a_scale(dtype):
    w = awkward().to(dtype)
    for bits in (4, 8):
        packed = quantise(w, bits)
        scale = packed.scales.float().repeat_interleave(GROUP, 1)
        minimum = 0 if packed.minima is None else packed.minima.float().abs().repeat_interleave(GROUP, 1)
        steps = 15 if bits == 4 else 127
        smallest = 2**-25 * steps  # of fp16: a scale below it is a scale of zero
        bound = scale / 2 + FP16 * (minimum + steps * scale) + smallest
        assert ((dequantise(packed) - w.float()).abs() <= bound * 1.001).all(), bits


def test_more_bits_are_nearer():
    w = torch.randn(64, 256)
    errors = [(dequantise(quantise(w, bits)) - w).pow(2).mean().sqrt() for bits in (4, 8)]
    assert errors[1] < errors[0] / 10
    assert errors[0] < 0.1  # of weights with a deviation of 1: a range of about 4.2 over 15 steps, / sqrt(12)


def test_what_is_representable_stays_exactly():
    for bits in (4, 8):
        packed = quantise(torch.randn(8, 64), bits)
        again = quantise(dequantise(packed), bits)
        if bits == 8:  # 4 bits: a group that does not use code 0 or 15 gets another scale
            assert torch.equal(dequantise(again), dequantise(packed))


def test_nibbles_round_trip():
    codes = torch.randint(0, 16, (5, 3 * GROUP), dtype=torch.uint8)
    nibbles = pack_nibbles(codes)
    assert nibbles.shape == (5, 3 * GROUP // 2)
    assert torch.equal(unpack_nibbles(nibbles), codes)
    assert nibbles[2, 17] == codes[2, GROUP + 1] | codes[2, GROUP + 17] << 4  # the order of llama.cpp's blocks


def test_a_group_is_on_its_own():
    w = awkward()
    other = w.clone()
    other[:, GROUP:] = torch.randn(24, 3 * GROUP)
    for bits in (4, 8):
        a, b = dequantise(quantise(w, bits)), dequantise(quantise(other, bits))
        assert torch.equal(a[:, :GROUP], b[:, :GROUP])
