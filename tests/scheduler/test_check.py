"""check() and the asserts of planning: what each says of a scheduler that breaks its promise.

A scheduler of somebody else's is found out by these, so each must see its own fault, and name it.
"""

import pytest
from fakes import FakeEngine

from minivllm.plan import StepPlan
from minivllm.scheduler.static import StaticScheduler
from minivllm.scheduler.unified import UnifiedScheduler

STATIC = {"scheduler.kind": "static", "scheduler.chunked_prefill": False}


def engine_with_queues(**options):
    """a and b run; c, d and e wait."""
    engine = FakeEngine(max_model_len=40, **{"scheduler.max_num_seqs": 2, **options})
    for name in "abcde":
        engine.add(name, [ord(name)] * 5, max_tokens=9, min_tokens=9)
    engine.step(), engine.step()
    engine.scheduler.check()
    return engine


def complaint(scheduler):
    with pytest.raises(AssertionError) as caught:
        scheduler.check()
    return str(caught.value)


@pytest.mark.parametrize(
    "disturb, message",
    [
        (lambda s: s.running.reverse(), "a queue is out of order"),
        (lambda s: s.waiting.reverse(), "a queue is out of order"),
        (lambda s: s.running.append(s.running[-1]), "a request is in no queue, or in two"),
        (lambda s: s.waiting.append(s.waiting[-1]), "a request is in no queue, or in two"),
        (lambda s: s._held.append(s.waiting[-1]), "a request is in no queue, or in two"),
        (lambda s: s.running.pop(), "a request is in no queue, or in two"),
        (lambda s: s.waiting.pop(), "a request is in no queue, or in two"),
        (lambda s: s.requests.update(x=s.requests.pop("c")), ""),
        (lambda s: s.in_flight._dropped.update({99: {"a"}}), "a plan that has landed is remembered"),
    ],
)
def test_check_names_what_is_wrong_with_the_queues(disturb, message):
    engine = engine_with_queues()
    disturb(engine.scheduler)
    assert complaint(engine.scheduler) == message


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("a", "num_computed_tokens", -1),
        ("a", "num_computed_tokens", 7),  # as many as it has tokens: nothing is left that could give the next one
        ("a", "token_ids", [1] * 41),
        ("b", "num_in_flight", 1),
        ("b", "drafts", [1] * 33),  # with them and one more token it would be longer than the longest
        ("c", "num_computed_tokens", 1),
        ("d", "num_in_flight", 1),
        ("e", "drafts", [1]),
    ],
)
def test_check_sees_a_request_that_counts_what_it_has_not(name, field, value):
    engine = engine_with_queues()
    setattr(engine.scheduler.requests[name], field, value)
    complaint(engine.scheduler)


@pytest.mark.parametrize(
    "name, field, value", [("a", "num_computed_tokens", 0), ("a", "token_ids", [1] * 40), ("b", "drafts", [1] * 32)]
)
def test_check_lets_pass_what_is_just_allowed(name, field, value):
    engine = engine_with_queues()
    setattr(engine.scheduler.requests[name], field, value)
    engine.scheduler.check()


def test_check_sees_blocks_that_nobody_who_runs_can_have():
    engine = FakeEngine()
    engine.add("a", [1] * 5)
    engine.kv.allocate(engine.scheduler.requests["a"], 5)
    assert complaint(engine.scheduler) == "blocks in use though no request runs"


def test_check_sees_a_static_batch_with_more_members_than_seats():
    engine = engine_with_queues(**STATIC)
    engine.scheduler._num_seats = 1
    assert complaint(engine.scheduler) == "the batch has more members than seats"
    engine.scheduler._num_seats = 0
    engine.scheduler._ended.append(engine.scheduler.requests["a"])
    assert complaint(engine.scheduler) == "the batch has more members than seats"


def test_check_sees_blocks_of_a_static_batch_that_has_ended():
    engine = FakeEngine(**STATIC)
    engine.add("a", [1] * 5)
    engine.scheduler._ended.append(engine.scheduler.requests["a"])
    assert complaint(engine.scheduler) == "nobody runs, and ended requests keep their blocks"


def test_check_sees_a_trial_of_a_request_that_has_gone():
    engine = engine_with_queues()
    isolation = engine.core.scheduler.inner
    isolation._untried["nobody"] = None
    assert complaint(engine.core.scheduler) == "a request that has gone is to be tried"


class Greedy(UnifiedScheduler):
    """Takes what it was not given."""

    more_tokens = more_places = 0

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        for _ in range(self.more_places + 1):
            self._try_admit(plan, self.waiting[-1], 0, 1)
        plan.num_tokens["a"] += self.more_tokens


@pytest.mark.parametrize(
    "more, message",
    [
        ({}, None),
        ({"more_tokens": 7}, None),  # 1 + 7 tokens: just the budget
        ({"more_tokens": 8}, "the step's token budget is exceeded"),
        ({"more_places": 1}, None),
        ({"more_places": 2}, "more requests run than may"),
    ],
)
def test_a_plan_beyond_the_limits_is_never_handed_out(more, message):
    engine = FakeEngine(**{"scheduler.max_num_batched_tokens": 8, "scheduler.max_num_seqs": 2})
    scheduler = Greedy(engine.kv, engine.scheduler.limits)
    for name, value in more.items():
        setattr(scheduler, name, value)
    engine.core.scheduler = engine.scheduler = scheduler
    for name in "abc":
        engine.add(name, [ord(name)] * 5)
    if message is None:
        scheduler.schedule(0.0)
    else:
        with pytest.raises(AssertionError, match=f"^{message}$"):
            scheduler.schedule(0.0)


def test_only_who_runs_can_be_preempted():
    engine = engine_with_queues()
    with pytest.raises(AssertionError, match="^c is not running$"):
        engine.scheduler.preempt(engine.scheduler.requests["c"])


def test_static_batching_refuses_to_cut_prompts():
    engine = FakeEngine()
    message = "^static batching computes prompts whole: scheduler.chunked_prefill=false$"
    with pytest.raises(AssertionError, match=message):
        StaticScheduler(engine.kv, engine.scheduler.limits)
