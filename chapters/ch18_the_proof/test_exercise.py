"""The tests of chapter 18's exercise, on an engine on paper: its times are the same on every machine."""

from __future__ import annotations

from typing import Any

from exercise import losing_workload

from chapters.ch18_the_proof.paper import Served, serve

NO_CACHE = {"kv.prefix": "none"}
V0 = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, **NO_CACHE}
V1 = {"scheduler.max_num_batched_tokens": 32, **NO_CACHE}


def under(rules: dict[str, Any]) -> list[Served]:
    return list(serve(losing_workload(), rules).values())


def test_the_workload_keeps_to_the_rules():
    guests = losing_workload()
    assert 2 <= len(guests) <= 8 and len({guest.name for guest in guests}) == len(guests)
    assert all(1 <= len(guest.prompt) <= 400 and 1 <= guest.num_new <= 40 for guest in guests)


def test_somebody_waits_a_third_longer_for_a_first_token():
    assert max(one.first for one in under(V1)) >= 4 / 3 * max(one.first for one in under(V0))


def test_and_yet_the_longest_gap_is_shorter():
    assert max(one.worst_gap for one in under(V1)) < max(one.worst_gap for one in under(V0))


def test_the_prefix_cache_finds_nothing():
    assert not any(one.num_cached for one in under({**V1, "kv.prefix": "hash"}))
