"""Who chooses tokens of probabilities, as types: what a sampler is given, and what speculation puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

Drawn = tuple[Tensor, Tensor]  # tokens [S] int64, valid [S] bool

# (probs [C, V] after all filters, seeds [C], positions [C], which logits rows of the call [C]) -> tokens, valid [C]
Pick = Callable[[Tensor, np.ndarray, np.ndarray, np.ndarray], Drawn]


class Draws(NamedTuple):
    """probs [S, V] fp32 >= 0 that need not sum to 1, V a multiple of 64; all else as in draw.py and rejection.py."""

    filter: Callable[[Tensor, np.ndarray, np.ndarray, np.ndarray], None]  # probs, top_k, top_p, min_p: in place
    draw: Callable[[Tensor, np.ndarray, np.ndarray], Drawn]  # probs, seeds, positions
    # probs, drafts, the distribution of each draft or None where it is sure, seeds, positions
    reject: Callable[[Tensor, np.ndarray, Sequence[Tensor | None], np.ndarray, np.ndarray], Drawn]
    num_rows: int  # at a time: bounds the scratch memory
