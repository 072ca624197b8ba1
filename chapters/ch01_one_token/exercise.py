"""Chapter 1: write the loop. Fill in `generate_naive`, then run the tests:

python -m minivllm chapter 1 --exercise
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

LogitsOf = Callable[[Sequence[int]], Tensor]  # n token ids -> [n, vocab]: what follows each


def generate_naive(
    logits_of: LogitsOf, prompt: Sequence[int], max_new: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """The next tokens after `prompt`, each the likeliest one: max_new, or fewer if one stops it.

    A token of stop_ids ends the loop and is the last of what is returned. The caller's prompt stays
    as it is.
    """
    raise NotImplementedError("yours to write")
