"""Chapter 2: write the cache. Fill in `append`, then run the tests:

python -m minivllm chapter 2 --exercise
"""

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
        """k and v [n, kv_heads, head_size] of the next n tokens -> those of all tokens so far, in order.

        Nothing that is in the cache is copied or moved. Tokens that do not fit are a ValueError, and the cache stays
        as it was.
        """
        raise NotImplementedError("yours to write")
