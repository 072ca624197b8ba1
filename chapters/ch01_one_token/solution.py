"""The solution of chapter 1's exercise, and the loop that its script runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

LogitsOf = Callable[[Sequence[int]], Tensor]  # n token ids -> [n, vocab]: what follows each


def generate_naive(
    logits_of: LogitsOf, prompt: Sequence[int], max_new: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """The next tokens after `prompt`, each the likeliest one: max_new, or fewer if one stops it."""
    text, new = list(prompt), []
    for _ in range(max_new):
        token = int(logits_of(text)[-1].argmax())
        text.append(token)
        new.append(token)
        if token in stop_ids:
            break
    return new
