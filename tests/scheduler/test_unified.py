import pytest
from fakes import EOS, FakeEngine, oracle

from minivllm.errors import BadRequest, NeverFits
from minivllm.scheduler.base import Limits, SchedulerBase
from minivllm.scheduler.unified import UnifiedScheduler


def plans(engine, steps):
    """{request: tokens} of the next steps."""
    seen, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda now: (plan := schedule(now), seen.append(dict(plan.num_tokens)))[0]
    for _ in range(steps):
        engine.step()
    engine.scheduler.schedule = schedule
    return seen


def test_a_prompt_is_cut_to_the_budget_and_decodes_go_first():
    engine = FakeEngine(**{"scheduler.max_num_batched_tokens": 10})
    engine.add("a", [1] * 4, max_tokens=20, min_tokens=20)
    assert plans(engine, 1) == [{"a": 4}]
    engine.add("b", [2] * 25, max_tokens=20, min_tokens=20)
    assert plans(engine, 4) == [{"a": 1, "b": 9}, {"a": 1, "b": 9}, {"a": 1, "b": 7}, {"a": 1, "b": 1}]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits():
    engine = FakeEngine(**{"scheduler.max_num_batched_tokens": 40, "scheduler.chunked_prefill": False})
    engine.add("a", [1] * 20, max_tokens=9, min_tokens=9)
    engine.add("b", [2] * 25, max_tokens=9, min_tokens=9)
    assert plans(engine, 2) == [{"a": 20}, {"a": 1, "b": 25}]


def test_fcfs_serves_in_order_of_arrival_and_does_not_overtake():
    engine = FakeEngine(num_blocks=8, max_model_len=30)
    engine.add("a", [1] * 16, max_tokens=8, min_tokens=8)
    engine.add("b", [2] * 20, max_tokens=8)
    engine.add("c", [3] * 2, max_tokens=1)
    assert plans(engine, 1) == [{"a": 16}]  # b does not fit beside a, and c, which would, waits its turn


def test_priority_serves_the_smaller_number_first_and_preempts_the_larger():
    engine = FakeEngine(num_blocks=6, **{"scheduler.policy": "priority"})
    engine.add("late", [1] * 8, priority=5, max_tokens=16, min_tokens=16)
    engine.step()
    engine.add("urgent", [2] * 8, priority=-1, max_tokens=16, min_tokens=16)
    engine.run()
    assert engine.core.stats.num_preempted > 0
    order = list(engine.reasons)
    assert order == ["urgent", "late"]


def test_the_request_that_arrived_last_is_preempted_first_and_returns_to_its_place():
    engine = FakeEngine(num_blocks=8)
    for name, fill in (("a", 1), ("b", 2)):
        engine.add(name, [fill] * 8, max_tokens=20, min_tokens=20)
    while not engine.core.stats.num_preempted:
        engine.step()
    engine.add("c", [3], max_tokens=1)
    assert [r.id for r in reversed(engine.scheduler.waiting)] == ["b", "c"]
    assert engine.scheduler.requests["b"].num_preemptions == 1
    engine.run()


def test_num_seqs_bounds_the_requests_in_a_step():
    engine = FakeEngine(**{"scheduler.max_num_seqs": 2})
    for i in range(5):
        engine.add(str(i), [i], max_tokens=3, min_tokens=3)
    assert max(map(len, plans(engine, 9))) == 2
    engine.run()


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([1] * 40, {}, "40 tokens.*max_model_len is 40"),
        ([], {}, "empty"),
        ([1] * 10, {"max_tokens": 30}, "may reach 39 tokens; the KV pool holds 24"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_both_numbers(prompt, params, message):
    engine = FakeEngine(num_blocks=6, max_model_len=40)
    with pytest.raises(BadRequest, match=message):
        engine.add("a", prompt, **params)
    assert not engine.core.has_work
    engine.add("b", [1] * 4, max_tokens=4)
    engine.run()


def test_without_chunks_a_request_longer_than_a_step_is_refused():
    engine = FakeEngine(**{"scheduler.max_num_batched_tokens": 40, "scheduler.chunked_prefill": False})
    with pytest.raises(NeverFits, match="Raise scheduler.max_num_batched_tokens"):
        engine.add("a", [1] * 20, max_tokens=22)
    engine.add("b", [1] * 20, max_tokens=21)


def test_an_id_in_use_is_refused():
    engine = FakeEngine()
    engine.add("a", [1])
    with pytest.raises(BadRequest, match='"a" is in use'):
        engine.add("a", [1])


@pytest.mark.parametrize(
    "params, reason",
    [({"max_tokens": 5, "min_tokens": 5}, "length"), ({"max_tokens": 400, "stop_token_ids": (EOS,)}, "stop")],
)
def test_finish_reasons(params, reason):
    engine = FakeEngine(num_blocks=200)
    params = engine.add("a", [5, 6], **params)
    engine.run()
    assert engine.reasons["a"] == reason
    assert engine.tokens["a"] == oracle([5, 6], params, engine.max_model_len)


def test_the_models_length_ends_a_request():
    engine = FakeEngine(max_model_len=11)
    engine.add("a", [1] * 8, max_tokens=100, min_tokens=50)
    engine.run()
    assert len(engine.tokens["a"]) == 3 and engine.reasons["a"] == "length"


def test_the_same_calls_make_the_same_plans():
    def history():
        engine = FakeEngine(num_blocks=12, **{"kv.hash_seed": "x"})
        for i in range(12):
            engine.add(str(i), [i % 3] * (i + 1), max_tokens=6)
        return plans(engine, 40)

    assert history() == history()


def test_a_toy_scheduler_from_outside_needs_one_class_and_one_line():
    from minivllm.features import SCHEDULERS

    class OneAtATime(UnifiedScheduler):
        def __init__(self, kv, limits, *args, **kwargs):
            limits = Limits(1, limits.max_num_batched_tokens, limits.max_model_len, limits.kv_capacity)
            super().__init__(kv, limits, *args, **kwargs)

    SCHEDULERS.register("one_at_a_time", OneAtATime)
    try:
        engine = FakeEngine(**{"scheduler.kind": "one_at_a_time"})
        wanted = {name: oracle([i], engine.add(name, [i], max_tokens=5)) for i, name in enumerate("abc")}
        assert max(map(len, plans(engine, 8))) == 1
        assert engine.run() == wanted
    finally:
        SCHEDULERS.unregister("one_at_a_time")


def test_plans_carry_each_fact_once():
    """A worker learns a request's tokens when it joins, and a block when the table gains it."""
    engine = FakeEngine()
    engine.add("a", [1] * 6, max_tokens=9, min_tokens=9)
    seen = []
    update = engine.scheduler.update
    engine.scheduler.update = lambda plan, out: (seen.append(plan), update(plan, out))[1]
    engine.run()
    assert [len(plan.joins) for plan in seen] == [1] + [0] * 8
    gained = [plan.new_blocks.get("a", []) for plan in seen]
    assert [len(blocks) for blocks in gained] == [2, 0, 0, 1, 0, 0, 0, 1, 0]
    assert isinstance(engine.scheduler, SchedulerBase)
