"""Bugs that small engines keep having (the list in the architecture's notes), each with the project that had it."""

import random

import pytest
from fakes import EOS, FakeEngine, next_token, oracle

from minivllm.errors import NeverFits


def test_a_preempted_decode_is_not_taken_for_a_fresh_prefill():
    """nano-vllm #144: a phase that is inferred from something that preemption changes."""
    engine = FakeEngine(num_blocks=30)
    params = engine.add("a", [1] * 10, max_tokens=12, min_tokens=12)
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.requests["a"])
    engine.run()
    assert engine.tokens["a"] == oracle([1] * 10, params)
    assert engine.scheduler.kv.usage.num_free == 30


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_found_whole_in_the_cache_still_has_a_query_token(length):
    """nano-vllm #144, #199."""
    engine = FakeEngine()
    prompt = list(range(length))
    for name in ("a", "b"):
        params = engine.add(name, prompt, max_tokens=3)
        engine.run()
        assert engine.tokens[name] == oracle(prompt, params)
    assert engine.core.stats.prefix_hits == length - 4


def test_the_budget_counts_tokens_after_the_prefix_hit():
    """nano-vllm #211, #233: tokens counted before the hit is known."""
    engine = FakeEngine(**{"scheduler.max_num_batched_tokens": 16})
    shared = list(range(16))
    engine.add("a", shared, max_tokens=1)
    engine.run()
    for name in "bcd":
        engine.add(name, [*shared, ord(name)], max_tokens=4)
    plan = engine.scheduler.schedule(0.0)
    assert plan.num_tokens == {"b": 1, "c": 1, "d": 1} and plan.start == {"b": 16, "c": 16, "d": 16}


@pytest.mark.parametrize("prompt_len", range(1, 14))
def test_no_off_by_one_at_block_boundaries(prompt_len):
    """nano-vllm #66."""
    engine = FakeEngine()
    prompt = [3] * prompt_len
    params = engine.add("a", prompt, max_tokens=9, min_tokens=9)
    engine.run()
    assert engine.tokens["a"] == oracle(prompt, params)


def test_a_duplicate_prefix_is_not_freed_while_a_table_names_it():
    """mini-sglang #142."""
    engine = FakeEngine(num_blocks=14)
    prompt = list(range(8))
    wanted = {}
    for name in ("a", "b"):  # both computed in one step, so both hold equal blocks
        params = engine.add(name, prompt, max_tokens=3 if name == "a" else 20, min_tokens=3)
        wanted[name] = oracle(prompt, params)
    engine.step()
    for i in range(6):  # overwrites what a leaves behind
        name = f"other{i}"
        wanted[name] = oracle([50 + i] * 9, engine.add(name, [50 + i] * 9, max_tokens=4))
    assert engine.run() == wanted


def test_a_row_that_was_left_is_the_last_to_be_reused():
    """SGLang #18803: a row or block reused while the step before still reads it."""
    from minivllm.runner.inputs import Rows

    rows = Rows(3)
    assert [rows.join("a"), rows.leave("a"), rows.join("b"), rows.join("c"), rows.join("d")] == [0, 0, 1, 2, 0]


def test_arrays_of_a_step_are_not_rewritten_by_the_next_one():
    """A pinned buffer rewritten during a copy: what a batch holds must survive the next build."""
    engine = FakeEngine()
    kept = []
    build = engine.worker.inputs.build
    engine.worker.inputs.build = lambda plan, key: (b := build(plan, key), kept.append((b, b.token_ids.copy())))[0]
    for i in range(3):
        engine.add(str(i), [i] * 5, max_tokens=6)
    engine.run()
    assert all((batch.token_ids == copy).all() for batch, copy in kept)


@pytest.mark.parametrize("inputs", ["rebuild", "persistent"])
def test_the_slot_mapping_of_a_second_chunk_starts_where_the_first_ended(inputs):
    """vLLM #36580."""
    engine = FakeEngine(**{"scheduler.max_num_batched_tokens": 5, "runner.inputs": inputs})
    prompt = list(range(100, 123))
    params = engine.add("a", prompt, max_tokens=3)
    engine.run()
    assert engine.tokens["a"] == oracle(prompt, params)


def test_a_request_that_can_never_run_does_not_hang_the_engine():
    engine = FakeEngine(num_blocks=4, max_model_len=1000)
    with pytest.raises(NeverFits, match="the KV pool holds 16"):
        engine.add("huge", [1] * 20, max_tokens=4)
    params = engine.add("small", [1] * 4, max_tokens=4)
    engine.run()
    assert engine.tokens["small"] == oracle([1] * 4, params)


def test_a_weak_hash_collision_cannot_serve_another_prompts_kv():
    """vLLM #12621: Python's hash() made -1 and -2 collide."""
    from minivllm.kv.prefix_hash import HashPrefix, xxhash_cbor
    from minivllm.request import Request, SamplingParams

    for hasher in (HashPrefix(), HashPrefix(xxhash_cbor)):
        keys = {hasher.keys(Request("r", SamplingParams(), t, 4), 1, 4)[0] for t in ([-1, 0, 0, 0], [-2, 0, 0, 0])}
        assert len(keys) == 2


def test_padded_rows_write_only_to_the_spare_block():
    """Padded rows read or overwrite somebody's KV."""
    engine = FakeEngine(num_blocks=20)
    engine.worker.padding = 7
    wanted = {str(i): oracle([i] * 6, engine.add(str(i), [i] * 6, max_tokens=8)) for i in range(4)}
    assert engine.run() == wanted
    written = set((engine.worker.kv[0] >= 0).nonzero()[0] // 4)
    assert 20 in written and engine.worker.kv.shape[1] == 21 * 4


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_stop_and_length_are_not_off_by_one(max_tokens):
    prompt = [9]
    while next_token([*prompt, next_token(prompt)]) != EOS:  # a prompt whose second output token ends it
        prompt = [prompt[0] + 1]
    engine = FakeEngine()
    engine.add("a", prompt, max_tokens=max_tokens)
    engine.run()
    assert len(engine.tokens["a"]) == min(max_tokens, 2)
    assert engine.reasons["a"] == ("length" if max_tokens == 1 else "stop")


def test_a_stop_token_before_min_tokens_is_an_ordinary_token():
    prompt = [9]
    while next_token(prompt) != EOS:
        prompt = [prompt[0] + 1]
    engine = FakeEngine()
    engine.add("a", prompt, max_tokens=4, min_tokens=2)
    engine.run()
    assert engine.tokens["a"][0] == EOS and len(engine.tokens["a"]) >= 2


def test_the_batch_order_is_the_order_of_service_never_of_a_set():
    engine = FakeEngine()
    names = [f"request-{i}" for i in random.Random(1).sample(range(1000), 40)]
    for name in names:
        engine.add(name, [1], max_tokens=3)
    assert list(engine.scheduler.schedule(0.0).num_tokens) == names


def test_aborting_in_every_state_leaves_nothing():
    engine = FakeEngine(num_blocks=10, **{"scheduler.max_num_batched_tokens": 8})
    for name in "abc":
        engine.add(name, [ord(name)] * 14, max_tokens=10)
    engine.step()  # a is half prefilled, b and c wait
    engine.core.abort(["a", "b", "nobody"])
    for _ in range(5):
        engine.step()
    engine.core.abort(["c"])
    assert not engine.core.has_work and engine.scheduler.kv.usage.num_free == 10
    engine.step()
    assert not engine.worker.rows.of
    engine.scheduler.check()


def test_a_failing_step_ends_its_own_requests_and_no_others():
    engine = FakeEngine(**{"scheduler.max_num_seqs": 1})
    engine.add("a", [1], max_tokens=3)
    params = engine.add("b", [2], max_tokens=3)
    execute = engine.worker.execute
    engine.worker.execute = lambda plan: 1 / 0
    (delta,) = engine.core.step()
    assert (delta.req_id, delta.finish_reason) == ("a", "error") and "ZeroDivisionError" in delta.error
    engine.worker.execute = lambda plan: execute(_without_unknown_leaves(engine, plan))
    engine.run()
    assert engine.tokens["b"] == oracle([2], params)


def test_an_error_ends_one_request_and_what_it_computed_is_not_shared():
    engine = FakeEngine()
    prompt = list(range(8))
    engine.add("bad", prompt, max_tokens=3)
    params = engine.add("good", [9] * 8, max_tokens=3)
    execute = engine.worker.execute

    def poisoned(plan):
        out = execute(plan)
        if "bad" in plan.num_tokens:
            out.errors["bad"] = "NaN"
        return out

    engine.worker.execute = poisoned
    deltas = {delta.req_id: delta for delta in engine.core.step()}
    assert (deltas["bad"].finish_reason, deltas["bad"].error) == ("error", "NaN")
    engine.tokens["good"] += deltas["good"].token_ids
    engine.run()
    assert engine.tokens["good"] == oracle([9] * 8, params)
    assert engine.kv.index.match(engine.kv.index.keys(_request(prompt), 2, 4)) == []


def _request(tokens):
    from minivllm.request import Request, SamplingParams

    return Request("probe", SamplingParams(), tokens, len(tokens))


def _without_unknown_leaves(engine, plan):
    plan.leaves = [req_id for req_id in plan.leaves if req_id in engine.worker.rows.of]
    return plan
