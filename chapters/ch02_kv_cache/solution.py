"""The solution of chapter 2's exercise, and the cache that its script runs on."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """K and V of one layer and one request, in room that is taken once."""

    def __init__(self, capacity: int, num_kv_heads: int, head_size: int, dtype: torch.dtype = torch.float32):
        self.keys = torch.empty(capacity, num_kv_heads, head_size, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.length = 0  # tokens in the cache: the first `length` rows are theirs

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, kv_heads, head_size] of the next n tokens -> those of all tokens so far, in order."""
        end = self.length + len(k)
        if end > len(self.keys):
            raise ValueError(f"{end} tokens do not fit into a cache for {len(self.keys)}")
        self.keys[self.length : end] = k
        self.values[self.length : end] = v
        self.length = end
        return self.keys[:end], self.values[:end]
