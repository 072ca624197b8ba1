"""Rule: RMSNorm is x / rms(x) * weight; QK-norm is that on each head with its own weight."""

from __future__ import annotations

import torch

from minivllm.layers.norm import QKNorm, RMSNorm


def textbook(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def test_rms_norm_is_the_textbook_formula():
    norm, x = RMSNorm(16, 1e-5, torch.float32), torch.randn(3, 16)
    norm.weight.data.uniform_(0.5, 1.5)
    torch.testing.assert_close(norm(x), textbook(x, norm.weight, 1e-5))


def test_a_bf16_input_is_squared_in_fp32():
    norm, x = RMSNorm(4096, 1e-5, torch.bfloat16), torch.randn(2, 4096).bfloat16()
    norm.weight.data.fill_(1.0)
    # One rounding of the result: 2^-8. Squares added up in bf16 would stall near 256 terms and be off by half.
    torch.testing.assert_close(norm(x).float(), textbook(x.float(), 1.0, 1e-5), rtol=2**-8, atol=2**-8)


def test_qk_norm_gives_each_head_the_weight_of_its_kind():
    norm, qk = QKNorm(3, 2, 8, 1e-6, torch.float32), torch.randn(4, 5, 8)
    norm.weight.data.uniform_(0.5, 1.5)
    norm.finish()
    y = norm(qk)
    torch.testing.assert_close(y[:, :3], textbook(qk[:, :3], norm.weight[0], 1e-6))
    torch.testing.assert_close(y[:, 3:], textbook(qk[:, 3:], norm.weight[1], 1e-6))
