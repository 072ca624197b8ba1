"""Rule: a product with packed weights is the product with what their codes mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm.kernels.cpu import linear
from minivllm.kernels.cpu.linear import VNNI, PackedMatrix
from minivllm.quantization.formats import GROUP, dequantise, quantise

pytestmark = pytest.mark.skipif(linear.unsupported_reason() is not None, reason=str(linear.unsupported_reason()))
PATHS = range(1 + (linear.best_path() if linear.unsupported_reason() is None else 0))
SHAPES = [(16, 32), (17, 64), (100, 96), (1, 32), (64, 512)]  # [n_out, n_in]


def case(n_out, n_in, tokens, bits, dtype, bias=False):
    torch.manual_seed(n_out + tokens)
    packed = quantise(torch.randn(n_out, n_in), bits)
    bias = torch.randn(n_out) if bias else None
    x = torch.randn(tokens, n_in) * torch.logspace(-2, 2, tokens)[:, None] if tokens else torch.empty(0, n_in)
    return PackedMatrix(*packed, bias=bias), x.to(dtype), dequantise(packed), bias


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
    plain = PackedMatrix(*quantise(torch.zeros(50, 64), bits), bias=bias)
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
    matrix = PackedMatrix(torch.ones(len(scales), 32, dtype=torch.int8), scales, None)
    x = torch.zeros(1, 32).bfloat16()
    x[0, 0] = 1
    expected = scales.float().T
    torch.testing.assert_close(matrix(x, torch.float32, path), expected, rtol=2**-20, atol=0)


def test_what_does_not_fit_is_refused():
    codes, scales = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.float16)
    for wrong in ((codes.view(torch.uint8), scales), (codes[:, :32], scales), (codes, scales.float())):
        with pytest.raises(AssertionError):
            PackedMatrix(*wrong, None)
    with pytest.raises(AssertionError):
        PackedMatrix(codes, scales, None)(torch.zeros(2, 32))


def test_the_library_is_built_for_this_cpu():
    """The loader falls back to the baseline where the CPU's own target does not compile, which is ten times as slow."""
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX-512 VNNI here")
    assert linear.best_path() == VNNI
