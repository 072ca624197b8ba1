"""The tests of chapter 12's exercise. Their device is as unkind as it may be: it writes when a step lands."""

from __future__ import annotations

import itertools
import random

from exercise import END, AbortingCore, Request

NUM_BLOCKS, MAX_IN_FLIGHT = 3, 2
EVENTS = ("add a", "add b", "abort a", "abort b", "submit", "land", "end")


def core_of(*names: str, num_blocks: int = NUM_BLOCKS) -> AbortingCore:
    """Requests of a block each."""
    core = AbortingCore(num_blocks)
    assert all(core.add(name, 1) for name in names)
    return core


def test_one_that_was_never_run_gives_its_blocks_back_at_once():
    core = core_of("a", "b")
    core.abort("a")
    assert list(core.live) == ["b"] and len(core.free) == 2


def test_what_comes_late_is_dropped_and_the_blocks_are_free_after_it():
    core = core_of("a", "b")
    core.submit()
    core.abort("a")
    assert len(core.free) == 1, "the step may still write to its block"
    assert core.land([7, 8]) == {"b": 8}
    assert len(core.free) == 2 and list(core.live) == ["b"]


def test_with_two_steps_in_flight_the_last_one_counts():
    core = core_of("a")
    core.submit(), core.submit()
    core.abort("a")
    assert core.land([7]) == {} and len(core.free) == 2
    assert core.land([8]) == {} and sorted(core.free) == [0, 1, 2]


def test_an_id_that_is_used_again_gets_nothing_of_the_one_before():
    core = core_of("a")
    core.submit()
    core.abort("a")
    assert core.add("a", 1)
    core.submit()
    assert core.land([7]) == {}, "this was for the first a"
    assert core.land([8]) == {"a": 8} and list(core.live) == ["a"]


def test_an_end_that_nobody_could_foresee_is_an_abort_too():
    core = core_of("a")
    core.submit(), core.submit()
    assert core.land([END]) == {"a": END} and not core.live
    assert len(core.free) == 2, "it is in the next step already"
    assert core.land([9]) == {} and sorted(core.free) == [0, 1, 2]


def test_an_abort_that_comes_too_late_is_no_error():
    core = core_of("a")
    core.submit()
    core.land([END])
    core.abort("a"), core.abort("nobody")
    assert sorted(core.free) == [0, 1, 2]


def test_nothing_leaks_in_any_order():
    """All orders of five events, and longer ones by chance."""
    chance = random.Random(0)
    for events in itertools.product(EVENTS, repeat=5):
        play(events)
    for _ in range(2000):
        play(chance.choices(EVENTS, k=40))


def play(events: tuple[str, ...] | list[str]) -> None:
    core = AbortingCore(NUM_BLOCKS)
    memory: dict[int, Request] = {}  # block -> whose K and V are in it
    for event in events:
        if event.startswith("add"):
            if core.add(name := event[-1], 1 + (name == "b")):
                write(memory, core.live[name])  # a prefix that came from elsewhere, say
        elif event.startswith("abort"):
            core.abort(event[-1])
        elif event == "submit":
            if len(core.in_flight) < MAX_IN_FLIGHT:
                core.submit()
        elif core.in_flight:
            land(core, memory, ends=event == "end")
        held = [block for request in core.live.values() for block in request.blocks]
        assert len({*core.free, *held}) == len(core.free) + len(held), "a block has two owners"
        assert all(memory[block] is r for r in core.live.values() for block in r.blocks), "a late step wrote to it"
    for name in list(core.live):
        core.abort(name)
    while core.in_flight:
        land(core, memory, ends=False)
    assert sorted(core.free) == list(range(NUM_BLOCKS)) and not core.live, "something leaks"


def land(core: AbortingCore, memory: dict[int, Request], ends: bool) -> None:
    step = core.in_flight[0]
    for request in step:
        write(memory, request)
    tokens = [END if ends else 1 + i for i in range(len(step))]
    wanted = {r.id: token for r, token in zip(step, tokens, strict=True) if core.live.get(r.id) is r}
    assert core.land(tokens) == wanted, "a stream got what was not its own, or nothing"
    assert not ends or not wanted.keys() & core.live.keys(), "it has ended, and lives"


def write(memory: dict[int, Request], request: Request) -> None:
    memory.update(dict.fromkeys(request.blocks, request))
