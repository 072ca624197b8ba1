import random

import pytest
from fakes import FakeEngine, oracle
from scheduler.runs import plans

from minivllm.kv.contiguous import ContiguousKVManager, reserve_max, reserve_oracle, reserve_pow2
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.scheduler.base import Limits
from minivllm.scheduler.inject import Injector
from minivllm.scheduler.static import StaticScheduler
from minivllm.scheduler.unified import UnifiedScheduler

NUM_BLOCKS, BLOCK_SIZE, LONGEST = 64, 4, 60  # the longest reservation, 15 blocks, takes a run of 16
KVS = {
    "paged": lambda n: PagedKVManager(n, BLOCK_SIZE, NoPrefix()),
    "hash": lambda n: PagedKVManager(n, BLOCK_SIZE, HashPrefix(seed="test")),
    "max": lambda n: ContiguousKVManager(n, BLOCK_SIZE, reserve_max, LONGEST),
    "pow2": lambda n: ContiguousKVManager(n, BLOCK_SIZE, reserve_pow2, LONGEST),
    "oracle": lambda n: ContiguousKVManager(n, BLOCK_SIZE, reserve_oracle, LONGEST),
}


def engine_of(scheduler=StaticScheduler, kv="paged", num_blocks=NUM_BLOCKS, max_num_seqs=4, budget=512, every=0):
    engine = FakeEngine(num_blocks, LONGEST, **{"scheduler.max_num_seqs": max_num_seqs})
    engine.kv = KVS[kv](num_blocks)
    limits = Limits(max_num_seqs, budget, LONGEST, num_blocks * BLOCK_SIZE)
    engine.scheduler = scheduler(engine.kv, limits, chunked_prefill=False)
    engine.core.scheduler = Injector(engine.scheduler, engine.kv, every, every > 0) if every else engine.scheduler
    return engine


def add(engine, req_id, num_prompt, max_tokens):
    prompt = [int(c, 36) for c in req_id] + [1] * (num_prompt - len(req_id))
    return engine.add(req_id, prompt, max_tokens=max_tokens, ignore_eos=True, min_tokens=max_tokens)


def test_a_batch_is_decoded_to_its_last_request_before_the_next_one_begins():
    engine = engine_of(max_num_seqs=2)
    for name, num_output in (("a", 2), ("b", 4), ("c", 1), ("d", 2)):
        add(engine, name, 5, num_output)
    assert plans(engine) == [{"a": 5, "b": 5}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {"c": 5, "d": 5}, {"d": 1}]


def test_who_arrives_after_the_batch_was_opened_waits_for_the_next():
    engine = engine_of()
    add(engine, "a", 5, 3)
    engine.step()
    add(engine, "b", 5, 2)
    assert plans(engine) == [{"a": 1}, {"a": 1}, {"b": 5}, {"b": 1}]


def test_all_prompts_of_a_batch_are_computed_before_anybody_decodes():
    engine = engine_of(budget=60)
    for name in "abc":
        add(engine, name, 25, 2)
    plans(engine, 1)
    add(engine, "d", 5, 2)  # there is a fourth place, but the batch was opened without it
    assert plans(engine) == [{"c": 25}, {"a": 1, "b": 1, "c": 1}, {"d": 5}, {"d": 1}]


def test_an_ended_request_delivers_at_once_and_keeps_its_blocks_and_its_row_until_the_batch_ends():
    engine = engine_of()
    add(engine, "a", 9, 1), add(engine, "b", 9, 4)
    engine.step()
    assert engine.reasons == {"a": "length"}
    for _ in range(2):
        engine.step()
        assert engine.kv.usage.num_free == NUM_BLOCKS - 6 and "a" in engine.worker.rows.of
    engine.step()
    assert engine.kv.usage.num_free == NUM_BLOCKS
    engine.step()
    assert not engine.worker.rows.of


def test_an_aborted_request_keeps_its_place_too_and_the_last_one_ends_the_batch():
    engine = engine_of()
    for name in "ab":
        add(engine, name, 9, 9)
    engine.step()
    engine.core.abort(["a"])
    assert engine.kv.usage.num_free < NUM_BLOCKS
    engine.core.abort(["b"])
    assert engine.kv.usage.num_free == NUM_BLOCKS
    engine.scheduler.check()


def test_the_id_of_an_ended_request_may_be_used_again_while_its_blocks_are_held():
    engine = engine_of()
    add(engine, "a", 9, 1), add(engine, "b", 9, 5)
    engine.step()
    del engine.reasons["a"]
    params = add(engine, "a", 9, 3)
    engine.run()
    assert engine.tokens["a"] == oracle([10] + [1] * 8, params)


def test_the_batch_is_as_large_as_the_pool_allows():
    engine = engine_of(kv="max", num_blocks=32)
    for name in "abc":
        add(engine, name, 5, 2)
    assert [set(plan) for plan in plans(engine)] == [{"a", "b"}, {"a", "b"}, {"c"}, {"c"}]


def test_a_batch_that_did_not_get_all_its_seats_filled_takes_nobody_later():
    engine = engine_of(num_blocks=16)
    for name in "abc":
        add(engine, name, 25, 3)  # 7 blocks each
    plans(engine, 1)
    engine.core.abort(["c"])
    add(engine, "d", 1, 1)  # for which there is a block, and a seat that was meant for c
    assert plans(engine) == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"d": 1}]


def test_when_a_paged_pool_runs_dry_ended_requests_give_way_before_a_running_one():
    engine = engine_of(num_blocks=16)
    add(engine, "a", 20, 1), add(engine, "b", 20, 30), add(engine, "c", 3, 9)  # 5 + 5 + 1 blocks, b grows to 13
    engine.run()
    assert engine.core.stats.num_preempted == 0
    engine = engine_of(num_blocks=16)
    add(engine, "a", 20, 30), add(engine, "b", 20, 30)
    engine.run()
    assert engine.core.stats.num_preempted > 0


def test_continuous_batching_takes_fewer_steps_than_static_on_mixed_lengths():
    """Ends of 1 .. 20 steps, by fours: static takes each batch's longest, about 4 * 20; continuous about the mean."""
    rng = random.Random(0)
    lengths = [rng.randrange(1, 21) for _ in range(40)]
    num_steps = {}
    for scheduler in (StaticScheduler, UnifiedScheduler):
        engine = engine_of(scheduler)
        for i, num_output in enumerate(lengths):
            add(engine, str(i), 5, num_output)
        num_steps[scheduler] = len(plans(engine))
    # A step a token, the prompt's step gives the first: exactly the longest of each batch of four.
    assert num_steps[StaticScheduler] == sum(max(lengths[i : i + 4]) for i in range(0, 40, 4))
    # Never idle while anybody waits: all work over four places, and the last request alone at the very worst.
    assert num_steps[UnifiedScheduler] <= sum(lengths) / 4 + max(lengths)
    assert num_steps[UnifiedScheduler] < 0.75 * num_steps[StaticScheduler]


def test_static_is_no_slower_when_all_lengths_are_equal():
    num_steps = []
    for scheduler in (StaticScheduler, UnifiedScheduler):
        engine = engine_of(scheduler)
        for i in range(16):
            add(engine, str(i), 5, 7)
        num_steps.append(len(plans(engine)))
    assert num_steps == [28, 28]


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("num_blocks", [16, 64])
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("scheduler", [StaticScheduler, UnifiedScheduler])
def test_memory_and_batching_change_timing_never_output(scheduler, kv, num_blocks, every):
    rng = random.Random(num_blocks)
    engine = engine_of(scheduler, kv, num_blocks, budget=64, every=every)
    wanted = {}
    for i in range(30):
        prompt = [7] * rng.randrange(8) + [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
        params = engine.add(str(i), prompt, max_tokens=rng.choice((1, 3, 8, 30)))
        wanted[str(i)] = oracle(prompt, params, LONGEST)
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            victim = str(rng.randrange(i + 1))
            if victim not in engine.reasons:
                wanted.pop(victim, None)
                engine.core.abort([victim])
        engine.scheduler.check()
    engine.run()
    assert {req_id: engine.tokens[req_id] for req_id in wanted} == wanted
    assert engine.kv.usage.num_free == num_blocks
    engine.scheduler.check()
