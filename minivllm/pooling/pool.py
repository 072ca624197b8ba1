"""From a text's hidden states to its vector, or its classes. Sums in float32, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mean(hidden: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0)


def last(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[lengths.cumsum(0) - 1].float()


def first(hidden: Tensor, lengths: Tensor) -> Tensor:
    return hidden[lengths.cumsum(0) - lengths].float()


# hidden [T, hidden] of texts back to back, lengths [B] int64, each at least 1 -> [B, hidden] fp32
POOLERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "last": last, "cls": first}


def normalize(vectors: Tensor) -> Tensor:
    """To unit length, as sentence-transformers does: a vector of zeros stays one."""
    return F.normalize(vectors, dim=-1)


# Of a classification head's logits [B, labels].
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "identity": nn.Identity(),
}


def cut(vector: np.ndarray, dimensions: int | None, normalized: bool) -> np.ndarray:
    """The first `dimensions` numbers (Matryoshka representation learning, Kusupati et al. 2022), at unit length again
    if the whole vector was. None, or all of them: the vector as it is."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    short = vector[:dimensions]
    return short / max(float(np.linalg.norm(short)), 1e-12) if normalized else short


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """In [-1, 1]; 0 if either is all zeros."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
