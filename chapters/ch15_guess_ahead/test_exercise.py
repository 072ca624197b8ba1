"""The tests of chapter 15's exercise. Their random numbers are functions of fixed seeds: a run repeats to the digit."""

from __future__ import annotations

import numpy as np
from exercise import race, verify

from minivllm.sampling.uniform import exponential, uniform

# A model of four words that looks at one: row w says what follows w. Some pairs of words never occur.
MODEL = np.array([[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1], [0.0, 0.05, 0.15, 0.8]])
GUESSERS = {
    "close": np.array([[0.2, 0.5, 0.2, 0.1], [0.3, 0.2, 0.2, 0.3], [0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]]),
    "far": np.array([[0.1, 0.1, 0.1, 0.7], [0.85, 0.05, 0.05, 0.05], [0.1, 0.3, 0.3, 0.3], [0.4, 0.3, 0.2, 0.1]]),
    "sure": np.eye(4)[[1, 0, 3, 3]],
    "the model itself": MODEL,
}
WORDS, NUM_GUESSES, NUM_RUNS = 4, 2, 4000
# Pearson's chi-square at 15 degrees of freedom is above this once in a million.
TOO_MUCH = 56.5
ONES = np.ones((3, WORDS))


def runs(guesser: np.ndarray, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Texts of so many words that begin after word 0, [runs, num_words]; and the first guess of each run."""
    seeds, texts, first = np.arange(NUM_RUNS, dtype=np.uint64), [[0] for _ in range(NUM_RUNS)], []
    for step in range(num_words):
        at = seeds, np.full(NUM_RUNS, step)
        coins = uniform(*at, np.arange(NUM_GUESSES), stream=11)
        guessing = exponential(*at, np.arange(NUM_GUESSES * WORDS), stream=12).reshape(NUM_RUNS, NUM_GUESSES, WORDS)
        noise = exponential(*at, np.arange((NUM_GUESSES + 1) * WORDS), stream=13).reshape(NUM_RUNS, -1, WORDS)
        for i, text in enumerate(texts):
            seen = [text[-1]]
            for place in range(NUM_GUESSES):
                seen.append(race(guessing[i, place], guesser[seen[-1]]))
            text += verify(seen[1:], guesser[seen[:-1]], MODEL[seen], coins[i], noise[i])
            if step == 0:
                first.append(seen[1])
    return np.array([text[1 : num_words + 1] for text in texts]), np.array(first)


def test_a_guess_is_accepted_as_far_as_the_model_likes_it():
    q, p = np.array([[0.5, 0.5, 0.0, 0.0]]), np.array([[0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    for guess, coin, accepted in ((0, 0.99, True), (1, 0.79, True), (1, 0.81, False)):
        out = verify([guess], q, p, np.array([coin]), ONES)
        assert out == ([guess, 3] if accepted else [0]), (guess, coin)


def test_a_refused_guess_is_replaced_by_what_the_guesser_has_too_little_of():
    q, p = np.array([[0.7, 0.1, 0.1, 0.1]]), np.array([[0.3, 0.3, 0.2, 0.2], [np.nan] * 4])
    assert verify([0], q, p, np.array([0.5]), ONES) == [1]
    assert verify([0], q, p, np.array([0.5]), np.array([[0.01, 1.0, 0.4, 1.0], *ONES[1:]])) == [2]


def test_behind_a_refusal_everything_is_void():
    q = np.array([[0.25] * 4, [0.0, 0.0, 1.0, 0.0], [0.25] * 4])
    p = np.array([[0.25] * 4, [0.2, 0.5, 0.2, 0.1], [np.nan] * 4, [np.nan] * 4])
    assert verify([3, 2, 0], q, p, np.array([0.9, 0.9, 0.1]), np.ones((4, WORDS))) == [3, 1]


def test_there_is_always_one_token_more():
    assert verify([], np.empty((0, WORDS)), MODEL[[3]], np.empty(0), ONES) == [3]
    q, p, coins = MODEL[[3, 2]], MODEL[[3, 2, 0]], np.array([0.9, 0.9])
    assert verify([3, 0], q, p, coins, ONES) == [3, 0, 1]
    assert verify([3, 0], q, p, coins, np.array([*ONES[:2], [1.0, 1.0, 0.1, 1.0]])) == [3, 0, 2]


def test_texts_are_what_the_model_would_write_whoever_guesses():
    """Each pair of words as often as without guesses: the sum of (seen - expected)^2 / expected is not too large."""
    expected = NUM_RUNS * MODEL[0][:, None] * MODEL
    for name, guesser in GUESSERS.items():
        texts, _ = runs(guesser, 2)
        seen = np.zeros((WORDS, WORDS))
        np.add.at(seen, (texts[:, 0], texts[:, 1]), 1)
        assert not seen[expected == 0].any(), name
        some = expected > 0
        assert ((seen - expected)[some] ** 2 / expected[some]).sum() < TOO_MUCH, name


def test_as_many_guesses_are_accepted_as_can_be():
    """A word can be accepted as often as both say it: the sum of the smaller probabilities. Within five deviations."""
    for name, guesser in GUESSERS.items():
        texts, first = runs(guesser, 1)
        possible = np.minimum(MODEL[0], guesser[0]).sum()
        deviation = np.sqrt(max(possible * (1 - possible), 1e-12) / NUM_RUNS)
        assert abs((texts[:, 0] == first).mean() - possible) <= 5 * deviation + 1e-9, name
