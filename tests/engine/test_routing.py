"""Where a request goes, by policy: pure functions of the prompt and of who has how much to do."""

from __future__ import annotations

from collections import Counter

import pytest

from minivllm.engine import routing
from minivllm.engine.routing import LeastLoaded, Load, Prefix, RoundRobin
from minivllm.request import EngineRequest, SamplingParams

IDLE = [Load(0, 0, 0), Load(1, 0, 0), Load(2, 0, 0)]
TEXT = list(range(64))


def request(tokens=TEXT, **options):
    return EngineRequest("r", list(tokens), SamplingParams(), **options)


def test_round_robin_takes_turns_among_those_that_run():
    policy = RoundRobin(4)
    assert [policy.choose(request(), IDLE) for _ in range(4)] == [0, 1, 2, 0]
    assert Counter(policy.choose(request(), IDLE[1:]) for _ in range(10)) == {1: 5, 2: 5}


def test_least_loaded_counts_sequences_then_prompts_then_turns():
    policy = LeastLoaded(4)
    assert policy.choose(request(), [Load(0, 2, 10), Load(1, 1, 900)]) == 1
    assert policy.choose(request(), [Load(0, 1, 900), Load(1, 1, 10)]) == 1
    assert Counter(policy.choose(request(), IDLE) for _ in range(9)) == {0: 3, 1: 3, 2: 3}


def test_equal_beginnings_go_to_one_replica_and_others_are_spread():
    policy = Prefix(4)
    home = policy.choose(request(), IDLE)
    assert all(policy.choose(request([*TEXT, i, 99, 99]), IDLE) == home for i in range(5))
    others = [policy.choose(request([1000 + 100 * i + j for j in range(16)]), IDLE) for i in range(9)]
    assert set(others) == {0, 1, 2}


@pytest.mark.parametrize("options", [{"adapter": "a"}, {"cache_salt": "s"}])
def test_what_the_cache_keeps_apart_is_no_known_beginning(options):
    policy = Prefix(4)
    policy.choose(request(), IDLE)
    assert policy._match(0, policy._keys(request())) == 16
    assert max(policy._match(i, policy._keys(request(**options))) for i in range(3)) == 0


def test_a_short_common_beginning_does_not_decide():
    policy = Prefix(4)
    home = policy.choose(request(), IDLE)
    loads = [Load(i, 1 if i == home else 0, 0) for i in range(3)]
    assert policy.choose(request([*TEXT[:8], *range(200, 240)]), loads) != home


def test_a_replica_with_far_more_to_do_is_passed_over_and_the_next_one_learns():
    policy = Prefix(4)
    home = policy.choose(request(), IDLE)
    at_limit = [Load(i, routing.SLACK if i == home else 0, 0) for i in range(3)]
    assert policy.choose(request(), at_limit) == home
    above = [Load(i, routing.SLACK + 1 if i == home else 0, 0) for i in range(3)]
    other = policy.choose(request(), above)
    assert other != home
    assert policy.choose(request(), [Load(i, 1 if i == home else 0, 0) for i in range(3)]) == other, "both know it now"
    busy = [Load(i, 149 if i == home else 100, 0) for i in range(3)]
    assert policy.choose(request([*TEXT[:40]]), busy) in (home, other)


def test_what_a_dead_replica_had_cached_is_forgotten():
    policy = Prefix(4)
    home = policy.choose(request(), IDLE)
    policy.forget(home)
    loads = [Load(i, 3 if i == home else 0, 0) for i in range(3)]
    assert policy.choose(request(), loads) != home


def test_what_is_remembered_is_bounded_and_beginnings_outlive_ends(monkeypatch):
    monkeypatch.setattr(routing, "MAX_KNOWN_BLOCKS", 10)
    policy = Prefix(4)
    home = policy.choose(request(), IDLE)
    assert len(policy._known[home]) == 10
    assert policy._match(home, policy._keys(request())) == 10
