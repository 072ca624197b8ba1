"""Chapter 7: write the inner loop of paged attention. Fill in `attend`, then run the tests:

python -m minivllm chapter 7 --exercise
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def attend(
    q: Tensor,
    read: Callable[[int], tuple[Tensor, Tensor]],
    table: list[int],
    length: int,
    scale: float,
) -> Tensor:
    """One query [D] of one head over a past of `length` tokens: the mean of the values, weighted
    by the softmax of scale * (query . key).

    `read(block)` gives a block's keys and values, each [block_size, D]. Read each block that is
    needed once, and keep none of them. What lies behind the last token may be anything, NaN too.
    Scores may be large.
    """
    raise NotImplementedError("yours to write")
