"""The short form of `make attack`: a row for each class of it, on one server with eight keys."""

from __future__ import annotations

import asyncio

import pytest
from attack import run
from attack.attacks import ATTACKS, named
from fire.wire import served

CLASSES = (
    "exponential",
    "a mask",
    "the same id",
    "thousands of sequences",
    "of every position",
    "of thousands of turns",
)
LONGEST_SECONDS = 5.0  # what used to happen took 8 to 70


@pytest.mark.slow
@pytest.mark.timeout(600)  # what it says of times gets three attempts
def test_a_client_with_a_valid_key_stops_nobody(monkeypatch):
    monkeypatch.setattr(run, "QUIET_SECONDS", 1.0)
    monkeypatch.setattr(run, "LEAST_SECONDS", 1.0)
    attacks = named(CLASSES)
    assert len(attacks) == len(CLASSES)
    slow = attacks
    with served(*run.options()) as server:
        for _ in range(3):  # who else works on the machine slows the quiet client too, and not every time
            rows = asyncio.run(run.run_on(server, attacks := slow))
            assert not attacks, "one has left the server at work"
            assert {row.attack.name: row.wrong() for row in rows if row.wrong()} == {}
            if not (slow := [row.attack for row in rows if max(row.beside.latencies) >= LONGEST_SECONDS]):
                return
    pytest.fail(f"others waited for {[attack.name for attack in slow]}")


def test_attacks_are_found_by_their_names_and_findings():
    assert named([]) == list(ATTACKS)
    assert {a.of for a in named(["H3"])} == {"H3"} and len(named(["H3"])) == 2
    assert named(["no such"]) == []


def test_what_goes_wrong_is_said():
    alone = run.Seen([0.01] * 100, {"a"}, [], [])
    good = run.Row(ATTACKS[0], alone, alone, run.Counter([400]), 0.0, 10.0)
    assert good.wrong() == [] and not good.is_slower
    slow = alone._replace(latencies=[0.01] * 90 + [0.1] * 10)
    for change, told in (
        ({"beside": slow}, []),
        ({"beside": alone._replace(texts={"b"})}, ["another answer"]),
        ({"beside": alone._replace(failures=["ReadTimeout"])}, ["ReadTimeout"]),
        ({"beside": alone._replace(unhealthy=["503"])}, ["503"]),
        ({"beside": alone._replace(latencies=[])}, ["nobody else was answered"]),
        ({"answers": run.Counter([500])}, ["500 was answered"]),
        ({"left": 60.0}, ["60 MiB left"]),
        ({"left": float("inf")}, ["still at work"]),
        ({"spins": 0.9}, ["still at work"]),
    ):
        row = good._replace(**change)
        assert row.wrong() == told and row.is_slower == (change.get("beside") in (slow, alone._replace(latencies=[])))
