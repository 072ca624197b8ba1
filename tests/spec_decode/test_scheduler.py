"""What a scheduler does with drafts: they are guesses, so they take only what nobody else needs."""

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
