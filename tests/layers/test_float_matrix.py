"""Rule: weights in the bits of their checkpoint give the float32 product, and a row of it depends on its row alone."""

from __future__ import annotations

import pytest
import torch

from minivllm.kernels.cpu import floats
from minivllm.kernels.cpu.floats import FloatMatrix, narrowest
from minivllm.layers.linear import Linear, NarrowCPU, PrepackedCPU, RowwiseCPU, choose_method

pytestmark = pytest.mark.skipif(floats.unsupported_reason() is not None, reason=str(floats.unsupported_reason()))
CPU = torch.device("cpu")
KINDS = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 2), (33, 34), (32, 64), (96, 700), (70, 1200)]  # [n_out, n_in]; a panel has 32 outputs, parts 128 or 256
TOKENS = (0, 1, 2, 5, 6, 7, 12, 13, 40, 250)  # six share a pass, more than twelve meet widened weights


def case(n_out, n_in, kind, bias=False):
    torch.manual_seed(n_out + n_in)
    weight = torch.randn(n_out, n_in).to(kind)
    return weight, torch.randn(n_out) if bias else None


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_float64(shape, kind):
    """An error of 2^-24 of its terms an addition; in 16 bits the result is rounded once more."""
    weight, bias = case(*shape, kind, bias=True)
    matrix, w = FloatMatrix(weight, bias), weight.double()
    for tokens in TOKENS:
        for dtype in KINDS:
            x = torch.randn(tokens, shape[1]).to(dtype)
            y, expected = matrix(x), x.double() @ w.T + bias.double()
            bound = (shape[1] + 1) * 2**-24 * (x.double().abs() @ w.abs().T + bias.abs()) + 1e-6
            bound += expected.abs() * torch.finfo(dtype).eps
            assert y.dtype is dtype and ((y.double() - expected).abs() <= bound).all(), (tokens, dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kind, threads):
    weight, _ = case(96, 1200, kind)
    matrix, x, before = FloatMatrix(weight), torch.randn(300, 1200), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = matrix(x)
        for size in (1, 2, 3, 4, 5, 6, 7, 13, 100):
            for start in range(0, 300, max(37, size)):
                assert torch.equal(matrix(x[start : start + size]), together[start : start + size]), (start, size)
    finally:
        torch.set_num_threads(before)


def test_other_orders_of_the_sum_have_other_bits():
    """Else the comparison above would compare nothing."""
    weight, _ = case(96, 1200, torch.float32)
    x = torch.randn(4, 1200)
    assert not torch.equal(FloatMatrix(weight)(x), FloatMatrix(weight.flip(1))(x.flip(1)))


def test_what_is_not_finite_stays_in_its_row():
    weight, _ = case(48, 64, torch.bfloat16)
    matrix, x = FloatMatrix(weight), torch.randn(40, 64)
    expected = matrix(x)
    x[3, 5], x[33, 0] = float("nan"), float("inf")
    y, others = matrix(x), [i for i in range(40) if i not in (3, 33)]
    assert not y[[3, 33]].isfinite().any() and torch.equal(y[others], expected[others])


def test_the_fewest_bits_that_hold_all_weights():
    weight = torch.randn(100, 64)
    assert narrowest(weight.bfloat16().float()) is torch.bfloat16
    assert narrowest(weight.half().float()) is torch.float16
    assert narrowest(weight) is torch.float32
    wide = weight.bfloat16().float()
    wide[99, 63] = 1 + 2**-20  # one is enough
    assert narrowest(wide) is torch.float32
    assert narrowest(weight.bfloat16()[:, :63]) is torch.float32  # pairs of inputs
    wide[99, 63] = float("nan")
    assert narrowest(wide) is torch.float32  # nothing equals it


@pytest.mark.parametrize(("method", "dtype"), [(NarrowCPU, torch.float32), *((RowwiseCPU, kind) for kind in KINDS)])
def test_a_layer_computes_what_it_did_before_it_was_packed(method, dtype):
    for checkpoint in KINDS:
        torch.manual_seed(0)
        layer = Linear(64, {"q": 40, "k": 16}, bias=True, dtype=dtype, method=method())
        layer.weight.data.copy_(torch.randn(56, 64).to(checkpoint))
        layer.bias.data.normal_()
        x = torch.randn(9, 64).to(dtype)
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        layer.finish()
        step = max(8 * torch.finfo(dtype).eps, 2**-18)  # 64 terms of about 1 in another order
        torch.testing.assert_close(layer(x), expected, rtol=step, atol=step)
        assert layer.weight is None  # one copy is kept


def test_sixteen_bits_are_kept_in_float32():
    assert type(choose_method(CPU, torch.float32).method) is NarrowCPU
    layer = Linear(64, {"": 40}, dtype=torch.float32, method=NarrowCPU())
    layer.weight.data.normal_()
    whole, layer.weight.data = layer.weight.data.clone(), layer.weight.data.bfloat16().float()
    layer.finish()
    assert layer.panels.dtype is torch.bfloat16 and layer.panels.data.nbytes == 2 * 64 * 64  # outputs: whole panels
    layer = Linear(64, {"": 40}, dtype=torch.float32, method=NarrowCPU())
    layer.weight.data.copy_(whole)
    layer.finish()
    assert type(layer.method) is PrepackedCPU and layer.packed is not None  # all of fp32 is oneDNN's
