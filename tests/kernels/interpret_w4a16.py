"""Products with 4-bit weights in the interpreter against the dense product of what the codes mean. Run by
test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from tolerances import PRODUCT

from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.w4a16 import Matrix
from minivllm.quantization.formats import dequantise, quantise

assert INTERPRETED
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RESULT = {torch.bfloat16: torch.float32}  # the interpreter truncates to bfloat16 where a GPU rounds


def compare(num_tokens: int, n_in: int, n_out: int, dtype: torch.dtype, use_bias: bool, **launch: int) -> None:
    generator = torch.Generator().manual_seed(n_in + n_out)
    packed = quantise(torch.randn(n_out, n_in, generator=generator) / n_in**0.5 + 0.02, 4)
    bias = torch.randn(n_out, generator=generator).to(dtype) if use_bias else None
    wide = torch.randn(num_tokens, n_in + 16, generator=generator).to(dtype)
    x = wide[:, :n_in]  # rows apart in memory
    out = torch.full((num_tokens, n_out), torch.nan, dtype=RESULT.get(dtype, dtype))
    wanted = x.double() @ dequantise(packed).double().T
    wanted = wanted if bias is None else wanted + bias.double()
    got = Matrix(packed, bias).multiply(x, out, **launch)
    assert got is out
    torch.testing.assert_close(got.double(), wanted, **PRODUCT[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, n_in, n_out", [(1, 32, 5), (3, 96, 200), (17, 64, 130)])
def test_products_equal_the_dense_ones(dtype, num_tokens, n_in, n_out):
    compare(num_tokens, n_in, n_out, dtype, use_bias=True)


@pytest.mark.parametrize("num_sms", [2, 3, 100])
@pytest.mark.parametrize("use_bias", [False, True])
def test_several_programs_share_the_groups(num_sms, use_bias):
    """In unequal shares; some have none."""
    compare(2, 160, 200, torch.float16, use_bias, num_sms=num_sms)


def test_many_rows_in_small_tiles():
    compare(35, 64, 130, torch.float32, False, block_m=16)
