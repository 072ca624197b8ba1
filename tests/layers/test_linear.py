"""Rule: how a weight is stored may change speed and rounding, never the result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minivllm.layers.embedding import Embedding, TiedLMHead
from minivllm.layers.linear import Linear, PrepackedCPU, Unquantized, _onednn_packs, choose_method, row_ranges

CPU = torch.device("cpu")


def filled(dtype, method, bias=True) -> Linear:
    torch.manual_seed(0)
    layer = Linear(24, {"q": 16, "k": 8}, bias=bias, dtype=dtype, method=method)
    layer.weight.data.normal_()
    if bias:
        layer.bias.data.normal_()
    return layer


def test_parts_are_rows_in_their_order():
    assert row_ranges({"q": 4, "k": 2, "v": 2}) == {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}


def test_a_packed_product_is_the_products_of_its_parts():
    layer, x = filled(torch.float32, Unquantized()), torch.randn(3, 24)
    y = layer(x)
    for rows in layer.rows.values():
        torch.testing.assert_close(y[:, rows], x @ layer.weight[rows].T + layer.bias[rows])


# Both sum in fp32, in another order, and round once: one step of the dtype apart, and 24 terms of about 1 before it.
STEP = {torch.bfloat16: 2**-8, torch.float32: 2**-18}


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_prepacked_equals_dense(num_tokens, bias, dtype):
    if not _onednn_packs(dtype):
        pytest.skip("nothing to pack with")
    dense, packed = filled(dtype, Unquantized(), bias), filled(dtype, PrepackedCPU(), bias)
    packed.finish()
    assert packed.weight is None  # one copy is kept
    x = torch.randn(num_tokens, 48).to(dtype)[:, :24]  # strided rows, as a slice of a packed product has
    torch.testing.assert_close(packed(x), dense(x), rtol=STEP[dtype], atol=STEP[dtype])


def test_a_tied_head_keeps_the_embedding_for_look_ups():
    embedding = Embedding(32, 24, torch.bfloat16)
    embedding.weight.data.normal_()
    head = TiedLMHead(embedding, choose_method(CPU, torch.bfloat16).method)
    head.finish()
    hidden = torch.randn(2, 24).bfloat16()
    expected = nn.functional.linear(hidden, embedding.weight).float()
    torch.testing.assert_close(head(hidden), expected, rtol=2**-8, atol=2**-8)
    assert torch.equal(embedding(torch.tensor([3])), embedding.weight[[3]])


def test_the_choice_has_a_reason():
    for device in (CPU, torch.device("cuda")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert choose_method(device, dtype).reason
    assert isinstance(choose_method(torch.device("cuda"), torch.bfloat16).method, Unquantized)
