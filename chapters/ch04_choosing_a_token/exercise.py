"""Chapter 4: pick tokens for a whole batch. Fill in `sample_top_p`, then run the tests:

python -m minivllm chapter 4 --exercise
"""

from __future__ import annotations

from torch import Tensor


def sample_top_p(probs: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """probs [S, V] >= 0, top_p [S] in (0, 1], noise [S, V] exponential, above 0 -> tokens [S].

    In each row a token is kept if the tokens that are strictly likelier have less than top_p of the
    row's mass together; tokens as likely as the last one kept stay too. Of those kept, the one with
    the least noise / probability is taken. Rows need not sum to 1. No loop over rows.
    """
    raise NotImplementedError("yours to write")
