"""LayerNorm, RMSNorm (Zhang and Sennrich 2019), and its use on the heads of q and k (Qwen3's QK-norm)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean of squares is taken in fp32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.shape = (size,)
        self.eps = eps

    @property
    def multiplier(self) -> Tensor:
        """[size] float32: what x / rms(x) is multiplied by."""
        return self.weight.data.float()

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class QKNorm(nn.Module):
    """RMSNorm of each head of q and of k in one call: q and k are neighbours in the packed product.

    weight [2, head_size] holds q's row and k's row as the checkpoint has them; `finish` repeats them a head.
    """

    rounds = True  # x / rms(x) to its dtype, before it is multiplied

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(2, head_size, dtype=dtype)
        self.rows = {"q": 0, "k": 1}
        self.repeats = (num_heads, num_kv_heads)
        self.shape = (head_size,)
        self.eps = eps

    def finish(self) -> None:
        repeats = torch.tensor(self.repeats, device=self.weight.device)
        # [heads + kv_heads, head_size]
        self.register_buffer("per_head", self.weight.data.repeat_interleave(repeats, dim=0), persistent=False)

    @property
    def multiplier(self) -> Tensor:
        """[heads + kv_heads, head_size] float32. Once it is finished."""
        return self.per_head.float()

    def forward(self, qk: Tensor) -> Tensor:
        """qk [T, heads + kv_heads, head_size] -> like qk."""
        return F.rms_norm(qk, self.shape, None, self.eps) * self.per_head


class WholeQKNorm(nn.Module):
    """RMSNorm of all of a token's q, and of all of its k (OLMo 2, OLMo Team 2025). Where ranks have some of the heads
    each, the squares are added over them.

    heads, kv_heads: how many are here. weight [heads + kv_heads, head_size], as the checkpoint has them one after the
    other; `rows` are of numbers, so it is kept flat until it is finished."""

    rounds = False  # x / rms(x) to its dtype, before it is multiplied

    def __init__(self, heads: int, kv_heads: int, head_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter((heads + kv_heads) * head_size, dtype=dtype)
        self.rows = {"q": slice(0, heads * head_size), "k": slice(heads * head_size, None)}
        self.heads, self.head_size, self.eps = heads, head_size, eps

    @property
    def multiplier(self) -> Tensor:
        """[heads + kv_heads, head_size] float32."""
        return self.weight.data.float().view(-1, self.head_size)

    def forward(self, qk: Tensor) -> Tensor:
        """qk [T, heads + kv_heads, head_size] -> like qk."""
        q, k = qk[:, : self.heads].flatten(1), qk[:, self.heads :].flatten(1)
        normed = torch.cat([self._normed(own, self.weight[self.rows[part]]) for part, own in (("q", q), ("k", k))], -1)
        return normed.view(qk.shape)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype)
        self.shape = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
