"""Rule: when a step runs, the workers hold the items of every request in it, each carried once; at the end, none."""

from __future__ import annotations

from random import Random

import pytest

from minivllm.plan import Join, StepPlan
from minivllm.request import Item, Request, SamplingParams
from minivllm.scheduler.items import HeldItems

PARAMS = SamplingParams()


def request(req_id: str, digests: list[str]) -> Request:
    items = tuple(Item(i, 1, digest) for i, digest in enumerate(digests))
    contents = {digest: digest.encode() for digest in digests}
    return Request(req_id, PARAMS, [0] * 9, 9, items=items, contents=contents)


class Worker:
    def __init__(self):
        self.held: dict[str, bytes] = {}
        self.num_carried = 0

    def run(self, plan: StepPlan) -> None:
        for digest in plan.forget:
            self.held.pop(digest, None)
        assert not self.held.keys() & dict(plan.encode).keys() or plan.leaves, "it was there"
        self.held |= dict(plan.encode)
        self.num_carried += len(plan.encode)


@pytest.mark.parametrize("seed", range(20))
def test_items_are_there_for_whoever_runs_and_gone_with_the_last(seed):
    draw, held, worker = Random(seed), HeldItems(), Worker()
    requests = {name: request(name, draw.choices("abcd", k=draw.randint(0, 3))) for name in map(str, range(8))}
    running: set[str] = set()
    for step in range(200):
        last = step == 199
        plan = StepPlan(step)
        plan.leaves = sorted(running if last else draw.sample(sorted(running), draw.randint(0, len(running))))
        before, running = running, running - set(plan.leaves)
        waiting = sorted(requests.keys() - running)
        joins = [] if last else draw.sample(waiting, draw.randint(0, len(waiting)))
        plan.joins = [Join(name, [0], 9, PARAMS, items=requests[name].items) for name in joins]
        running |= set(joins)
        held.fill(plan, requests)
        held.check()
        if not last and draw.random() < 0.2:  # lost: who joined leaves with the next plan, and so do earlier leavers
            held.take_back(plan)
            undo = StepPlan(step, leaves=[*plan.leaves, *joins])
            running -= set(joins)
            held.fill(undo, requests)
            plan = undo
        worker.run(plan)
        wanted = {item.digest for name in running for item in requests[name].items}
        assert wanted == worker.held.keys(), (before, plan)


def test_an_item_of_many_requests_is_carried_once():
    held, worker = HeldItems(), Worker()
    requests = {name: request(name, ["a"]) for name in "xyz"}
    for name in "xyz":
        plan = StepPlan(0, joins=[Join(name, [0], 9, PARAMS, items=requests[name].items)])
        held.fill(plan, requests)
        worker.run(plan)
    assert worker.num_carried == 1


def test_what_plans_that_never_ran_forgot_is_forgotten_by_the_next_one():
    held, worker = HeldItems(), Worker()
    requests = {name: request(name, [name]) for name in "xyz"}
    joins = [Join(name, [0], 9, PARAMS, items=requests[name].items) for name in "xyz"]
    plans = [StepPlan(0, joins=joins), StepPlan(1, leaves=["x"]), StepPlan(2, leaves=["y"]), StepPlan(3, leaves=["z"])]
    for plan in plans:
        held.fill(plan, requests)
    worker.run(plans[0])
    for lost in plans[1:]:
        held.take_back(lost)
    last = StepPlan(4)
    held.fill(last, requests)
    assert sorted(last.forget) == ["x", "y", "z"]
    worker.run(last)
    assert not worker.held


@pytest.mark.parametrize(
    "wrong, match",
    [
        (lambda held: held._users["a"].add("nobody"), "^an item's users are miscounted$"),
        (lambda held: held._users.update(b=set()), "^an item is held that nobody names$"),
    ],
    ids=["another user", "no user"],
)
def test_a_wrong_count_is_found(wrong, match):
    held, requests = HeldItems(), {"x": request("x", ["a"])}
    held.fill(StepPlan(0, joins=[Join("x", [0], 9, PARAMS, items=requests["x"].items)]), requests)
    held.check()
    wrong(held)
    with pytest.raises(AssertionError, match=match):
        held.check()
