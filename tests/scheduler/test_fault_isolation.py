"""A step that raises ends the request that made it raise, and no other output differs by a token."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, beam_oracle, oracle

from minivllm.request import BeamSearchParams

CONFIGS = {
    "unified": {},
    "in flight": {"overlap": 2},
    "in flight, late by chance": {"overlap": 2, "stream_seed": 5},
    "phased": {"scheduler.kind": "phased", "scheduler.chunked_prefill": False},
    "static": {"scheduler.kind": "static", "scheduler.chunked_prefill": False},
    "swap": {"kv.preemption": "swap", "kv.prefix": "none", "scheduler.kind": "phased",
             "scheduler.chunked_prefill": False},
    "short of blocks": {"num_blocks": 14},
    "disturbed": {"debug.preempt_every": 3},
    "drafts": {"spec_decode.method": "ngram"},
}  # fmt: skip
PROMPTS = {"a": [1] * 9, "bad": [2] * 6, "c": [3] * 13, "d": [4] * 2, "e": [1] * 12}


def sabotage(engine, raises):
    """Have the worker raise for any plan that `raises` says so of: some before its rows have joined, some after."""
    execute, num_raised = engine.worker.execute, 0

    def sabotaged(plan):
        nonlocal num_raised
        if not raises(plan):
            return execute(plan)
        num_raised += 1
        if num_raised % 2:
            execute(plan)
        raise RuntimeError("lightning")

    engine.worker.execute = sabotaged
    return lambda: num_raised


def run(engine, max_steps=500):
    """Errors by request. Tokens are in engine.tokens."""
    errors = {}
    for _ in range(max_steps):
        if not engine.core.has_work:
            break
        engine.now += 1.0
        for delta in engine.core.step():
            engine.tokens[delta.req_id] += delta.token_ids
            if delta.error is not None:
                errors[delta.req_id] = delta.error
    assert not engine.core.has_work
    engine.core.step()
    assert engine.kv.usage.num_free == engine.kv.usage.num_total and not engine.worker.rows.of
    return errors


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("at", [1, 4])
def test_only_the_request_that_makes_steps_raise_is_ended(config, at):
    engine = FakeEngine(**config)
    params = {name: engine.add(name, prompt, max_tokens=12) for name, prompt in PROMPTS.items()}

    def raises(plan):
        return plan.start.get("bad", -1) + plan.num_tokens.get("bad", 0) >= len(PROMPTS["bad"]) + at - 1

    sabotage(engine, raises)
    wanted = {name: oracle(prompt, params[name]) for name, prompt in PROMPTS.items()}
    expected = {"bad": "RuntimeError: lightning"} if len(wanted["bad"]) >= at else {}
    assert expected and run(engine) == expected
    assert engine.tokens["bad"] == wanted["bad"][: len(engine.tokens["bad"])]
    for name in PROMPTS.keys() - {"bad"}:
        assert engine.tokens[name] == wanted[name], name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_failure_that_nobody_alone_repeats_ends_nobody(config):
    engine = FakeEngine(**config)
    params = {name: engine.add(name, prompt, max_tokens=8) for name, prompt in PROMPTS.items()}
    num_raised = sabotage(engine, lambda plan: len(plan.num_tokens) > 2)
    assert run(engine) == {} and num_raised()
    for name, prompt in PROMPTS.items():
        assert engine.tokens[name] == oracle(prompt, params[name]), name


def test_if_every_step_raises_each_request_ends_with_the_error():
    engine = FakeEngine()
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=8)
    sabotage(engine, lambda plan: bool(plan.num_tokens))
    assert run(engine, max_steps=20) == dict.fromkeys(PROMPTS, "RuntimeError: lightning")


def test_untried_requests_that_are_aborted_and_requests_that_arrive_meanwhile_do_not_matter():
    engine = FakeEngine()
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=8)
    sabotage(engine, lambda plan: "bad" in plan.num_tokens)
    assert engine.core.step() == []
    engine.core.abort(["a", "c"])
    params = engine.add("new", [5] * 7, max_tokens=8)
    assert run(engine) == {"bad": "RuntimeError: lightning"}
    assert engine.tokens["new"] == oracle([5] * 7, params)


def test_beams_are_told_apart_from_others():
    engine = FakeEngine()
    beam = BeamSearchParams(beam_width=3, max_tokens=6)
    ids = engine.add_beams("beams", [8] * 5, beam)
    engine.add("bad", [2] * 6, max_tokens=12)
    sabotage(engine, lambda plan: "bad" in plan.num_tokens and plan.step >= 2)
    assert run(engine) == {"bad": "RuntimeError: lightning"}
    assert [engine.tokens[req_id] for req_id in ids] == beam_oracle([8] * 5, beam)
