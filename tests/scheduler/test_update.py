"""What update() makes of a step's output, told by outputs that no model gave: deltas, ends, and what is dropped."""

import numpy as np
import pytest
from scheduler.direct import plan_and_update, request, scheduler_of

from minivllm.plan import Delta, StepOutput
from minivllm.request import PoolingParams

EOS, STOP = 7, 8
ENDS = {"eos_token_ids": (EOS,), "stop_token_ids": (STOP,)}


@pytest.mark.parametrize(
    "params, tokens, wanted, reason, stop_reason",
    [
        ({}, [5], [5], None, None),
        ({}, [EOS], [EOS], "stop", None),
        ({}, [STOP], [STOP], "stop", STOP),
        ({}, [5, STOP, 6], [5, STOP], "stop", STOP),
        ({"min_tokens": 1}, [EOS], [EOS], "stop", None),
        ({"min_tokens": 2}, [EOS], [EOS], None, None),
        ({"min_tokens": 2}, [STOP, EOS, 6], [STOP, EOS], "stop", None),
        ({"max_tokens": 2}, [5], [5], None, None),
        ({"max_tokens": 2}, [5, 5, 5], [5, 5], "length", None),
        ({"max_tokens": 1}, [EOS], [EOS], "stop", None),  # an end that the model chose goes before one it was given
        ({"max_tokens": 99}, [5] * 4, [5] * 4, None, None),
        ({"max_tokens": 99}, [5] * 6, [5] * 5, "length", None),  # 10 tokens are the longest
    ],
)
def test_a_request_takes_tokens_up_to_the_one_that_ends_it(params, tokens, wanted, reason, stop_reason):
    scheduler = scheduler_of(max_model_len=10)
    scheduler.add(request("a", 5, arrival_time=3.5, **{"max_tokens": 50, **ENDS, **params}))
    logprobs = [[(token, -0.5, 1)] for token in tokens]
    _, deltas = plan_and_update(scheduler, StepOutput({"a": tokens}, {"a": logprobs}))
    assert deltas == [Delta("a", wanted, reason, stop_reason, logprobs[: len(wanted)], arrival_time=3.5)]
    assert ("a" in scheduler.requests) == (reason is None)


def test_a_delta_says_how_much_the_cache_gave_at_first():
    scheduler = scheduler_of()
    scheduler.add(request("a", 10, max_tokens=1)), plan_and_update(scheduler)
    scheduler.add(request("b", 10))
    for _ in range(4):
        plan, (delta,) = plan_and_update(scheduler)
    scheduler.preempt(scheduler.requests["b"])
    plan, (delta,) = plan_and_update(scheduler)
    assert plan.start == {"b": 12}  # its own, which is no hit of its prompt's
    assert delta.num_cached_tokens == 8 and plan.stats.prefix_hits == 12


def test_prompt_log_probabilities_are_reported_once_chunk_by_chunk_whatever_is_computed_again():
    scheduler = scheduler_of(budget=4)
    scheduler.add(request("a", 9, prompt_logprobs=1, arrival_time=2.0))

    def step():
        plan = scheduler.schedule(0.0)
        start, num_tokens = plan.start["a"], plan.num_tokens["a"]
        of_prompt = [[(position, -1.0, 1)] for position in range(start + 1, min(start + num_tokens + 1, 9))]
        out = StepOutput(tokens={"a": [5]} if start + num_tokens == 9 else {}, prompt_logprobs={"a": of_prompt})
        (delta,) = scheduler.update(plan, out)
        assert delta.arrival_time == 2.0
        return delta.token_ids, [position for ((position, _, _),) in delta.prompt_logprobs]

    assert step() == ([], [1, 2, 3, 4])
    scheduler.preempt(scheduler.requests["a"])
    assert [step(), step()] == [([], []), ([], [5, 6, 7, 8])]
    scheduler.preempt(scheduler.requests["a"])
    assert [step(), step(), step()] == [([], []), ([], []), ([5], [])]
    assert scheduler.requests["a"].num_preemptions == 2


def test_a_vector_ends_its_request_and_nobody_else():
    scheduler = scheduler_of(budget=15)
    for name in "abc":
        scheduler.add(request(name, 6, pooling=PoolingParams(), arrival_time=4.0))
    vectors = {name: np.full(3, i, np.float32) for i, name in enumerate("ab")}
    plan, deltas = plan_and_update(scheduler, StepOutput(pooled=vectors))
    assert plan.num_tokens["c"] == 3  # half of it
    assert deltas == [Delta(name, [], "stop", arrival_time=4.0, pooled=vectors[name].tobytes()) for name in "ab"]
    assert list(scheduler.requests) == ["c"] == [req.id for req in scheduler.running]


def test_in_one_step_one_may_end_with_an_error_and_another_with_a_vector():
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request(name, 6, pooling=PoolingParams()))
    out = StepOutput(errors={"a": "NaN"}, pooled={"b": np.zeros(2, np.float32)})
    _, deltas = plan_and_update(scheduler, out)
    assert [(delta.req_id, delta.finish_reason) for delta in deltas] == [("a", "error"), ("b", "stop")]
    assert not scheduler.requests and not scheduler.running


def test_a_vector_says_how_much_the_cache_gave():
    scheduler = scheduler_of()
    scheduler.add(request("a", 10)), plan_and_update(scheduler)
    scheduler.add(request("b", 10, pooling=PoolingParams()))
    plan = scheduler.schedule(0.0)
    deltas = scheduler.update(plan, StepOutput(tokens={"a": [5]}, pooled={"b": np.zeros(2, np.float32)}))
    assert deltas[1].num_cached_tokens == 8


def test_an_error_ends_its_own_request_and_those_behind_it_get_their_tokens():
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.add(request(name, 6, arrival_time=4.0))
    plan, deltas = plan_and_update(scheduler, StepOutput({"a": [1], "b": [2], "c": [3]}, errors={"b": "NaN"}))
    assert [(delta.req_id, delta.token_ids) for delta in deltas] == [("a", [1]), ("b", []), ("c", [3])]
    assert deltas[1] == Delta("b", [], "error", error="NaN", arrival_time=4.0)
    assert [req.num_computed_tokens for req in scheduler.running] == [6, 6]


@pytest.mark.parametrize("leave", ["abort", "preempt"])
def test_what_was_in_flight_for_one_that_left_is_dropped_and_the_others_get_theirs(leave):
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.add(request(name, 6))
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    if leave == "abort":
        scheduler.abort("b")
        scheduler.add(request("b", 6))  # another one of that name
    else:
        scheduler.preempt(scheduler.requests["b"])
    scheduler.check()
    plans.append(scheduler.schedule(0.0))
    assert plans[2].num_tokens == {"a": 1, "b": 6, "c": 1} and [plan.num_in_flight for plan in plans] == [0, 1, 2]
    # Neither a token, nor a vector, nor an error of what was computed before.
    vectors = {"b": np.zeros(2, np.float32)}
    outs = [{"pooled": vectors}, {"errors": {"b": "NaN"}}, {}]
    for plan, out, wanted in zip(plans, outs, ("ac", "ac", "abc"), strict=True):
        deltas = scheduler.update(plan, StepOutput({name: [1] for name in plan.num_tokens}, **out))
        assert "".join(sorted(delta.req_id for delta in deltas)) == wanted
        scheduler.check()
