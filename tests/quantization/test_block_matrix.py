"""Products with a GGUF file's weights as it stores them: the oracles are gguf's own decoder and a float64 product."""

from __future__ import annotations

import pytest
import torch
from block_kinds import oracle, random_blocks

from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu.blocks import ACTIVATION_BITS, KINDS, SIZES, BlockMatrix, dequantise, look_up

pytestmark = pytest.mark.skipif(kernels.unsupported_reason() is not None, reason=str(kernels.unsupported_reason()))

LARGEST = {16: 127 * 128, 8: 127}  # what the largest of 32 inputs becomes as an integer (block_tiles.h)
UNIT = 32


def n_in_of(kind: str) -> int:
    return 3 * 256 if SIZES[kind][0] == 256 else 11 * 32  # neither is a multiple of what is widened at a time


def bound(x: torch.Tensor, weight: torch.Tensor, bits: int = 16) -> torch.Tensor:
    """[T, rows]: how far a product may be from the exact one. An input is rounded by half of its unit's largest /
    LARGEST; a unit's two terms (codes, minimum) are rounded to fp32 some four times each and added in fp32."""
    units = x.double().abs().unflatten(1, (-1, UNIT)).amax(-1) / LARGEST[bits] / 2  # [T, units]
    rounded = units @ weight.double().abs().unflatten(1, (-1, UNIT)).sum(-1).T
    # Codes and minima are up to 16 times as large as the weight that they make, and cancel.
    size = x.double().abs() @ weight.double().abs().T
    return 1.01 * rounded + 16 * (8 + x.shape[1] / UNIT) * 2**-24 * size


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_ggufs_decoder_gives_bit_for_bit(kind):
    blocks = random_blocks(kind, 19, n_in_of(kind))
    assert torch.equal(dequantise(blocks), oracle(blocks))
    assert torch.equal(dequantise(blocks, torch.bfloat16), oracle(blocks).bfloat16())
    ids = torch.tensor([18, 0, 7, 7])
    assert torch.equal(look_up(blocks, ids, torch.float32), oracle(blocks)[ids])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 12, 300])
@pytest.mark.parametrize("bits", ACTIVATION_BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact_but_for_the_rounding_of_inputs(kind, bits, num_tokens):
    blocks = random_blocks(kind, 45, n_in_of(kind))
    x = torch.randn(num_tokens, n_in_of(kind), generator=torch.Generator().manual_seed(num_tokens))
    x[:, 5] *= 1000  # an outlier, as models have them: it makes its own unit's inputs coarse, and no other's
    exact = x.double() @ oracle(blocks).double().T
    error = (BlockMatrix([blocks], blocks.n_in, activation_bits=bits)(x).double() - exact).abs()
    assert (error <= bound(x, oracle(blocks), bits)).all(), (error / bound(x, oracle(blocks), bits)).max()


@pytest.mark.parametrize("kind", KINDS)
def test_integers_of_8_bits_meet_every_code_exactly(kind):
    """Inputs that are such integers already, the largest ones too, whose products an instruction of 16 bits could not
    hold: nothing is rounded but sums."""
    blocks = random_blocks(kind, 45, n_in_of(kind))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (9, n_in_of(kind)), generator=generator).float()
    x[:2] = torch.tensor([[127.0], [-127.0]])
    x[:, ::UNIT] = 127.0
    exact = x.double() @ oracle(blocks).double().T
    error = (BlockMatrix([blocks], blocks.n_in, activation_bits=8)(x).double() - exact).abs()
    size = x.double().abs() @ oracle(blocks).double().abs().T
    assert (error <= 16 * (8 + x.shape[1] / UNIT) * 2**-24 * size).all()


@pytest.mark.parametrize("bits", ACTIVATION_BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kind, bits):
    """A scheduling decision may change timing, never output: one token at a time, a few, and many, in every place."""
    matrix = BlockMatrix([random_blocks(kind, 45, n_in_of(kind))], n_in_of(kind), activation_bits=bits)
    x = torch.randn(700, n_in_of(kind), generator=torch.Generator().manual_seed(0))
    together = matrix(x)
    for size in (1, 2, 3, 4, 5, 6, 7, 64):
        starts = range(0, 40 * size, size) if size < 64 else range(0, 640, 64)
        for start in starts:
            assert torch.equal(matrix(x[start : start + size]), together[start : start + size]), (size, start)


def test_parts_of_several_kinds_are_stacked_and_their_bias_is_added():
    parts = [random_blocks(kind, rows, 512) for kind, rows in (("Q4_K", 24), ("Q8_0", 7), ("Q6_K", 17))]
    bias = torch.randn(48)
    matrix = BlockMatrix(parts, 512, bias)
    x = torch.randn(9, 512)
    weight = torch.cat([oracle(part) for part in parts])
    error = (matrix(x).double() - (x.double() @ weight.double().T + bias.double())).abs()
    assert (error <= bound(x, weight) + 1e-6 * bias.abs()).all()
    assert matrix.n_out == 48


def test_bfloat16_goes_in_and_out_with_one_rounding():
    blocks = random_blocks("Q4_1", 40, 352)
    matrix, x = BlockMatrix([blocks], 352), torch.randn(5, 352).bfloat16()
    assert torch.equal(matrix(x), matrix(x.float()).bfloat16())
    assert torch.equal(matrix(x, torch.float32), matrix(x.float()))


@pytest.mark.parametrize("bits", ACTIVATION_BITS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_stays_none_and_in_its_row(value, bits):
    blocks, x = random_blocks("Q6_K", 16, 256), torch.randn(8, 256)
    matrix = BlockMatrix([blocks], 256, activation_bits=bits)
    clean = matrix(x)
    x[3, 77] = value
    y = matrix(x)
    assert y[3].isnan().all()
    assert torch.equal(torch.cat((y[:3], y[4:])), torch.cat((clean[:3], clean[4:])))


@pytest.mark.parametrize("bits", ACTIVATION_BITS)
def test_zeros_and_tiny_inputs_give_zero_or_less_than_they_could(bits):
    blocks = random_blocks("Q8_0", 16, 64)
    matrix = BlockMatrix([blocks], 64, activation_bits=bits)
    assert torch.equal(matrix(torch.zeros(3, 64)), torch.zeros(3, 16))
    tiny = torch.full((1, 64), 1e-38)
    assert matrix(tiny).isfinite().all() and matrix(tiny).abs().max() <= 64 * 1e-38 * oracle(blocks).abs().max()


def test_no_tokens_give_no_rows():
    assert BlockMatrix([random_blocks("Q5_0", 16, 64)], 64)(torch.zeros(0, 64)).shape == (0, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_takes_hardly_more_room_than_in_the_file(kind):
    """Q3_K's, whose scales have a byte each here and six bits there, the most: 5.5 %."""
    blocks = random_blocks(kind, 64, 1024)
    assert BlockMatrix([blocks], 1024).num_bytes <= 1.055 * blocks.rows.nbytes
