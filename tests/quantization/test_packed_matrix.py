"""Rule: a product with packed weights is the product with what their codes mean."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from minivllm.kernels.cpu import linear
from minivllm.kernels.cpu.blocks import SIZES, Blocks
from minivllm.kernels.cpu.linear import VNNI, PackedMatrix
from minivllm.quantization.formats import GROUP, Packed, dequantise, from_blocks, quantise, to_blocks

pytestmark = pytest.mark.skipif(linear.unsupported_reason() is not None, reason=str(linear.unsupported_reason()))
PATHS = range(1 + (linear.best_path() if linear.unsupported_reason() is None else 0))
SHAPES = [(16, 32), (17, 64), (100, 96), (1, 32), (64, 512)]  # [n_out, n_in]


def case(n_out, n_in, tokens, bits, dtype, bias=False):
    torch.manual_seed(n_out + tokens)
    packed = quantise(torch.randn(n_out, n_in), bits)
    bias = torch.randn(n_out) if bias else None
    x = torch.randn(tokens, n_in) * torch.logspace(-2, 2, tokens)[:, None] if tokens else torch.empty(0, n_in)
    return PackedMatrix([to_blocks(packed)], bias), x.to(dtype), dequantise(packed), bias


def bound(x, w, path, bits):
    """Each input taken as its group's largest: the vnni path's integers are at most half a step away from x, of which
    that has 2039 (4 bits) or 16256 (8 bits), and an fp32 sum errs by 2^-24 of its terms for each addition, of which
    there are 32 in a group and then one a group. A term is code * scale or a minimum, which cancel: they are up to 16
    times as large as the weight."""
    largest = x.double().unflatten(1, (-1, GROUP)).abs().amax(-1).repeat_interleave(GROUP, 1)
    steps = (0.5 / {4: 2039, 8: 16256}[bits] if path == VNNI else 0) + 16 * 2**-24 * (GROUP + w.shape[1] // GROUP)
    return steps * (largest @ w.double().abs().T)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_dequantised_matrix(shape, bits, dtype, path):
    for tokens in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 33):
        matrix, x, w, _ = case(*shape, tokens, bits, dtype)
        y = matrix(x, torch.float32, path)
        assert y.shape == (tokens, shape[0]) and y.dtype is torch.float32
        assert ((y.double() - x.double() @ w.double().T).abs() <= bound(x, w, path, bits)).all(), tokens


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(bits, path):
    """Bit for bit: what makes a batch's tokens equal to those of each request alone."""
    matrix, x, _, _ = case(200, 192, 37, bits, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([matrix(row[None], torch.float32, path) for row in x])
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(matrix(x, torch.float32, path), alone)
            assert torch.equal(matrix(x[5:18], torch.float32, path), alone[5:18])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [4, 8])
def test_bf16_results_are_the_fp32_ones_rounded(bits, path):
    matrix, x, _, bias = case(50, 64, 6, bits, torch.bfloat16, bias=True)
    exact = matrix(x, torch.float32, path)
    assert torch.equal(matrix(x, path=path), exact.bfloat16())
    plain = PackedMatrix([to_blocks(quantise(torch.zeros(50, 64), bits))], bias)
    assert torch.equal(plain(x, torch.float32, path), bias.expand(6, 50))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_stays_none(bad, path):
    """A broken activation must not come out as an ordinary number: the sampler reports it."""
    matrix, x, _, _ = case(40, 64, 3, 4, torch.bfloat16)
    x[1, 33] = bad
    y = matrix(x, torch.float32, path)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dense_copy_is_the_dequantised_matrix_rounded(shape, bits):
    matrix, _, w, _ = case(*shape, 1, bits, torch.bfloat16)
    assert torch.equal(matrix.dense(), w.bfloat16())


def test_zeros_give_zeros():
    matrix, _, _, _ = case(40, 64, 3, 8, torch.bfloat16)
    assert not matrix(torch.zeros(3, 64).bfloat16()).any()


def test_strided_rows_are_read_as_rows():
    matrix, x, _, _ = case(40, 64, 3, 4, torch.bfloat16)
    assert torch.equal(matrix(torch.cat((x, x), 1)[:, :64]), matrix(x))


@pytest.mark.parametrize("path", PATHS)
def test_the_model_of_a_half_is_right_for_every_half(path):
    """All scales that fp16 has, subnormal ones too, by the portable path's own conversion and by the CPU's."""
    scales = torch.arange(-0x7C00 + 1, 0x7C00, dtype=torch.int32).to(torch.int16)
    scales = torch.cat((scales[scales > 0], scales[scales > 0] | -0x8000)).view(torch.float16)[:, None]
    matrix = PackedMatrix([to_blocks(Packed(torch.ones(len(scales), 32, dtype=torch.int8), scales, None))])
    x = torch.zeros(1, 32).bfloat16()
    x[0, 0] = 1
    expected = scales.float().T
    torch.testing.assert_close(matrix(x, torch.float32, path), expected, rtol=2**-20, atol=0)


@pytest.mark.parametrize("counts", [(16, 32), (5, 20, 1), (1, 15, 17)], ids=str)
@pytest.mark.parametrize("kinds", [("Q8_0",), ("Q4_0", "Q4_1")], ids=str)
def test_parts_one_above_the_other_are_one_matrix(kinds, counts):
    """Wherever they meet: within the outputs that the layout keeps together, too."""
    rng, dtype = torch.Generator().manual_seed(0), torch.float16
    parts = []
    for kind, count in zip(itertools.cycle(kinds), counts, strict=False):
        rows = torch.randint(256, (count, 3, SIZES[kind][1]), dtype=torch.uint8, generator=rng)
        num_halves = 2 if kind == "Q4_1" else 1
        halves = torch.randn(count, 3, num_halves, generator=rng).to(dtype)
        rows[..., : 2 * num_halves] = halves.view(torch.uint8).view(count, 3, -1)
        parts.append(Blocks(kind, rows.flatten(1)))
    matrix = PackedMatrix(parts)
    assert matrix.is_finite and (matrix.n_out, matrix.n_in) == (sum(counts), 96)
    assert torch.equal(matrix.dense(), dequantise(from_blocks(parts)).bfloat16())
    if len(kinds) == 1:
        whole = PackedMatrix([Blocks(kinds[0], torch.cat([part.rows for part in parts]))])
        assert torch.equal(matrix.data, whole.data)


def test_every_scale_of_q4_0_has_minus_eight_times_it_as_its_minimum_and_says_where_fp16_does_not_hold_that():
    scales = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16)  # all that there are, infinite ones too
    rows = torch.zeros(len(scales), SIZES["Q4_0"][1], dtype=torch.uint8)
    rows[:, :2] = scales[:, None].view(torch.uint8)
    minima = (scales.view(torch.float16) * -8).view(torch.int16)
    found = PackedMatrix([Blocks("Q4_0", rows)]).data.view(len(rows) // 16, -1)[:, -32:].contiguous().view(torch.int16)
    is_nan = scales.view(torch.float16).isnan()
    assert torch.equal(found.flatten()[~is_nan], minima[~is_nan])
    assert found.flatten()[is_nan].contiguous().view(torch.float16).isnan().all()
    held = scales.view(torch.float16).abs() < 8192
    assert PackedMatrix([Blocks("Q4_0", rows[held])]).is_finite
    assert not any(PackedMatrix([Blocks("Q4_0", row[None].contiguous())]).is_finite for row in rows[~held][::97])
    assert PackedMatrix([Blocks("Q8_0", torch.zeros(3, 34, dtype=torch.uint8))]).is_finite, "they have no minima"


def test_what_does_not_fit_is_refused():
    rows = torch.zeros(4, 68, dtype=torch.uint8)
    for wrong in (rows.view(torch.int8), rows[:, :50].contiguous(), rows[:, :34], rows.to("meta")):
        with pytest.raises(AssertionError):
            PackedMatrix([Blocks("Q8_0", wrong)])
    with pytest.raises(ValueError, match="too many values"):  # of two widths
        PackedMatrix([Blocks("Q8_0", rows), Blocks("Q4_1", torch.zeros(4, 40, dtype=torch.uint8))])
    with pytest.raises(AssertionError):
        PackedMatrix([Blocks("Q8_0", rows)])(torch.zeros(2, 32))


def test_the_library_is_built_for_this_cpu():
    """The loader falls back to the baseline where the CPU's own target does not compile, which is ten times as slow."""
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX-512 VNNI here")
    assert linear.best_path() == VNNI
