"""The highest rate that holds, beside a queue whose answer is known; costs and Pareto's front, beside definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import ConfigError
from minivllm.simulate.capacity import (
    ALONE,
    MOST_RATE,
    TOLERANCE,
    Answer,
    Choice,
    Devices,
    Objective,
    Point,
    Rates,
    Setup,
    Shares,
    find,
    find_band,
    find_rate,
    first_that,
    front,
    highest,
    rank,
    read_objective,
)

OUTPUT = 50  # tokens of a request
START = 1.0  # requests a second


def queue(most: float):
    """A server with one queue (M/M/1) that serves `most` requests a second: its waiting time is known."""

    def trial(rate):
        seconds = 1 / (most - rate) if rate < most else 1e9
        return {
            **{"queue_grew": rate >= most, "num_refused": 0, "num_finished": 100},
            **{"requests_per_s": 0.9 * rate, "output_tokens_per_s": 0.9 * rate * OUTPUT},
            **{name: {"mean": seconds, "p50": seconds, "p90": seconds, "p99": seconds} for name in ("ttft", "latency")},
            **{"tpot": {"p50": 1e-2}, "itl": {}},
        }

    return trial


@given(most=st.floats(0.05, 1e5), limit=st.floats(0.001, 1e3), start=st.floats(0.05, 100.0))
def test_the_highest_rate_is_that_of_the_queues_formula(most, limit, start):
    best = highest(find_rate(queue(most), [Objective("ttft", "p99", limit)], start))
    true = most - 1 / limit  # where 1 / (most - rate) is the limit
    if true < 2 * start / ALONE:
        assert best is None or best.rate <= true
    else:
        assert true / TOLERANCE <= best.rate <= true


@given(most=st.floats(2.0, 100.0), error=st.floats(0.05, 0.5), start=st.floats(0.1, 30.0))
def test_a_band_is_what_a_slower_and_a_faster_server_reach(most, error, start):
    """Which are queues with a formula as well: `most` over the factor."""
    limits, loads = [Objective("ttft", "p99", 1.0)], Rates(start)
    best = highest(find(queue(most), limits, loads, 0, 2))
    band = find_band(queue(most), limits, loads, best, error)
    for found, factor in zip(band, (1 + error, 1 / (1 + error)), strict=True):
        true = most / factor - 1
        assert found <= max(true, 0) * (1 + 1e-9) and (found >= true / TOLERANCE or true < 0.01)


@given(st.integers(-50, 50), st.integers(0, 100), st.integers(-200, 200), st.integers(1, 20), st.integers(-60, 160))
def test_the_first_number_that_holds_is_found_from_wherever_one_begins(least, more, begin, stride, first):
    asked = []

    def holds(number):
        assert least <= number <= least + more and number not in asked
        asked.append(number)
        return number >= first

    found = first_that(holds, least, least + more, begin, stride)
    assert found == (max(first, least) if first <= least + more else None)
    assert len(asked) <= 2 * math.log2(more + 2) + 2


@given(most=st.floats(1.5, 1e3), total=st.floats(0.1, 1e4), guess=st.integers(1, 500))
def test_the_replicas_are_the_fewest_among_which_the_rate_can_be_shared(most, total, guess):
    limits, loads = [Objective("ttft", "p99", 1.0)], Shares(total, 100_000)
    best = highest(find(queue(most), limits, loads, guess, 1))
    assert loads.number(best.rate) == max(1, math.ceil(total / (most - 1)))


def test_a_slower_device_needs_more_replicas_and_a_faster_one_fewer():
    limits, loads = [Objective("ttft", "p99", 1.0)], Shares(100.0, 1000)
    best = highest(find(queue(11.0), limits, loads, 1, 1))
    slower, faster = find_band(queue(11.0), limits, loads, best, 0.25)
    numbers = [round(100 / rate) for rate in (slower, best.rate, faster)]
    assert numbers == [math.ceil(100 / (11 / 1.25 - 1)), 10, math.ceil(100 / (11 * 1.25 - 1))]


def test_of_one_replica_there_is_no_fewer_on_a_faster_device():
    asked, loads = [], Shares(1.0, 10)
    trial = queue(11.0)
    best = highest(find(trial, [], loads, 1, 1))
    assert find_band(lambda rate: asked.append(rate) or trial(rate), [], loads, best, 0.25) == (1.0, 1.0)
    assert asked == [1.25]


def test_a_rate_that_nothing_limits_is_bounded():
    assert MOST_RATE / TOLERANCE < highest(find_rate(queue(math.inf), [], START)).rate <= MOST_RATE


def test_a_queue_that_grows_holds_nothing_whatever_was_asked():
    best = highest(find_rate(queue(8.0), [], START))
    assert 8 / TOLERANCE <= best.rate < 8


def test_all_that_was_tried_is_told_in_order():
    points = find_rate(queue(5.0), [Objective("latency", "p50", 1.0)], START)
    assert [p.rate for p in points] == sorted({p.rate for p in points})
    assert [p.holds for p in points] == sorted((p.holds for p in points), reverse=True)


def test_an_objective_about_a_time_that_nobody_had_is_met():
    assert highest(find_rate(queue(5.0), [Objective("itl", "p99", 1e-9)], START)) is not None


def answer(device, most, price, band=(0.0, 0.0)):
    points = find_rate(queue(most), [Objective("ttft", "p99", 1.0)], START)
    return Answer(Setup(Devices(device), {}), price, OUTPUT, points, highest(points), band)


def test_a_token_costs_the_devices_hour_over_the_tokens_of_an_hour():
    found = answer("a", 11.0, 3.6)
    tokens = found.best.rate * OUTPUT * 3600
    assert found.cost() == pytest.approx(3.6 / tokens * 1e6)
    assert found.cost(found.best.rate / 2) == pytest.approx(2 * found.cost())


def test_the_cheapest_is_first_and_who_holds_nothing_last():
    slow, dear, cheap, none = (
        answer("a", 3.0, 1.0),
        answer("b", 30.0, 30.0),
        answer("c", 30.0, 3.0),
        answer("d", 0.5, 1),
    )
    assert none.best is None and none.cost() == math.inf
    assert [a.setup.name for a in rank([none, dear, slow, cheap])] == ["c", "a", "b", "d"]


def test_of_two_that_cost_the_same_the_one_whose_tokens_come_faster_is_first():
    def at(name, tpot):
        best = Point(2.0, True, {"tpot": {"p50": tpot}})
        return Answer(Setup(Devices(name), {}), 1.0, OUTPUT, [best], best)

    assert [a.setup.name for a in rank([at("a", 0.03), at("b", 0.01)])] == ["b", "a"]


def test_a_band_costs_more_where_the_device_is_slower():
    found = answer("a", 11.0, 3.6, band=(8.0, 12.0))
    low, high = found.cost_band
    assert low < found.cost() < high


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12))
def test_the_front_is_who_nobody_beats(pairs):
    found = [Choice(str(i), 1.0, float(speed), 1.0, float(cost)) for i, (speed, cost) in enumerate(pairs)]

    def beaten(c):
        return any(
            o.tokens_per_s_of_a_user >= c.tokens_per_s_of_a_user
            and o.cost <= c.cost
            and (o.tokens_per_s_of_a_user, o.cost) != (c.tokens_per_s_of_a_user, c.cost)
            for o in found
        )

    on_it = {(c.tokens_per_s_of_a_user, c.cost) for c in front(found)}
    assert on_it == {(c.tokens_per_s_of_a_user, c.cost) for c in found if not beaten(c)}


def test_an_objective_is_read_or_refused_in_one_sentence():
    assert read_objective("ttft_p99=500ms") == Objective("ttft", "p99", 0.5)
    with pytest.raises(ConfigError, match='no objective "ttft_p98". Did you mean "ttft_p9'):
        read_objective("ttft_p98=1s")
    for text in ("tpot_p50", "tpot_p50=0s", "tpot_p50=1", "tpot_p50=fast", "tpot_p50=nans"):
        with pytest.raises(ConfigError, match="a time such as 500ms"):
            read_objective(text)
