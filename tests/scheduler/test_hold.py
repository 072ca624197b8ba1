"""hold, let_in and reorder: all by which a scheduler that stands around another one changes that one's queues."""

import ast
from pathlib import Path

import pytest
from fakes import FakeEngine, oracle

import minivllm.scheduler

KINDS = {
    "unified": {},
    "phased": {"scheduler.kind": "phased", "scheduler.chunked_prefill": False},
    "static": {"scheduler.kind": "static", "scheduler.chunked_prefill": False},
    "in flight": {"overlap": 2},
}
PROMPTS = {"a": [1] * 5, "b": [2] * 6, "c": [3] * 7}


def engine_with_all(**options):
    engine = FakeEngine(**options)
    params = {name: engine.add(name, prompt, max_tokens=9, min_tokens=9) for name, prompt in PROMPTS.items()}
    return engine, {name: oracle(prompt, params[name]) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_steps", [0, 3], ids=["waiting", "running"])
def test_who_is_held_is_in_no_plan_and_loses_no_token(options, num_steps):
    engine, wanted = engine_with_all(**options)
    for _ in range(num_steps):
        engine.step()
    for _ in range(4):
        engine.scheduler.hold(["a"])
        engine.step()
        assert "a" not in engine.core.plan.num_tokens and "a" in engine.scheduler.requests
    engine.run()
    assert engine.tokens == wanted


def test_calls_add_up_until_the_next_plan_and_no_longer():
    engine, _ = engine_with_all()
    engine.scheduler.hold(["a"])
    engine.scheduler.hold(["c", "nobody"])
    engine.step()
    assert list(engine.core.plan.num_tokens) == ["b"] and engine.core.plan.stats.num_waiting == 2
    engine.step()
    assert engine.core.plan.num_tokens.keys() == PROMPTS.keys()


def test_a_held_request_keeps_its_place_before_those_that_arrived_later():
    engine, _ = engine_with_all(**{"scheduler.max_num_seqs": 1})
    engine.scheduler.hold(["a", "b"])
    engine.step()
    assert [req.id for req in engine.scheduler.running] == ["c"]
    assert [req.id for req in reversed(engine.scheduler.waiting)] == ["a", "b"]


def test_who_is_preempted_by_it_is_counted_in_the_plan():
    engine, _ = engine_with_all()
    engine.step()
    engine.scheduler.hold(["a", "b"])
    engine.step()
    assert engine.core.plan.stats.num_preempted == 2
    engine.step()
    assert engine.core.plan.stats.num_preempted == 0


def test_a_held_request_that_is_aborted_is_forgotten():
    engine, wanted = engine_with_all()
    engine.step()
    engine.scheduler.hold(["a"])
    engine.scheduler.check()
    engine.core.abort(["a"])
    engine.scheduler.check()
    engine.run()
    assert "a" not in engine.reasons and engine.tokens["b"] == wanted["b"]


def test_who_is_let_in_costs_no_more_than_it_takes():
    engine, wanted = engine_with_all(num_blocks=10, **{"scheduler.max_num_seqs": 2})
    engine.step()
    first, second = engine.scheduler.running
    engine.scheduler.let_in(engine.scheduler.requests["c"], [second, first])
    assert [req.id for req in engine.scheduler.running] == ["a", "c"]
    engine.run()
    assert engine.tokens == wanted


def test_who_finds_no_room_at_all_that_cost_waits():
    engine, wanted = engine_with_all(num_blocks=10, **{"scheduler.max_num_seqs": 2})
    engine.step()
    engine.scheduler.let_in(engine.scheduler.requests["c"])
    assert [req.id for req in engine.scheduler.running] == ["a", "b"]
    engine.run()
    assert engine.tokens == wanted


def test_requests_that_are_reordered_are_served_in_their_new_order():
    engine, _ = engine_with_all(**{"scheduler.max_num_seqs": 1})
    engine.scheduler.reorder({"a": (7,), "c": (-1,)})
    engine.run()
    assert list(engine.reasons) == ["c", "b", "a"]


def test_nobody_but_a_scheduler_writes_to_its_queues():
    writers = {
        path.stem
        for path in Path(minivllm.scheduler.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "waiting" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".preempt", ".enqueue", ".waiting.remove")))
    }
    assert writers == {"base"}
