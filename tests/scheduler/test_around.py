"""What stands around a scheduler: it passes on all that it does not change, and forgets who has gone."""

import logging

import numpy as np
import pytest
from fakes import FakeEngine
from scheduler.direct import plan_and_update, request, scheduler_of

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.scheduler.around import Around
from minivllm.scheduler.fault_isolation import FaultIsolation
from minivllm.scheduler.gather import Gathering, HalfFull
from minivllm.scheduler.inject import Injector


class Recorder:
    """An inner scheduler that answers each call with what it was called with."""

    def __init__(self):
        self.calls = []
        self.requests, self.running, self.waiting = {"child": CHILD}, [CHILD], []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return ANSWERS.get(name)

        return call


PLAN, OUT, CHILD = StepPlan(3), StepOutput(), request("child", 4)
ANSWERS = {"schedule": PLAN, "update": [Delta("a", [1])]}
CALLS = [
    ("add", CHILD),
    ("abort", "a"),
    ("hold", ["a"]),
    ("let_in", CHILD, [CHILD]),
    ("reorder", {"a": (1,)}),
    ("fork", [("a", CHILD)], ["a"]),
    ("schedule", 2.5),
    ("update", PLAN, OUT),
    ("check",),
]
AROUND = {
    "around": Around,
    "fault isolation": FaultIsolation,
    "gathering": lambda inner: Gathering(inner, HalfFull(2)),
    "injector": lambda inner: Injector(inner, kv=None),  # which disturbs nothing unless it is told to
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_whoever_stands_around_a_scheduler_passes_everything_on(around):
    inner = Recorder()
    outer = around(inner)
    for name, *args in CALLS:
        assert getattr(outer, name)(*args) is ANSWERS.get(name)
    assert inner.calls == CALLS
    assert (outer.requests, outer.running, outer.waiting) == (inner.requests, inner.running, inner.waiting)


def test_who_is_let_in_at_nobodys_cost_needs_no_victims_named():
    inner = Recorder()
    Around(inner).let_in(CHILD)
    assert inner.calls == [("let_in", CHILD, ())]


# --- failure injection


def injector_of(every=0, evict_all=False, **options):
    scheduler = scheduler_of(**options)
    return Injector(scheduler, scheduler.kv, every, evict_all)


def preempted(injector, steps):
    """Who left in each step."""
    return ["".join(plan_and_update(injector)[0].leaves) for _ in range(steps)]


def test_every_so_many_steps_one_request_is_preempted_in_turn():
    injector = injector_of(every=2)
    for name in "abc":
        injector.add(request(name, 2, max_tokens=50))
    assert preempted(injector, 8) == ["", "c", "", "b", "", "a", "", "c"]


def test_who_has_gained_no_token_since_is_not_preempted_again():
    injector = injector_of(every=1, budget=4, chunked_prefill=True)
    injector.add(request("a", list(range(50, 62)), max_tokens=4))
    # Twelve tokens take three steps. It may go once at first, and then after each of the tokens that this has led to.
    seen = preempted(injector, 8)
    assert seen[:2] == ["", "a"] and seen.count("a") < 4


def test_who_has_only_begun_may_be_preempted():
    injector = injector_of(every=2)
    injector.add(request("a", 1))
    begun = injector.schedule(0.0)
    assert begun.num_tokens == {"a": 1} and injector.schedule(0.0).leaves == ["a"]


@pytest.mark.parametrize("end", ["abort", "fork", "finish"])
def test_an_id_that_is_used_again_owes_nothing_for_who_had_it_before(end):
    injector = injector_of(every=2, max_num_seqs=1)
    injector.add(request("a", 6, max_tokens=2))
    assert preempted(injector, 2) == ["", "a"]
    if end == "abort":
        injector.abort("a")
    elif end == "fork":
        injector.fork([], ["a"])
    else:
        plan_and_update(injector)
    assert "a" not in injector.requests
    injector.add(request("a", 2))
    assert sum(injector.schedule(0.0).stats.num_preempted for _ in range(3)) == 1


def test_with_evict_all_no_prefix_is_ever_found():
    for evict_all, start in ((False, 8), (True, 0)):
        injector = injector_of(evict_all=evict_all)
        for name in "ab":
            injector.add(request(name, 10, max_tokens=1))
            plan, _ = plan_and_update(injector)
        assert plan.start == {"b": start}


# --- fault isolation


def isolation_in_trial(*names):
    """Around a scheduler whose first step has failed."""
    isolation = FaultIsolation(scheduler_of())
    for name in names:
        isolation.add(request(name, 6))
    plan = isolation.schedule(0.0)
    assert isolation.update(plan, StepOutput(is_failed=True, errors=dict.fromkeys(names, "lightning"))) == []
    isolation.check()
    return isolation


def in_plan(isolation):
    return list(isolation.schedule(0.0).num_tokens)


def test_those_of_a_failed_step_are_tried_one_by_one_in_their_order_until_each_has_a_token(caplog):
    with caplog.at_level(logging.WARNING, "minivllm"):
        isolation = isolation_in_trial("a", "b", "c")
    assert caplog.messages == ["trying each of the 3 requests of the failed step alone"]
    isolation.add(request("new", 6))
    tried = [list(plan_and_update(isolation)[0].num_tokens) for _ in range(4)]
    assert tried == [["a"], ["b"], ["c"], ["c", "a", "b", "new"]]


def test_a_step_of_one_request_that_fails_ends_it_at_once():
    isolation = FaultIsolation(scheduler_of())
    isolation.add(request("a", 6))
    plan = isolation.schedule(0.0)
    (delta,) = isolation.update(plan, StepOutput(is_failed=True, errors={"a": "lightning"}))
    assert (delta.finish_reason, delta.error) == ("error", "lightning") and not isolation.requests


@pytest.mark.parametrize("end", ["abort", "fork"])
def test_who_goes_while_it_waits_for_its_trial_is_not_tried(end):
    isolation = isolation_in_trial("a", "b", "c")
    isolation.abort("a") if end == "abort" else isolation.fork([], ["a"])
    isolation.check()
    assert in_plan(isolation) == ["b"]


@pytest.mark.parametrize("field, value", [("errors", "lightning"), ("pooled", b""), ("tokens", [1])])
def test_a_trial_ends_with_a_token_a_vector_or_an_error(field, value):
    isolation = isolation_in_trial("a", "b")
    value = np.zeros(2, np.float32) if field == "pooled" else value
    isolation.update(isolation.schedule(0.0), StepOutput(**{field: {"a": value}}))
    isolation.check()
    assert in_plan(isolation) == ["b"]


def test_a_trial_takes_as_many_steps_as_its_prompt():
    isolation = FaultIsolation(scheduler_of(budget=4))
    isolation.add(request("a", 2)), isolation.add(request("b", 6))
    plan = isolation.schedule(0.0)
    isolation.update(plan, StepOutput(is_failed=True, errors=dict.fromkeys("ab", "lightning")))
    tried = [dict(plan_and_update(isolation)[0].num_tokens) for _ in range(4)]
    assert tried == [{"a": 2}, {"b": 4}, {"b": 2}, {"b": 1, "a": 3}]


# --- gathering


def test_an_idle_engine_that_gathers_may_be_asked_for_a_plan():
    engine = FakeEngine(**{"scheduler.policy": "served_ratio", "scheduler.kind": "phased",
                           "scheduler.chunked_prefill": False})  # fmt: skip
    engine.step()
    engine.add("a", [1], max_tokens=1)
    engine.run()
