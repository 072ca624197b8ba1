"""Rules: when a step runs, the workers have the items of every request in it ready, and at the end none; no step makes
more ready than it may, nor are more ready than there is room for; and whoever decodes goes on meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from fakes import FakeEngine, FakeItems, beside
from scheduler.direct import plan_and_update, request, scheduler_of

from minivllm.plan import Join, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.base import Limits, SchedulerBase
from minivllm.scheduler.items import HeldItems
from minivllm.scheduler.phased import PhasedScheduler
from minivllm.scheduler.static import StaticScheduler
from minivllm.scheduler.unified import UnifiedScheduler

PARAMS = SamplingParams()


def with_items(req_id: str, digests: Sequence[str]) -> Request:
    return Request(req_id, PARAMS, [0] * 9, 9, items=beside(digests)["items"])


class Driver:
    """Requests that join and leave as they like, as far as the items let them."""

    def __init__(self, seed: int, most_new: int | None, most: int | None):
        self.draw, self.held, self.worker = Random(seed), HeldItems(most_new, most), FakeItems()
        self.worker.contents = {digest: b"" for digest in "abcdef"}
        self.requests = {
            name: with_items(name, self.draw.choices("abcdef", k=self.draw.randint(0, 3))) for name in "01234567"
        }
        self.running: dict[str, None] = {}
        self.left: list[str] = []
        self.step = 0

    def leave(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.running:
                del self.running[name]
                self.held.leave(name)
                self.left.append(name)

    def plan(self, ends: bool = False) -> StepPlan:
        self.step += 1
        plan = StepPlan(self.step)
        names = list(self.running)
        self.leave(names if ends else self.draw.sample(names, self.draw.randint(0, len(names))))
        waiting = [] if ends else [name for name in self.requests if name not in self.running]
        for name in self.draw.sample(waiting, self.draw.randint(0, len(waiting))):
            if self.held.has_room(self.requests[name]) and self.held.is_within_step(self.requests[name]):
                self.held.join(self.requests[name])
                self.running[name] = None
                plan.joins.append(Join(name, [0], 9, PARAMS, items=self.requests[name].items))
        plan.leaves, self.left = self.left, []
        plan.num_tokens = dict.fromkeys(self.running, 1)
        self.held.drain(plan)
        self.held.check()
        return plan

    def lose(self, plan: StepPlan) -> None:
        self.left = [*plan.leaves, *self.left]
        self.held.take_back(plan)
        self.leave(list(plan.num_tokens))
        self.held.check()


@pytest.mark.parametrize("most_new, most", [(None, None), (1, None), (2, 4), (None, 3), (1, 3)])
@pytest.mark.parametrize("seed", range(10))
def test_items_are_ready_for_whoever_runs_and_gone_with_the_last(seed, most_new, most):
    """Plans are made ahead, and now and then one fails, before its items are ready or behind that: then those behind it
    do not run."""
    driver = Driver(seed, most_new, most)
    draw, worker, sure = driver.draw, driver.worker, True
    for _ in range(200):
        plans = [driver.plan() for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.3:  # aborted meanwhile
            driver.leave(draw.sample(list(driver.running), draw.randint(0, len(driver.running))))
        fails = draw.randrange(len(plans)) if draw.random() < 0.2 else len(plans)
        for plan in plans[:fails]:
            assert not (worker.ready & set(plan.encode) and sure), "it was ready"
            worker.take(plan)
            sure = True
            assert len(plan.encode) <= max(most_new or 9, 3) and len(worker.ready) <= (most or 9)
        if fails < len(plans) and draw.random() < 0.5:
            worker.take(plans[fails])
        for plan in plans[fails:]:
            driver.lose(plan)
            sure = False
        if fails == len(plans):
            wanted = {item.digest for name in plans[-1].num_tokens for item in driver.requests[name].items}
            assert worker.ready == wanted
    worker.take(driver.plan(ends=True))
    assert not worker.ready and any(worker.num_encoded)


@pytest.mark.parametrize("most_new", [1, 2, 5])
def test_a_step_makes_as_many_ready_as_it_may_but_always_those_of_one(most_new):
    held = HeldItems(most_new)
    assert held.is_within_step(with_items("large", "abcdefg"))
    for i in range(most_new):
        assert held.is_within_step(with_items(str(i), [str(i)]))
        held.join(with_items(str(i), [str(i)]))
    assert not held.is_within_step(with_items("x", "x")) and held.is_within_step(with_items("y", "0"))
    assert held.is_within_step(with_items("without", ""))
    held.drain(StepPlan(0))
    assert held.is_within_step(with_items("x", "x"))


def test_what_is_ready_or_made_so_for_another_costs_nothing():
    held = HeldItems(1)
    held.join(with_items("x", "ab"))  # more than a step may make ready, but of one request
    assert held.is_within_step(with_items("y", "b")) and not held.is_within_step(with_items("y", "c"))
    held.drain(StepPlan(0))
    held.leave("x")
    held.join(with_items("y", "c"))
    assert held.is_within_step(with_items("z", "a")) and not held.is_within_step(with_items("z", "ad"))


def test_an_item_of_many_requests_is_made_ready_once_also_when_one_hands_it_to_the_next():
    held, plans = HeldItems(), [StepPlan(i) for i in range(4)]
    held.join(with_items("x", "a")), held.join(with_items("y", "a"))
    held.drain(plans[0])
    held.leave("x")
    held.drain(plans[1])
    held.leave("y")
    held.join(with_items("z", "a"))
    held.drain(plans[2])
    held.leave("z")
    held.drain(plans[3])
    assert [(plan.encode, plan.forget) for plan in plans] == [(["a"], []), ([], []), ([], []), ([], ["a"])]


def test_whoever_leaves_before_a_plan_is_made_has_nothing_made_ready():
    held, plan = HeldItems(1), StepPlan(0)
    held.join(with_items("x", "a"))
    held.leave("x")
    assert held.is_within_step(with_items("y", "b"))
    held.drain(plan)
    assert (plan.encode, plan.forget) == ([], [])


def test_what_plans_that_never_ran_forgot_is_forgotten_by_the_next_one():
    held, plans = HeldItems(), [StepPlan(i) for i in range(4)]
    for name in "xyz":
        held.join(with_items(name, name))
    held.drain(plans[0])
    for name, plan in zip("xyz", plans[1:], strict=True):
        held.leave(name)
        held.drain(plan)
    for lost in plans[1:]:
        held.take_back(lost)
    last = StepPlan(4)
    held.drain(last)
    assert sorted(last.forget) == ["x", "y", "z"] and not last.encode


@pytest.mark.parametrize(
    "wrong, match",
    [
        (lambda held: held._users["a"].add("nobody"), "^an item's users are miscounted$"),
        (lambda held: held._users.update(b=set()), "^an item is held that nobody names$"),
        (lambda held: held._unmade.update(b=None), "^an item is made ready that nobody names$"),
        (lambda held: held._unused.update(a=None), "^an item is forgotten that somebody names$"),
        (lambda held: setattr(held, "most", 0), "^more items are held than there is room for$"),
    ],
    ids=["another user", "no user", "unwanted", "wanted", "too many"],
)
def test_a_wrong_count_is_found(wrong, match):
    held = HeldItems()
    held.join(with_items("x", "a"))
    held.check()
    wrong(held)
    with pytest.raises(AssertionError, match=match):
        held.check()


# ------------------------------------------------------------------------------------------------ in a scheduler

KINDS: list[type[SchedulerBase]] = [UnifiedScheduler, PhasedScheduler, StaticScheduler]


def scheduler_with(kind: type[SchedulerBase], most_new: int | None, most: int | None = None) -> SchedulerBase:
    scheduler = scheduler_of(kind, num_blocks=400, max_num_seqs=32, chunked_prefill=kind is UnifiedScheduler)
    limits = scheduler.limits
    bounds = limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, limits.kv_capacity
    return kind(scheduler.kv, Limits(*bounds, most_new, most), chunked_prefill=kind is UnifiedScheduler)


def arrive(scheduler: SchedulerBase, names: str, max_tokens: int = 30) -> None:
    for name in names:
        tokens = [ord(name), 1, 2]
        scheduler.add(request(name, tokens, max_tokens=max_tokens, items=beside([name])["items"]))


@pytest.mark.parametrize("most_new", [1, 2, 3])
def test_no_plan_encodes_more_and_every_plan_decodes_all_who_run(most_new):
    scheduler = scheduler_with(UnifiedScheduler, most_new)
    arrive(scheduler, "abcdefgh")
    while scheduler.waiting:
        plan_and_update(scheduler)
    arrive(scheduler, "ijklmnopqrstu")
    num_plans = 0
    while scheduler.waiting:
        running = {req.id for req in scheduler.running}
        plan, _ = plan_and_update(scheduler)
        num_plans += 1
        assert len(plan.encode) == min(most_new, 13 - most_new * (num_plans - 1))
        assert running <= plan.num_tokens.keys() and all(plan.num_tokens[req_id] == 1 for req_id in running)
        assert [join.req_id for join in plan.joins] == plan.encode  # each with its own, in the order of their arrival
    assert num_plans == -(-13 // most_new)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_passes_a_recording_that_waits_for_the_next_step(kind):
    """However cheap: what is behind it enters when it has, also one that needs nothing to be made ready."""
    scheduler = scheduler_with(kind, most_new=1)
    arrive(scheduler, "abc")
    scheduler.add(request("text", [7, 8, 9], max_tokens=4))
    joins = [[join.req_id for join in plan_and_update(scheduler)[0].joins] for _ in range(3)]
    assert joins == [["a"], ["b"], ["c", "text"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_waits_for_a_slot_as_it_does_for_blocks(kind):
    scheduler = scheduler_with(kind, most_new=None, most=2)
    arrive(scheduler, "abcde", max_tokens=3)
    ended: list[str] = []
    for _ in range(30):
        _, deltas = plan_and_update(scheduler)
        assert len(scheduler.running) <= 2
        ended += [delta.req_id for delta in deltas if delta.finish_reason]
    assert ended == list("abcde")


def test_a_static_batch_is_filled_over_several_steps():
    scheduler = scheduler_with(StaticScheduler, most_new=1)
    arrive(scheduler, "abcd")
    plans = [plan_and_update(scheduler)[0] for _ in range(5)]
    assert [list(plan.num_tokens) for plan in plans] == [["a"], ["b"], ["c"], ["d"], list("abcd")]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_preempted_is_made_ready_again_within_the_budget(kind):
    scheduler = scheduler_with(kind, most_new=1)
    arrive(scheduler, "abcd")
    for _ in range(5):
        plan_and_update(scheduler)
    scheduler.hold("abcd")
    plans = [plan_and_update(scheduler)[0] for _ in range(5)]
    assert sorted(plans[0].forget) == list("abcd")
    assert [plan.encode for plan in plans] == [[], ["a"], ["b"], ["c"], ["d"]]


def test_nobody_is_preempted_for_one_who_could_not_be_let_in_before_the_next_step():
    scheduler = scheduler_with(UnifiedScheduler, most_new=1, most=3)
    arrive(scheduler, "abc")
    for _ in range(3):
        plan_and_update(scheduler)
    arrive(scheduler, "de")
    first, second = scheduler.requests["d"], scheduler.requests["e"]
    scheduler.let_in(first, [scheduler.requests["c"]])
    assert [req.id for req in scheduler.running] == ["a", "b", "d"]
    scheduler.let_in(second, [scheduler.requests["b"]])
    assert [req.id for req in scheduler.running] == ["a", "b", "d"]
    assert plan_and_update(scheduler)[0].encode == ["d"]


def test_a_client_with_nothing_running_gets_in_where_all_slots_are_taken():
    options = {"scheduler.policy": "fair", "scheduler.max_num_seqs": 8}
    engine = FakeEngine(item_slots=2, **options)
    for i in range(6):
        engine.add(f"flood-{i}", [i, 1], client="a", items=[f"a{i}"], max_tokens=30, min_tokens=30)
    for _ in range(4):
        engine.step()
    engine.add("one", [9, 9], client="b", items=["b"], max_tokens=2, min_tokens=2)
    for _ in range(4):
        engine.step()
    assert engine.reasons == {"one": "length"}
    engine.run()
    assert max(engine.worker.items.num_encoded) == 1 and engine.worker.items.most == 2
