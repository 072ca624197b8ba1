"""The tests of chapter 5's exercise. They need no model."""

from __future__ import annotations

import random

from exercise import Batcher, Request


def serve(seats: int, lengths: dict[str, int]) -> list[list[str]]:
    """Who got a token, step by step, until nobody wants any more."""
    batcher = Batcher(seats)
    batcher.waiting.extend(Request(name, num) for name, num in lengths.items())
    steps = []
    while batcher.waiting or batcher.running:
        steps.append(batcher.step())
        assert len(steps) <= sum(lengths.values()) + len(lengths), "this never ends"
    return steps


def test_a_seat_that_becomes_free_is_taken_in_the_next_step():
    steps = serve(2, {"long": 4, "short": 1, "next": 2, "last": 1})
    assert steps == [["long", "short"], ["long", "next"], ["long", "next"], ["long", "last"]]


def test_everybody_gets_what_they_want_without_a_break():
    lengths = {"a": 3, "b": 7, "c": 1, "d": 4, "e": 2}
    steps = serve(3, lengths)
    for name, num in lengths.items():
        served = [i for i, names in enumerate(steps) if name in names]
        assert len(served) == num, f"{name} wanted {num} tokens and got {len(served)}"
        assert served[-1] - served[0] == num - 1, f"{name} had to pause: it got its tokens in steps {served}"


def test_no_seat_is_idle_while_somebody_waits():
    for seed in range(20):
        rng = random.Random(seed)
        seats, lengths = rng.randint(1, 5), {str(i): rng.randint(1, 9) for i in range(12)}
        steps = serve(seats, lengths)
        came: set[str] = set()
        for names in steps:
            came |= set(names)
            assert len(names) <= seats, "more sit than there are seats"
            assert len(names) == seats or len(came) == len(lengths), "a seat was empty, and somebody waited"


def test_those_who_came_first_sit_down_first():
    steps = serve(1, {"first": 2, "second": 1, "third": 1})
    assert steps == [["first"], ["first"], ["second"], ["third"]]


def test_newcomers_join_a_batch_that_runs():
    batcher = Batcher(2)
    batcher.waiting.append(Request("early", 3))
    assert batcher.step() == ["early"]
    batcher.waiting.append(Request("late", 1))
    assert batcher.step() == ["early", "late"]
    assert batcher.step() == ["early"]
    assert batcher.step() == []
