"""What a scheduler does with drafts: they are guesses, so they take only what nobody else needs."""

import pytest

from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.plan import StepOutput
from minivllm.request import EngineRequest, Request, SamplingParams
from minivllm.scheduler.base import Limits


class Driver:
    """A scheduler and its pool, with a worker that says what the test says."""

    def __init__(self, num_blocks=20, budget=64, max_model_len=60, lookahead=0, **overrides):
        config = EngineConfig.build("v1", {"kv.block_size": 4, **overrides})
        self.kv = build_kv(config, num_blocks, max_model_len)
        limits = Limits(8, budget, max_model_len, self.kv.capacity)
        self.scheduler = build_scheduler(config, self.kv, limits, lookahead).base

    def add(self, req_id: str, num_prompt: int, **params) -> Request:
        params = SamplingParams(temperature=0.0, **{"max_tokens": 30, **params})
        prompt = [sum(map(ord, req_id)) * 100 + i for i in range(num_prompt)]
        req = Request.make(EngineRequest(req_id, prompt, params))
        self.scheduler.add(req)
        return req

    def step(self, drafts: dict | None = None, accepted: dict | None = None):
        """accepted: how many of a request's planned drafts are right (none)."""
        plan = self.scheduler.schedule(0.0)
        out = StepOutput(drafts=drafts or {})
        for req_id, num_new in plan.num_tokens.items():
            known = self.scheduler.requests[req_id].num_tokens
            planned = plan.drafts.get(req_id, [])
            if plan.start[req_id] + num_new == known + len(planned):
                right = planned[: (accepted or {}).get(req_id, 0)]
                out.tokens[req_id] = [*right, 1]
        self.scheduler.update(plan, out)
        self.scheduler.check()
        return plan


def test_a_draft_is_planned_behind_what_is_known_and_progress_counts_what_was_accepted():
    driver = Driver()
    req = driver.add("a", 6)
    driver.step(drafts={"a": [11, 12, 13]})
    plan = driver.step(accepted={"a": 2}, drafts={"a": [21]})
    assert (plan.num_tokens, plan.start, plan.drafts) == ({"a": 4}, {"a": 6}, {"a": [11, 12, 13]})
    assert req.token_ids[6:] == [1, 11, 12, 1] and req.num_computed_tokens == 9
    assert (plan.stats.num_drafted, plan.stats.num_accepted) == (3, 2)
    assert driver.step().drafts == {"a": [21]}
    assert driver.step().num_tokens == {"a": 1}, "drafts are used once"


def test_no_draft_would_end_its_request():
    driver = Driver()
    driver.add("stop", 3, stop_token_ids=(77,))
    driver.add("eos", 3, eos_token_ids=(88,))
    driver.add("short", 3, max_tokens=4)
    driver.add("last", 3, max_tokens=2)
    driver.step(drafts={"stop": [5, 77, 6], "eos": [88, 5], "short": [5, 6, 7, 8, 9], "last": [5]})
    assert driver.step().drafts == {"stop": [5], "short": [5, 6]}


def test_drafts_end_before_the_longest_length():
    driver = Driver(max_model_len=10)
    driver.add("a", 6)
    driver.step(drafts={"a": [5] * 9})
    assert driver.step().drafts == {"a": [5, 5]}, "positions 7 and 8; the token behind them is the tenth"


def test_drafts_that_reach_the_longest_length_are_found():
    driver = Driver(max_model_len=10)
    req = driver.add("a", 6)
    driver.step()
    for num_drafts, is_right in ((0, True), (2, True), (3, False)):
        req.drafts = [5] * num_drafts
        if is_right:
            driver.scheduler.check()
        else:
            with pytest.raises(AssertionError):
                driver.scheduler.check()


def test_drafts_leave_every_running_request_a_token_of_the_budget():
    for kind in ("unified", "phased"):
        driver = Driver(budget=6, **{"scheduler.kind": kind, "scheduler.chunked_prefill": kind == "unified"})
        for name in "abc":
            driver.add(name, 2, max_tokens=4)
        driver.step(drafts={name: [5, 5] for name in "abc"})
        plan = driver.step()
        assert plan.num_tokens == {"a": 3, "b": 2, "c": 1}, kind
        assert plan.drafts == {"a": [5, 5], "b": [5]}


def test_nobody_is_preempted_for_a_guess():
    driver = Driver(num_blocks=4, max_model_len=16)
    driver.add("a", 7, max_tokens=2)
    driver.add("b", 7, max_tokens=9)
    driver.step(drafts={"b": [5, 6, 7]})
    plan = driver.step()
    assert plan.num_tokens == {"a": 1, "b": 1} and not plan.drafts and not plan.stats.num_preempted


def test_a_preempted_request_has_no_drafts_when_it_comes_back():
    driver = Driver()
    req = driver.add("a", 6)
    driver.step(drafts={"a": [11, 12]})
    driver.scheduler.preempt(req)
    assert not req.drafts
    plan = driver.step()
    assert not plan.drafts and plan.joins[0].token_ids == req.token_ids[:7]


def test_a_request_aborted_while_its_drafts_are_computed_leaves_nothing_behind():
    driver = Driver()
    driver.add("a", 6)
    driver.step(drafts={"a": [11, 12]})
    plan = driver.scheduler.schedule(0.0)
    driver.scheduler.abort("a")
    assert driver.scheduler.update(plan, StepOutput({"a": [11, 1]}, drafts={"a": [3]})) == []
    driver.scheduler.check()
    assert driver.kv.usage.num_free == 20


def test_rejected_drafts_are_never_published():
    driver = Driver()
    driver.add("a", 6)
    driver.step(drafts={"a": [11, 12, 13, 14, 15, 16]})
    driver.step()  # all refused: 7 tokens are computed, so one block of 4 is full
    assert driver.kv.tables["a"].num_published == 1
    driver.scheduler.abort("a")
    assert driver.kv.usage.num_cached == 1


def test_lookahead_is_room_behind_the_drafts_if_there_is_some():
    driver = Driver(num_blocks=4, lookahead=4, max_model_len=14)
    driver.add("a", 3, max_tokens=11)
    driver.step()
    driver.step(drafts={"a": [5, 6]})
    assert len(driver.kv.tables["a"].blocks) == 2, "4 known, 4 behind"
    driver.step(accepted={"a": 2})
    assert len(driver.kv.tables["a"].blocks) == 3, "7 known or drafted, 4 behind"
    driver.step(drafts={"a": [5] * 9})
    driver.step(accepted={"a": 1})
    assert len(driver.kv.tables["a"].blocks) == 4, "never beyond the last token that is fed back"


def test_drafts_of_all_requests_are_counted_and_so_are_those_that_were_right():
    driver = Driver()
    for name in "ab":
        driver.add(name, 6)
    driver.step(drafts={"a": [11, 12, 13], "b": [21, 22]})
    stats = driver.step(accepted={"a": 2, "b": 1}).stats
    assert (stats.num_drafted, stats.num_accepted) == (5, 3)


@pytest.mark.parametrize("lookahead, max_tokens, num_slots", [(0, 30, 7), (4, 30, 11), (4, 4, 9), (4, 2, 7)])
def test_lookahead_ends_where_the_request_does(lookahead, max_tokens, num_slots):
    driver = Driver(num_blocks=40, lookahead=lookahead, **{"kv.block_size": 1})
    driver.add("a", 6, max_tokens=max_tokens)
    driver.step()
    driver.scheduler.schedule(0.0)
    assert len(driver.kv.tables["a"].blocks) == num_slots


# --- behind a step in flight

AHEAD = {"spec_decode.method": "ngram", "spec_decode.k": 3, "kv.block_size": 1}


@pytest.mark.parametrize(
    "max_tokens, budget, lookahead, num_drafts, num_slots",
    [
        (30, 64, 0, 3, 6),  # 2 of the prompt, the token that is being sampled, and 3 behind it
        (30, 64, 4, 3, 10),
        (30, 2, 0, 1, 4),  # the budget is for one draft
        (30, 3, 4, 2, 9),
        (3, 64, 0, 1, 4),  # the last token needs no slot, and the one before it is the only draft that may be right
        (2, 64, 4, 0, 3),
        (6, 64, 4, 3, 7),
    ],
)
def test_a_plan_behind_a_step_in_flight_has_room_for_the_most_that_it_can_be(
    max_tokens, budget, lookahead, num_drafts, num_slots
):
    driver = Driver(40, budget, lookahead=lookahead, **AHEAD)
    driver.add("a", 2, max_tokens=max_tokens)
    driver.scheduler.schedule(0.0)
    plan = driver.scheduler.schedule(0.0)
    assert (plan.ahead, plan.start, plan.num_tokens) == ({"a": num_drafts}, {"a": 2}, {"a": 1 + num_drafts})
    assert len(driver.kv.tables["a"].blocks) == num_slots


@pytest.mark.parametrize(
    "sizes, ahead", [({"budget": 4}, {"a": 2, "b": 0}), ({"num_blocks": 7}, {"a": 0, "b": 0})], ids=["budget", "memory"]
)
def test_drafts_that_nobody_knows_yet_take_nobodys_token(sizes, ahead):
    driver = Driver(**{"num_blocks": 40, **sizes}, **AHEAD)
    for name in "ab":
        driver.add(name, 2, max_tokens=5)
    driver.scheduler.schedule(0.0)
    plan = driver.scheduler.schedule(0.0)
    assert plan.ahead == ahead and not plan.stats.num_preempted
    assert plan.num_tokens == {name: 1 + num_drafts for name, num_drafts in ahead.items()}


def test_a_plan_becomes_what_was_computed_when_the_step_before_it_has_landed():
    driver = Driver(40, **AHEAD)
    requests = [driver.add(name, 6) for name in "ab"]
    first, second, third = (driver.scheduler.schedule(0.0) for _ in range(3))
    assert (second.start, third.start) == ({"a": 6, "b": 6}, {"a": 10, "b": 10})
    for plan, tokens, drafts in (
        (first, {"a": [1], "b": [1]}, {"a": [11, 12], "b": [21]}),
        (second, {"a": [11, 1], "b": [21, 1]}, {"a": [31, 32, 33, 34, 35]}),
        (third, {"a": [1], "b": [1]}, {}),
    ):
        driver.scheduler.update(plan, StepOutput(tokens, drafts=drafts))
        driver.scheduler.check()
    assert (second.num_tokens, second.drafts) == ({"a": 3, "b": 2}, {"a": [11, 12], "b": [21]})
    assert (second.stats.num_drafted, second.stats.num_accepted) == (3, 2)
    assert (third.start, third.num_tokens, third.drafts) == ({"a": 8, "b": 8}, {"a": 4, "b": 1}, {"a": [31, 32, 33]})
    assert [req.token_ids[6:] for req in requests] == [[1, 11, 1, 1], [1, 21, 1, 1]]
    assert [req.num_computed_tokens for req in requests] == [9, 9]


def test_a_plan_in_flight_stays_as_it_is_for_a_request_that_has_left():
    driver = Driver(40, **AHEAD)
    for name in "ab":
        driver.add(name, 6)
    first, second = driver.scheduler.schedule(0.0), driver.scheduler.schedule(0.0)
    driver.scheduler.update(first, StepOutput({"a": [1], "b": [1]}, drafts={"a": [11], "b": [21]}))
    driver.scheduler.abort("b")
    driver.scheduler.update(second, StepOutput({"a": [11, 1], "b": [21, 1]}))
    driver.scheduler.check()
    assert second.num_tokens == {"a": 2, "b": 4} and second.drafts == {"a": [11]}
