import random

import pytest
from fakes import FakeEngine, oracle

from minivllm.errors import ConfigError, NeverFits

V0 = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.prefix": "none", "kv.fork": "share"}


class Watched(FakeEngine):
    """Keeps every plan."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**V0, **kwargs})
        self.plans = []
        execute = self.worker.execute
        self.worker.execute = lambda plan: (self.plans.append(plan), execute(plan))[1]

    @property
    def tokens_by_step(self):
        return [dict(plan.num_tokens) for plan in self.plans]


def test_a_step_is_all_prefill_or_all_decode_and_prefill_goes_first():
    engine = Watched()
    engine.add("a", [1] * 6, max_tokens=5, min_tokens=5)
    engine.step(), engine.step()
    engine.add("b", [2] * 9, max_tokens=5, min_tokens=5)
    engine.add("c", [3] * 4, max_tokens=5, min_tokens=5)
    engine.step(), engine.step()
    assert engine.tokens_by_step == [{"a": 6}, {"a": 1}, {"b": 9, "c": 4}, {"a": 1, "b": 1, "c": 1}]


def test_a_new_prompt_stalls_running_requests_where_v1_does_not():
    """The reason for V1's scheduler, asserted in steps: how often a request that could decode got no token."""
    stalls = {}
    for kind, chunked in (("phased", False), ("unified", True)):
        engine = Watched(**{"scheduler.kind": kind, "scheduler.chunked_prefill": chunked})
        engine.add("chat", [1] * 4, max_tokens=30, min_tokens=30)
        engine.step()
        for i in range(6):
            engine.add(f"long{i}", [i] * 40, max_tokens=2, min_tokens=2)
            engine.step(), engine.step()
        stalls[kind] = sum("chat" not in plan for plan in engine.tokens_by_step)
    assert stalls == {"phased": 6, "unified": 0}


def test_a_group_forks_a_prompt_that_was_in_flight_when_it_asked():
    engine = Watched(**{"engine.overlap": 2})
    for i in range(3):
        params = engine.add(f"g#{i}", [5] * 10, group="g", max_tokens=6, min_tokens=6)
    assert set(map(tuple, engine.run().values())) == {tuple(oracle([5] * 10, params))}
    assert sum(plan.total_tokens for plan in engine.plans) == 10 + 1 + 1 + 3 * 5  # and no prompt twice
    assert sum(len(plan.copies) for plan in engine.plans) == 2


def test_a_group_computes_its_prompt_once_and_forks_it():
    engine = Watched()
    prompt = [5] * 10
    for i in range(3):
        params = engine.add(f"g#{i}", prompt, group="g", max_tokens=6, min_tokens=6)
    assert set(map(tuple, engine.run().values())) == {tuple(oracle(prompt, params))}
    assert engine.tokens_by_step[:3] == [{"g#0": 10}, {"g#0": 1, "g#1": 1, "g#2": 1}, {"g#0": 1, "g#1": 1, "g#2": 1}]
    forked = engine.plans[1]
    assert forked.start["g#1"] == 9 and len(forked.copies) == 2
    full = [plan for plan in engine.plans[0].new_blocks["g#0"][:2]]
    assert forked.new_blocks["g#1"][:2] == forked.new_blocks["g#2"][:2] == full


def test_sharing_saves_the_blocks_of_the_prompt():
    """Parallel sampling, the paper's section 6.3: memory saved is the prompt's share of all tokens, n - 1 times."""
    used = {}
    for grouped in (True, False):
        engine = Watched()
        for i in range(4):
            engine.add(f"g#{i}", [5] * 40, group="g" if grouped else "", max_tokens=8, min_tokens=8)
        for _ in range(4):
            engine.step()
        used[grouped] = engine.kv.usage.num_total - engine.kv.usage.num_free
    assert used[False] == 4 * 11 and used[True] == 11 + 3 * 2


def test_a_group_is_preempted_as_a_whole_the_latest_first():
    engine = Watched(num_blocks=14)
    wanted = {}
    for name, fill in (("a", 1), ("b", 2)):
        for i in range(2):
            params = engine.add(f"{name}#{i}", [fill] * 7, group=name, max_tokens=14, min_tokens=14)
            wanted[f"{name}#{i}"] = oracle([fill] * 7, params)
    assert engine.run() == wanted
    preempted = [set(plan.leaves) for plan in engine.plans if plan.stats.num_preempted]
    assert preempted and all(leaves == {"b#0", "b#1"} for leaves in preempted)
    assert all(reason == "length" for reason in engine.reasons.values())


def test_a_group_too_large_for_the_pool_is_refused():
    engine = Watched(num_blocks=8)
    engine.add("g#0", [1] * 9, group="g", max_tokens=10)
    with pytest.raises(NeverFits, match="2 sequences of this request run together"):
        engine.add("g#1", [1] * 9, group="g", max_tokens=10)
    engine.run()


@pytest.mark.parametrize("kind", ["phased", "unified"])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_every_way_to_preempt_gives_the_same_tokens(kind, preemption):
    chunked = kind == "unified"
    config = {"scheduler.kind": kind, "kv.preemption": preemption, "scheduler.chunked_prefill": chunked}
    engine = Watched(num_blocks=16, **config)
    wanted = {}
    for i in range(8):
        prompt = [i] * (3 + i)
        wanted[str(i)] = oracle(prompt, engine.add(str(i), prompt, max_tokens=16, min_tokens=16))
    assert engine.run() == wanted
    swapped = sum(len(plan.swap_out) for plan in engine.plans)
    returned = sum(len(plan.swap_in) for plan in engine.plans)
    assert engine.core.stats.num_preempted > 0 and swapped == returned
    assert (swapped > 0) == (preemption != "recompute")
    notes = [note for plan in engine.plans for note in plan.notes]
    assert len(notes) == engine.core.stats.num_preempted and all(note.startswith("preempt ") for note in notes)
    engine.kv.swap._reclaim()
    assert engine.kv.swap.pool.num_free == engine.kv.swap.pool.num_blocks and not engine.kv.swap.kept


def test_a_swapped_request_computes_no_token_twice():
    engine = Watched(num_blocks=12, **{"kv.preemption": "swap"})
    for i in range(3):
        engine.add(str(i), [i] * 9, max_tokens=15, min_tokens=15)
    engine.run()
    assert engine.core.stats.num_preempted > 0
    assert sum(plan.total_tokens for plan in engine.plans) == 3 * (9 + 14)


def test_aborting_what_is_on_the_host_frees_it():
    engine = Watched(num_blocks=12, **{"kv.preemption": "swap"})
    for i in range(3):
        engine.add(str(i), [i] * 9, max_tokens=15, min_tokens=15)
    while not engine.kv.swap.kept:
        engine.step()
    engine.core.abort(list(engine.kv.swap.kept))
    engine.run()
    engine.scheduler.check()
    assert not engine.kv.swap.kept


def test_phased_refuses_chunked_prefill_with_the_reason():
    with pytest.raises(ConfigError, match="a step is all prefill or all decode"):
        FakeEngine(**{**V0, "scheduler.chunked_prefill": True})


def test_random_groups_aborts_and_preemptions_leak_no_block():
    rng = random.Random(7)
    engine = Watched(num_blocks=30, max_model_len=40, **{"kv.preemption": "auto", "debug.preempt_every": 3})
    for i in range(60):
        n = rng.choice((1, 1, 3))
        for child in range(n):
            prompt = [i] * rng.randrange(1, 9) if n == 1 else [i] * 5
            engine.add(f"{i}#{child}", prompt, group=str(i) if n > 1 else "", max_tokens=rng.randrange(1, 5 + 8 // n))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.3:
            engine.core.abort([f"{rng.randrange(i + 1)}#{rng.randrange(3)}"])
    engine.run()
    assert engine.kv.usage.num_free == 30 and not engine.kv.tables and not engine.kv.swap.kept
