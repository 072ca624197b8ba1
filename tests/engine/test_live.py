"""Looking at a running engine: it tells what is so, holds nobody's tokens, and costs nothing once nobody looks."""

from __future__ import annotations

import msgspec
import pytest
from fakes import FakeEngine

from minivllm.engine.live import LEASE_SECONDS, MAX_REQUESTS, MAX_STEPS, LiveView, in_runs
from minivllm.kv.base import CACHED, FREE, SHARED, USED


def make(**overrides) -> tuple[FakeEngine, LiveView]:
    """An engine whose clock ticks an eighth of the lease a step."""
    engine = FakeEngine(**{"num_blocks": 40, "scheduler.max_num_batched_tokens": 16, **overrides})
    view = LiveView(engine.core, engine.scheduler)
    step = engine.step

    def short_step():
        engine.now += LEASE_SECONDS / 8 - 1.0  # FakeEngine's own step adds a second
        return step()

    engine.step = short_step
    return engine, view


def run(engine, view) -> list:
    """Until nothing is left to do, with somebody who looks all the time. All steps."""
    steps, after = [], 0
    while True:
        look = view.look(after)
        steps, after = steps + look.steps, look.next
        if not engine.core.has_work:
            return steps
        engine.step()


def watches(engine, view) -> bool:
    return view in engine.core.observers


class Witness:
    """Every plan, and when whose tokens came."""

    def __init__(self, engine):
        self.engine, self.plans, self.came = engine, [], {}

    def on_add(self, req, step): ...
    def on_abort(self, req_id): ...

    def on_step(self, plan, out, deltas, times):
        if plan.num_tokens:
            self.plans.append(plan)
        for delta in deltas:
            if delta.token_ids:
                self.came.setdefault(delta.req_id, []).append(self.engine.now)


def test_it_is_no_observer_until_somebody_looks_and_after_they_have_gone():
    engine, view = make()
    other = Witness(engine)
    engine.core.observers.append(other)
    engine.add("a", [1, 2, 3], max_tokens=40, min_tokens=40)
    engine.step()
    assert not watches(engine, view)
    view.look()
    for _ in range(8):
        engine.step()
        assert watches(engine, view)
    engine.step()
    assert not watches(engine, view)
    held = (view._steps, view._known, view._silent, view._last)
    assert not any(held) and len(other.plans) == 10
    view.look()
    engine.step()
    assert [step.step for step in view.look().steps] == [10]


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_each_step_is_told_with_its_tokens_apart(method):
    engine, view = make(num_blocks=100, **{"spec_decode.method": method})
    witness = Witness(engine)
    engine.core.observers.append(witness)
    view.look()
    for i in range(5):
        engine.add(f"r{i}", [i, *range(10, 10 + 7 * i)], max_tokens=20)
    steps, budget = run(engine, view), view.look().budget
    assert [step.number for step in steps] == list(range(len(steps)))
    assert [step.step for step in steps] == [plan.step for plan in witness.plans]
    for step, plan in zip(steps, witness.plans, strict=True):
        assert step.prefill + step.decode + step.draft == plan.total_tokens <= budget
        assert step.draft == plan.stats.num_drafted and step.accepted == plan.stats.num_accepted
        assert (step.running, step.waiting) == (plan.stats.num_running, plan.stats.num_waiting)
    assert sum(step.prefill for step in steps) == sum(1 + 7 * i for i in range(5))
    assert bool(sum(step.draft for step in steps)) == (method != "none")


def test_a_recomputed_request_is_prefill_again():
    engine, view = make(num_blocks=12)
    view.look()
    for i in range(4):
        engine.add(f"r{i}", [i, 20, 21, 22, 23], max_tokens=20)
    steps = run(engine, view)
    assert sum(step.preempted for step in steps)
    assert sum(step.prefill for step in steps) > 4 * 5, "what a preemption made the engine compute again is not there"


def test_latencies_are_those_that_a_witness_sees():
    engine, view = make()
    witness = Witness(engine)
    engine.core.observers.append(witness)
    engine.add("early", [1, 2], max_tokens=30)
    for _ in range(3):
        engine.step()
    seen = engine.now
    view.look()
    for i in range(3):
        engine.add(f"late{i}", [3 + i] * 20, max_tokens=10)
    arrived = engine.now
    steps = run(engine, view)
    ttft = sorted(ms for step in steps for ms in step.ttft_ms)
    assert ttft == pytest.approx(sorted(1e3 * (witness.came[f"late{i}"][0] - arrived) for i in range(3)))
    by_time = {round(step.t, 6): step.itl_ms for step in steps}
    for req_id, came in witness.came.items():
        known = [at for at in came if at > seen] if req_id == "early" else came
        for before, at in zip(known, known[1:], strict=False):
            assert any(ms == pytest.approx(1e3 * (at - before)) for ms in by_time[round(at, 6)]), req_id


def slow_map(kv) -> list[int]:
    """By asking for each block who names it."""
    states = []
    for block in range(kv.usage.num_total):
        owners = sum(block in table.blocks for table in kv.tables.values())
        states.append(SHARED if owners > 1 else USED if owners else CACHED if block in kv.index else FREE)
    return states


def test_the_block_map_is_the_pools_and_a_requests_blocks_are_its_table():
    engine, view = make()
    states = set()
    for i in range(6):
        engine.add(f"r{i}", [*range(20), i], max_tokens=3 * i + 1)
        for _ in range(3):
            engine.step()
            look = view.look()
            expected = slow_map(engine.kv)
            assert look.blocks == in_runs(bytes(expected))
            states |= set(expected)
            for row in look.requests:
                blocks = [block for first, number in row.blocks for block in range(first, first + number)]
                assert blocks == list(engine.kv.blocks_of(row.id))
    assert states == {FREE, CACHED, USED, SHARED}


def test_contiguous_pools_have_maps_too():
    engine, view = make(**{"kv.allocation": "max", "kv.prefix": "none"}, max_model_len=32)
    engine.add("a", [1, 2, 3], max_tokens=20)
    engine.step()
    look = view.look()
    assert look.blocks.count("u") == 1 and look.requests[0].blocks == [(engine.kv.runs["a"].start, 8)]
    engine.run()
    assert view.look().blocks == "f40"


def test_requests_are_listed_in_service_order_and_only_so_many():
    engine, view = make(num_blocks=400, **{"scheduler.max_num_seqs": 2})
    for i in range(MAX_REQUESTS + 5):
        engine.add(f"r{i}", [i % 90, 1, 2], cache_salt="mine", max_tokens=5)
    engine.step()
    look = view.look()
    assert (look.running, look.waiting, look.places) == (2, MAX_REQUESTS + 3, 2)
    assert [row.id for row in look.requests] == [f"r{i}" for i in range(MAX_REQUESTS)]
    assert [row.running for row in look.requests[:3]] == [True, True, False]
    assert {row.salt for row in look.requests} == {"mine"}
    assert look.requests[0].prompt == 3 and look.requests[0].computed == 3 and look.requests[0].output == 1


def test_a_look_holds_no_token():
    engine, view = make()
    engine.add("a", [77] * 9, max_tokens=5)
    view.look()
    engine.step()
    look = msgspec.to_builtins(view.look())
    assert {"token_ids", "prompt_token_ids", "params"}.isdisjoint({*look, *look["requests"][0], *look["steps"][0]})
    assert 77 not in {value for row in look["requests"] for value in row.values() if isinstance(value, int)}


def test_only_the_newest_steps_are_held_and_a_wrong_place_begins_with_the_oldest():
    engine, view = make(num_blocks=1000, max_model_len=MAX_STEPS + 60)
    engine.add("a", [1], max_tokens=MAX_STEPS + 40, min_tokens=MAX_STEPS + 40)
    for _ in range(MAX_STEPS + 20):
        view.look()
        engine.step()
    look = view.look()
    assert [step.number for step in look.steps] == list(range(20, MAX_STEPS + 20))
    assert [step.number for step in view.look(look.next - 2).steps] == [look.next - 2, look.next - 1]
    assert not view.look(look.next).steps
    assert len(view.look(look.next + 1).steps) == MAX_STEPS, "as after a restart of the core"


def test_aborted_requests_leave_nothing_behind():
    engine, view = make()
    view.look()
    engine.add("a", [1, 2, 3], max_tokens=20)
    engine.add("b", [4, 5, 6], max_tokens=20)
    engine.step()
    engine.core.abort(["a", "b"])
    look = view.look()
    assert not look.requests and not (view._known or view._silent or view._last)
