"""Context parallelism in decoding: a request's K and V are spread over ranks, each attends to its own, and the partial
results are merged.

Token i is kept by rank i mod n, so that a growing context stays even (as in vLLM's decode context parallelism with an
interleave of 1). Softmax over all keys is a mean of the softmaxes over parts of them, weighted by the sums of their
exponentials: with the logarithm of that sum beside each part (FlashAttention's and ring attention's LSE) nothing is
computed twice, and the merge is exact but for rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.parallel.group import Group


def is_kept_here(positions: Tensor, group: Group) -> Tensor:
    """positions [T] int64 -> [T] bool: whose K and V this rank keeps."""
    return positions % group.size == group.rank


def num_kept_here(length: int, group: Group) -> int:
    """Of the first `length` tokens of a request."""
    return (length - group.rank + group.size - 1) // group.size


def merge(parts: Tensor, lse: Tensor) -> Tensor:
    """parts [n, T, heads, head_size]: what attention over each part of the keys gives; lse [n, T, heads]: the logarithm
    of its sum of exponentials, -inf for a part without keys (whose result is then not read). -> [T, heads, head_size].

    In float32; at least one part has keys."""
    shares = lse.float().softmax(0).unsqueeze(-1)  # [n, T, heads, 1]
    return torch.where(shares > 0, parts.float() * shares, 0).sum(0).to(parts.dtype)


def merge_over(group: Group, own: Tensor, lse: Tensor) -> Tensor:
    """This rank's part, [T, heads, head_size] and [T, heads] -> the result over all keys, on every rank."""
    return merge(group.all_gather(own[None]), group.all_gather(lse[None]))
