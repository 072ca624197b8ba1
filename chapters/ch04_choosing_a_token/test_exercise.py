"""The tests of chapter 4's exercise: what is kept by the engine's slow reference, what is drawn by a chi-square."""

from __future__ import annotations

import torch
from exercise import sample_top_p
from torch import Tensor

from minivllm.sampling.reference import find_cut

PROBS = torch.tensor([0.02, 0.30, 0.05, 0.25, 0.15, 0.08, 0.11, 0.04])


def kept(row: Tensor, top_p: float) -> set[int]:
    """Which tokens can win: each in turn is given almost no noise, and all the others much."""
    n = len(row)
    noise = torch.full((n, n), 1e6).fill_diagonal_(1e-6)
    winners = sample_top_p(row.repeat(n, 1), torch.full((n,), top_p), noise)
    return {token for token, winner in enumerate(winners.tolist()) if winner == token}


def test_the_token_that_crosses_the_line_is_the_last_one_kept():
    assert kept(PROBS, 0.5) == {1, 3}
    assert kept(PROBS, 0.6) == {1, 3, 4}
    assert kept(PROBS, 1e-9) == {1}
    assert kept(PROBS, 1.0) == set(range(8))


def test_what_is_kept_is_what_the_slow_reference_keeps():
    generator = torch.Generator().manual_seed(0)
    for top_p in (0.1, 0.5, 0.9, 0.99):
        row = torch.randn(40, generator=generator).mul(2).softmax(-1)
        cut = find_cut(row.double().numpy(), 0, top_p, 0.0)
        assert kept(row, top_p) == {i for i, p in enumerate(row.tolist()) if p >= cut}


def test_tokens_that_are_equally_likely_stay_together():
    assert kept(torch.tensor([0.4, 0.2, 0.2, 0.2]), 0.5) == {0, 1, 2, 3}


def test_rows_have_their_own_top_p_and_need_not_sum_to_one():
    probs = torch.stack([PROBS, 7 * PROBS, 0.1 * PROBS])
    noise = torch.full_like(probs, 1e6)
    noise[:, 4] = 1e-6  # token 4 wins wherever it is kept
    tokens = sample_top_p(probs, torch.tensor([0.5, 0.6, 0.5]), noise).tolist()
    assert tokens[1] == 4, "a top_p of 0.6 keeps token 4, in a row that sums to 7 too"
    assert tokens[0] != 4, "a top_p of 0.5 does not keep token 4"
    assert tokens[2] != 4, "a top_p of 0.5 does not keep token 4, in a row that sums to 0.1 either"


def test_tokens_come_as_often_as_they_should():
    """Pearson's chi-square: the sum of (seen - expected)^2 / expected, which is about 4 here if all is right."""
    num = 6000
    noise = torch.empty(num, len(PROBS)).exponential_(generator=torch.Generator().manual_seed(1)).clamp_min(1e-12)
    tokens = sample_top_p(PROBS.repeat(num, 1), torch.full((num,), 0.85), noise)
    likely = torch.where(PROBS >= 0.08, PROBS, 0)  # those before the last of these have 0.81 of the mass
    expected = num * likely / likely.sum()
    seen = torch.bincount(tokens, minlength=len(PROBS))
    assert seen[expected == 0].sum() == 0, "tokens were drawn that had been cut off"
    some = expected > 0
    chi_square = ((seen - expected)[some] ** 2 / expected[some]).sum()
    # Above 25 by chance once in twenty thousand runs.
    assert chi_square < 25, f"seen {seen.tolist()}, expected {expected.round().int().tolist()}"
