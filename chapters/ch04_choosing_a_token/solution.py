"""The solution of chapter 4's exercise."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_top_p(probs: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """probs [S, V] >= 0, top_p [S] in (0, 1], noise [S, V] exponential, above 0 -> tokens [S]."""
    ordered = probs.double().sort(-1, descending=True).values
    likelier = ordered.cumsum(-1) - ordered  # the mass before each
    kept = likelier < top_p[:, None] * ordered.sum(-1, keepdim=True)
    last = kept.sum(-1, keepdim=True) - 1
    cut = ordered.gather(1, last)
    left = torch.where(probs >= cut, probs, 0)
    return (noise / left).argmin(-1)
