"""hold, let_in and reorder: all by which a scheduler that stands around another one changes that one's queues."""

import ast
from pathlib import Path

import pytest
from fakes import FakeEngine, oracle
from scheduler.direct import plan_and_update, request, scheduler_of

import minivllm.scheduler
from minivllm.plan import StepOutput
from minivllm.scheduler.reserve import ReserveAll

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
    engine.scheduler.hold(["a"]), engine.scheduler.hold(["b"])
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


# --- on a scheduler alone


def test_a_fork_runs_at_once_in_the_place_of_one_that_ends_and_without_a_place_it_waits():
    scheduler = scheduler_of(max_num_seqs=4)
    scheduler.add(request("other", 6)), scheduler.add(request("parent", 8))
    plan_and_update(scheduler)
    free = scheduler.kv.usage.num_free
    children = [request(f"child{i}", [*scheduler.requests["parent"].token_ids]) for i in range(4)]
    for i, child in enumerate(children):
        child.order = (9, i)
    scheduler.fork([("parent", child) for child in children], ["parent"])
    assert [req.id for req in scheduler.running] == ["other", "child0", "child1", "child2"]
    assert [req.id for req in scheduler.waiting] == ["child3"] and "parent" not in scheduler.requests
    assert [req.num_computed_tokens for req in children] == [8, 8, 8, 0]
    # Full blocks are shared, and what a fork writes next is asked for by the plan that writes it.
    assert scheduler.kv.usage.num_free == free
    plan, _ = plan_and_update(scheduler)
    assert plan.leaves == ["parent"] and [join.req_id for join in plan.joins] == ["child0", "child1", "child2"]
    assert plan.num_tokens == {"other": 1, "child0": 1, "child1": 1, "child2": 1}
    assert {len(plan.new_blocks[f"child{i}"]) for i in range(3)} == {3}


@pytest.mark.parametrize("parent", ["waits", "has gone"])
def test_a_fork_of_one_that_has_computed_nothing_is_a_new_request(parent):
    scheduler = scheduler_of(max_num_seqs=2)
    scheduler.add(request("parent", 8))
    child = request("child", 8)
    child.order = (9,)
    scheduler.fork([("parent" if parent == "waits" else "nobody", child)], [])
    assert [req.id for req in scheduler.waiting] == ["child", "parent"] and not scheduler.running
    scheduler.check()
    assert plan_and_update(scheduler)[0].num_tokens == {"parent": 8, "child": 8}


def test_workers_never_hear_of_who_came_and_went_between_two_plans():
    scheduler = scheduler_of()
    scheduler.add(request("parent", 8))
    plan_and_update(scheduler)
    child = request("child", 9)
    child.order = (9,)
    scheduler.fork([("parent", child)], [])
    scheduler.abort("child")
    plan, _ = plan_and_update(scheduler)
    assert (plan.joins, plan.leaves) == ([], []) and plan.num_tokens == {"parent": 1}


def test_a_fork_that_is_preempted_before_it_was_in_a_plan_has_no_kv_to_keep():
    scheduler = scheduler_of()
    scheduler.kv.free = lambda req, keep=False, free=scheduler.kv.free: (kept.append((req.id, keep)), free(req, keep))
    kept = []
    scheduler.add(request("parent", 8))
    plan_and_update(scheduler)
    child = request("child", 9)
    child.order = (9,)
    scheduler.fork([("parent", child)], [])
    scheduler.hold(["parent", "child"])
    assert kept == [("child", False), ("parent", True)]  # the last in service first
    scheduler.check()
    assert child.num_preemptions == 1 and child.num_computed_tokens == 0 and child.drafts == []


@pytest.mark.parametrize("is_told_of", [False, True])
def test_a_fork_with_no_token_in_a_plan_that_fails_begins_anew(is_told_of):
    scheduler = scheduler_of(budget=8)
    scheduler.add(request("parent", 8)), scheduler.add(request("other", [9] * 20))
    plan_and_update(scheduler), plan_and_update(scheduler)
    child = request("child", 9)
    child.order = (9,)
    scheduler.fork([("parent", child)], [])
    plan = scheduler.schedule(0.0)
    assert [join.req_id for join in plan.joins] == ["child"] and plan.num_tokens == {"parent": 1, "other": 7}
    if is_told_of:
        scheduler.hold(["child"])  # it waits again by the time that the step fails
    scheduler.update(plan, StepOutput(is_failed=True, errors=dict.fromkeys(plan.num_tokens, "lightning")))
    scheduler.check()
    assert [req.id for req in scheduler.waiting] + [req.id for req in scheduler._held] == ["child"]
    assert child.num_preemptions == 1
    plan, _ = plan_and_update(scheduler)
    assert set(plan.leaves) == {"parent", "other", "child"}


def let_in(num_blocks=64, victims=(), prompt=10, **options):
    """a runs, in 3 blocks; b waits, finds 8 tokens of a's, and is let in."""
    scheduler = scheduler_of(num_blocks=num_blocks, **{"budget": 13, **options})
    scheduler.add(request("a", 10, max_tokens=2))
    plan_and_update(scheduler)
    scheduler.add(request("b", prompt, max_tokens=2))
    scheduler.let_in(scheduler.requests["b"], [scheduler.requests[name] for name in victims])
    return scheduler


def test_who_is_let_in_runs_with_what_it_found_and_takes_its_place_in_the_order():
    scheduler = let_in()
    b = scheduler.requests["b"]
    assert [req.id for req in scheduler.running] == ["a", "b"] and not scheduler.waiting
    assert (b.num_computed_tokens, b.num_cached_tokens, b.num_in_flight) == (8, 8, 0)
    scheduler.check()
    plan, deltas = plan_and_update(scheduler)
    assert plan.num_tokens == {"a": 1, "b": 2} and plan.start["b"] == 8
    assert [join.req_id for join in plan.joins] == ["b"] and len(plan.new_blocks["b"]) == 3
    assert deltas[1].num_cached_tokens == 8


@pytest.mark.parametrize(
    "num_blocks, options, wanted",
    [
        (4, {}, "ab"),  # 3 blocks are a's, of which b shares 2
        (3, {}, "a"),
        (64, {"max_num_seqs": 2}, "ab"),
        (64, {"max_num_seqs": 1}, "a"),
        (5, {"admission": ReserveAll(100)}, "a"),  # which counts what is shared twice
        (6, {"admission": ReserveAll(100)}, "ab"),
    ],
)
def test_nobody_is_let_in_where_there_is_no_place_no_block_or_no_admission(num_blocks, options, wanted):
    scheduler = let_in(num_blocks, **options)
    assert "".join(req.id for req in scheduler.running) == wanted
    scheduler.check()


@pytest.mark.parametrize("num_blocks, options", [(3, {}), (5, {"admission": ReserveAll(100)})])
def test_one_who_is_named_goes_for_a_block_or_for_an_admission_too(num_blocks, options):
    scheduler = let_in(num_blocks, "a", **options)
    assert [req.id for req in scheduler.running] == ["b"] and [req.id for req in scheduler.waiting] == ["a"]
    scheduler.check()


def test_an_admission_is_asked_of_the_first_token_of_who_is_let_in_beside_those_that_run():
    class Asked:
        def admits(self, *args):
            asked.append(args)
            return True

    asked = []
    scheduler = let_in(admission=Asked(), block_size=1)
    a, b = scheduler.running
    assert asked == [(b, 1, scheduler.running, scheduler.kv.usage)]
    assert len(scheduler.kv.blocks_of("b")) == b.num_computed_tokens + 1  # its part of the budget comes with the plan


@pytest.mark.parametrize("num_blocks, prompt, wanted", [(3, 10, ""), (4, 12, "a"), (4, 13, ""), (5, 13, "a")])
def test_where_prompts_are_not_cut_all_that_one_gets_is_room_for_the_whole_of_it(num_blocks, prompt, wanted):
    """What b needs beside the 2 blocks that it shares must be free, or a has to go for it."""
    scheduler = let_in(num_blocks, "a", prompt, chunked_prefill=False, budget=14)
    assert "".join(req.id for req in scheduler.running) == wanted and "b" in {req.id for req in scheduler.waiting}
    scheduler.check()


def test_room_is_counted_in_blocks_of_all_kv_groups():
    """8 tokens take 4 blocks where two groups of layers keep them, and 3 are free."""
    whole = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.prefix": "none"}
    engine = FakeEngine(num_blocks=7, windows=(None, None), **whole)
    engine.add("a", [1] * 8, max_tokens=2, min_tokens=2)
    engine.step()
    engine.add("b", [2] * 8, max_tokens=2, min_tokens=2)
    a, b = engine.scheduler.requests.values()
    engine.scheduler.let_in(b, [a])
    assert engine.scheduler.running == [] and engine.kv.usage.num_free == 7


def test_who_was_preempted_is_let_in_only_where_all_of_it_has_room():
    scheduler = scheduler_of(num_blocks=8)
    scheduler.add(request("a", [1] * 16)), scheduler.add(request("b", [2] * 16))
    plan_and_update(scheduler)
    a, b = scheduler.running
    scheduler.hold(["b"])
    plan_and_update(scheduler)
    scheduler.kv.forget_cached()
    scheduler.let_in(b, [a])
    assert scheduler.running == [] and [req.id for req in scheduler.waiting] == ["b", "a"]
    assert plan_and_update(scheduler)[0].stats.num_preempted == 1
