"""The rules of beam search, over log-probabilities that a test writes down: which beams go on, which end, and when."""

from __future__ import annotations

import itertools
import random

import pytest

from minivllm.request import BeamSearchParams
from minivllm.scheduler.beam_search import BeamSearch

A, B, C, D, EOS, OTHER_EOS = range(6)


def search(width: int, max_tokens: int = 9, **params) -> BeamSearch:
    return BeamSearch(BeamSearchParams(beam_width=width, max_tokens=max_tokens, **params), (EOS, OTHER_EOS), max_tokens)


def report(logprobs: dict[int, float]) -> list[tuple[int, float, int]]:
    """Of one beam, as a sampler says it: the likeliest token comes twice."""
    ranked = sorted(logprobs.items(), key=lambda each: -each[1])
    top = [(token, logprob, rank) for rank, (token, logprob) in enumerate(ranked, 1)]
    return [top[0], *top]


def running(beams: BeamSearch) -> list[tuple[int, ...]]:
    return [beam.token_ids for beam in beams.running]


def finished(beams: BeamSearch) -> list[tuple[tuple[int, ...], str]]:
    return [(each.beam.token_ids, each.finish_reason) for each in beams.finished]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_search_as_wide_as_the_tree_finds_all_completions_the_best_first(length_penalty, seed):
    draw, logprob = random.Random(seed), {}
    for prefix in [(), (A,), (B,)]:
        logprob |= {(*prefix, token): -draw.random() - 0.1 for token in (A, B, EOS)}
    beams = search(10, max_tokens=2, length_penalty=length_penalty)
    while not beams.done:
        beams.advance(
            [[(t, logprob[(*beam.token_ids, t)], t + 1) for t in (A, A, B, EOS)] for beam in list(beams.running)]
        )
    scores = {(EOS,): logprob[EOS,]}
    for first, second in itertools.product((A, B), (A, B, EOS)):
        scores[first, second] = (logprob[first,] + logprob[first, second]) / 2**length_penalty
    wanted = sorted(scores, key=scores.__getitem__, reverse=True)
    assert finished(beams) == [(tokens, "stop" if tokens[-1] == EOS else "length") for tokens in wanted]
    for each in beams.finished:
        tokens = each.beam.token_ids
        assert each.score == pytest.approx(scores[tokens])
        assert each.beam.logprobs == tuple((logprob[tokens[: i + 1]], t + 1) for i, t in enumerate(tokens))


def test_the_best_continuations_go_on_whichever_beam_they_continue():
    beams = search(2)
    beams.advance([report({A: -1.0, B: -1.5, C: -2.0})])
    assert running(beams) == [(A,), (B,)]
    beams.advance([report({C: -2.0, D: -2.5}), report({C: -0.1, D: -0.2})])
    assert [(beam.token_ids, beam.parent) for beam in beams.running] == [((B, C), 1), ((B, D), 1)]
    assert [beam.logprob for beam in beams.running] == [-1.6, -1.7]


@pytest.mark.parametrize(
    "logprobs, found, left",
    [
        ({EOS: -1.0, A: -1.1, B: -1.2}, [(EOS,)], [(A,), (B,)]),
        ({A: -1.0, EOS: -1.1, B: -1.2}, [(EOS,)], [(A,), (B,)]),
        ({A: -1.0, B: -1.1, EOS: -1.2}, [], [(A,), (B,)]),
        ({EOS: -1.0, A: -1.1, OTHER_EOS: -1.2, B: -1.3, C: -1.4}, [(EOS,)], [(A,), (B,)]),
    ],
)
def test_an_end_counts_among_the_best_of_the_width_and_takes_no_beams_place(logprobs, found, left):
    beams = search(2, length_penalty=-1.0)
    beams.advance([report(logprobs)])
    assert (finished(beams), running(beams)) == ([(tokens, "stop") for tokens in found], left)


def test_of_all_continuations_twice_the_width_are_looked_at():
    beams = search(2)
    beams.eos_token_ids = (B, EOS, OTHER_EOS)
    beams.advance([report({EOS: -1.0, A: -1.1, B: -1.2, OTHER_EOS: -1.3, C: -1.4})])
    assert (finished(beams), running(beams)) == ([((EOS,), "stop")], [(A,)])


def test_what_reaches_the_longest_length_ends_with_it():
    beams = search(2, max_tokens=2)
    beams.advance([report({A: -1.0, B: -1.1, C: -1.2})])
    beams.advance([report({C: -1.0, EOS: -1.2}), report({EOS: -1.0, C: -2.0})])
    assert beams.done and finished(beams) == [((A, C), "length"), ((B, EOS), "stop")]


@pytest.mark.parametrize(
    "early_stopping, best, wanted",
    [
        (True, -0.75, True),
        (False, -0.75, False),
        (False, -1.125, False),
        (False, -1.375, False),  # better than the worst end, if not than the others
        (False, -1.5, True),  # as good as the worst: from here it can only lose
        (False, -1.75, True),
    ],
)
def test_a_search_ends_once_its_best_beam_cannot_beat_its_worst_end_or_with_the_last_end(early_stopping, best, wanted):
    beams = search(3, length_penalty=0.0, early_stopping=early_stopping)  # no length counts: scores are sums
    beams.advance([report({A: -0.5, EOS: -1.0, OTHER_EOS: -1.25, B: -2.0, C: -3.0})])
    assert not beams.done
    beams.advance([report({EOS: -1.0, D: best + 0.5}), report({A: -8.0, B: -9.0}), report({A: -8.0, B: -9.0})])
    assert [each.score for each in beams.finished] == [-1.0, -1.25, -1.5]
    assert beams.done == (running(beams) == []) == wanted


def test_a_search_goes_on_until_as_many_have_ended_as_it_is_wide():
    beams = search(2, length_penalty=0.0, early_stopping=True)
    beams.advance([report({EOS: 0.0, A: -5.0, B: -6.0})])
    assert not beams.done
    beams.advance([report({EOS: -1.0, A: -2.0}), report({A: -9.0, B: -9.5})])
    assert beams.done and finished(beams) == [((EOS,), "stop"), ((A, EOS), "stop")]


def test_a_better_end_takes_the_place_of_the_worst():
    beams = search(2, length_penalty=1.0)
    beams.advance([report({A: -0.5, EOS: -3.0, B: -4.0})])
    beams.advance([report({EOS: -1.0, C: -1.1}), report({A: -9.0, B: -9.5})])
    assert finished(beams) == [((A, EOS), "stop"), ((EOS,), "stop")]
    beams.advance([report({EOS: -0.1, C: -7.0}), report({A: -9.0, B: -9.5})])
    assert beams.done and finished(beams) == [((A, C, EOS), "stop"), ((A, EOS), "stop")]


def test_every_beam_must_report():
    beams = search(2)
    beams.advance([report({A: -1.0, B: -1.5})])
    with pytest.raises(ValueError, match="shorter"):
        beams.advance([report({A: -1.0})])
