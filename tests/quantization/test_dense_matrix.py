"""Rule: a product with tiles, on whichever unit, is the product, and a row of it depends on its row alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minivllm.kernels.cpu import dense
from minivllm.kernels.cpu.dense import DenseMatrix
from minivllm.layers.linear import Linear, PrepackedCPU, TiledCPU, choose_method

pytestmark = pytest.mark.skipif(dense.unsupported_reason() is not None, reason=str(dense.unsupported_reason()))
SHAPES = [(1, 32), (17, 64), (32, 32), (96, 160), (576, 1536)]  # [n_out, n_in]
PAIRS = [(2, 32), (34, 64), (200, 96), (3072, 576)]  # of two halves
TOKENS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 100, 257, 600)


def case(n_out, n_in, tokens, halves, bias=False):
    torch.manual_seed(n_out + tokens)
    weight, bias = torch.randn(n_out, n_in).bfloat16(), torch.randn(n_out).bfloat16() if bias else None
    return DenseMatrix(weight, bias, halves), weight.double(), bias, torch.randn(tokens, n_in).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "halves"), [*((shape, False) for shape in SHAPES), *((shape, True) for shape in PAIRS)], ids=str
)
def test_the_product_is_that_of_float64(shape, halves, bias):
    """Products of bf16 are exact in fp32; their sum errs by 2^-24 of its terms an addition, and is rounded once."""
    for tokens in TOKENS:
        matrix, w, b, x = case(*shape, tokens, halves, bias)
        y, x = matrix(x), x.double()
        expected = x @ w.T + (0 if b is None else b.double())
        bound = shape[1] * 2**-24 * (x.abs() @ w.abs().T) + 2**-8 * expected.abs() + 1e-6
        assert y.shape == (tokens, shape[0]) and y.dtype is torch.bfloat16
        assert ((y.double() - expected).abs() <= bound).all(), tokens


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(num_threads):
    """Bit for bit: what makes a batch's tokens equal to those of each request alone."""
    matrix, _, _, x = case(200, 192, 300, False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        together = matrix(x)
        for first, last in ((0, 1), (5, 6), (7, 40), (40, 57), (57, 300)):
            assert torch.equal(matrix(x[first:last]), together[first:last]), (first, last)
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_finite_stays_in_its_row():
    matrix, _, _, x = case(48, 64, 40, False)
    expected = matrix(x)
    x[3, 5], x[33, 0] = float("nan"), float("inf")
    y, others = matrix(x), [i for i in range(40) if i not in (3, 33)]
    assert not y[[3, 33]].isfinite().any() and torch.equal(y[others], expected[others])


def linear(n_in: int, parts: dict[str, int]) -> Linear:
    torch.manual_seed(0)
    layer = Linear(n_in, parts, dtype=torch.bfloat16, method=choose_method(torch.device("cpu"), torch.bfloat16).method)
    layer.weight.data.normal_()
    return layer


def test_a_layer_takes_tiles_where_they_fit_and_onednn_where_not():
    for n_in, fits in ((64, True), (24, False)):
        layer, x = linear(n_in, {"": 40}), torch.randn(5, 128)[:, :n_in].bfloat16()
        expected = nn.functional.linear(x, layer.weight)
        layer.finish()
        assert type(layer.method) is TiledCPU and issubclass(TiledCPU, PrepackedCPU)
        assert (layer.tiles is not None) is fits and layer.weight is None
        torch.testing.assert_close(layer(x), expected, rtol=2**-7, atol=2**-7)


def test_two_parts_of_one_size_are_computed_side_by_side():
    for parts, halves in (({"gate": 48, "up": 48}, True), ({"q": 48, "k": 16, "v": 16}, False), ({"": 48}, False)):
        layer, x = linear(64, parts), torch.randn(40, 64).bfloat16()
        expected = nn.functional.linear(x, layer.weight)
        layer.finish()
        assert layer.tiles.halves is halves
        torch.testing.assert_close(layer(x), expected, rtol=2**-7, atol=2**-7)
