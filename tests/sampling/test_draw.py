"""The fast filters and draw against their slow reference, and against the distribution itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.sampling import reference
from minivllm.sampling.draw import BLOCK, apply_filters, draw, find_cut, find_cuts_by_sort, pad_to_blocks


def random_probs(seed: int, num_rows: int, vocab_size: int, spread: float, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    logits = logits.bfloat16().float() if ties else logits  # 8 bits of mantissa: many equal logits
    return torch.softmax(pad_to_blocks(logits), -1)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 5, 64, 1000, 20_000]),
    spread=st.sampled_from([0.0, 0.3, 1.0, 4.0, 30.0]),
    ties=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 50, 127, 128, 129, 700, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-3, 1e-12]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)
def test_filters_keep_what_the_full_sort_keeps(seed, vocab_size, spread, ties, top_k, top_p, min_p):
    probs = random_probs(seed, 3, vocab_size, spread, ties)
    k, p, m = (np.full(3, v, t) for v, t in ((top_k, np.int64), (top_p, float), (min_p, float)))
    fast = probs.clone()
    apply_filters(fast, k, p, m)
    by_sort = find_cuts_by_sort(probs, torch.from_numpy(k), torch.from_numpy(p), torch.from_numpy(m))
    for row, kept, cut in zip(probs.numpy(), fast.numpy(), by_sort.numpy(), strict=True):
        expected = row >= reference.find_cut(row, top_k, top_p, min_p)
        left = row[row >= reference.find_cut(row, top_k, 1.0, min_p)].sum(dtype=float)
        for got in (kept > 0, row >= cut):
            # All masses are float64 sums of at most 20,032 terms: they differ by 20,032 * 2**-53 = 2e-12 at most. Only
            # tokens that land that close to top_p may fall on either side. (Tokens of probability 0 never matter.)
            differing = row[(got != expected) & (row > 0)]
            assert not len(differing) or abs(row[row > differing.max()].sum(dtype=float) / left - top_p) < 1e-11


def test_filters_are_found_row_by_row_whatever_the_neighbours():
    probs = random_probs(1, 12, 20_000, 1.5, ties=True)
    k = np.array([0, 5, 40, 900, 0, 0, 0, 128, 129, 0, 3, 0])
    p = np.array([0.9, 1, 0.9, 0.95, 0.999, 1, 0.1, 0.9, 0.5, 1.0, 1, 0.99])
    m = np.array([0, 0, 0, 0, 0, 0.1, 0, 0, 1e-4, 0, 0.3, 1e-5])
    together, alone = probs.clone(), probs.clone()
    apply_filters(together, k, p, m)
    for i in range(12):
        apply_filters(alone[i : i + 1], k[i : i + 1], p[i : i + 1], m[i : i + 1])
    assert torch.equal(together, alone)
    assert torch.equal(together[9], probs[9])


@pytest.mark.parametrize("spread", [0.0, 0.5, 5.0])
def test_how_much_is_looked_at_first_does_not_matter(spread):
    for seed in range(5):
        row = random_probs(seed, 1, 5000, spread)[0].numpy()
        blocks = row.reshape(-1, BLOCK)
        for args in [(0, 0.9, 0.0), (300, 0.9, 0.0), (0, 0.99, 1e-3), (2000, 1.0, 0.01), (9999, 0.5, 0.0)]:
            expected = row >= reference.find_cut(row, *args)
            for num_head in (1, 7, 40, 1000):
                cut = find_cut(blocks, blocks.max(1), *args, num_head=num_head)
                assert ((row >= cut) == expected).all()


def test_filters_leave_a_row_of_nan_alone():
    probs = random_probs(0, 2, 1000, 1.0)
    probs[0, :] = float("nan")
    apply_filters(probs, np.array([5, 5]), np.array([0.9, 0.9]), np.array([0.1, 0.1]))
    assert torch.isnan(probs[0]).all() and (probs[1] > 0).sum() <= 5


def numbers(num: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Seeds and positions of `num` draws."""
    return np.arange(num, dtype=np.uint64) % np.uint64(200), start + np.arange(num) // 200


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 7, 64, 65, 3000]),
    spread=st.sampled_from([0.0, 1.0, 10.0, 200.0]),
    start=st.integers(0, 10**6),
)
def test_the_draw_is_the_slow_references_and_possible(seed, vocab_size, spread, start):
    probs = random_probs(seed, 6, vocab_size, spread)
    probs[:, : vocab_size // 3] = 1e-30
    probs[:, : vocab_size // 4] = 0
    seeds, positions = numbers(6, start)
    tokens, valid = draw(probs, seeds, positions)
    assert valid.all()
    for row, token, s, p in zip(probs.numpy(), tokens.tolist(), seeds, positions, strict=True):
        assert row[token] > 0
        # The reference sums blocks in float64: 4e-6 of one rate, decisive in as many draws of 1.
        assert token == reference.draw(row, int(s), int(p))


def test_rows_without_mass_are_reported_and_do_not_touch_others():
    probs = random_probs(0, 4, 128, 1.0)
    probs[1] = float("nan")
    probs[2] = 0
    seeds, positions = numbers(4)
    tokens, valid = draw(probs, seeds, positions)
    assert valid.tolist() == [True, False, False, True]
    assert tokens.tolist()[1:3] == [0, 0]
    assert tokens[3] == draw(probs[3:], seeds[3:], positions[3:])[0][0]


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_draws_follow_the_distribution(spread):
    vocab_size, num = 200, 100_000  # several blocks
    probs = random_probs(5, 1, vocab_size, spread)
    tokens, _ = draw(probs.expand(num, -1).contiguous(), *numbers(num))
    expected = probs[0, :vocab_size].double().numpy() * num
    chi2 = ((np.bincount(tokens, minlength=vocab_size) - expected) ** 2 / expected).sum()
    assert chi2 < 266  # chi-square with 199 degrees of freedom, 0.1 % tail; the draw is deterministic


def test_a_small_change_of_the_logits_rarely_changes_the_token():
    # Rates within +-1 % decide a race differently with probability 2 % at most per round (two exponential clocks).
    num = 2000
    logits = torch.randn(1, 6400, generator=torch.Generator().manual_seed(0)) * 3
    noise = torch.randn(num, 6400, generator=torch.Generator().manual_seed(1)) * 0.01
    before, _ = draw(torch.softmax(logits, -1).expand(num, -1).contiguous(), *numbers(num))
    after, _ = draw(torch.softmax(logits + noise, -1), *numbers(num))
    assert (before != after).float().mean() < 0.02
