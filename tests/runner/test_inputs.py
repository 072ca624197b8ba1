"""Every input builder equals a fresh rebuild, field by field, after any sequence of joins and leaves."""

import random
from dataclasses import fields

import numpy as np
import pytest
from fakes import FakeEngine

from minivllm.features import INPUT_BUILDERS
from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey
from minivllm.runner.inputs_gather import StagedWrites
from minivllm.runner.inputs_rebuild import RebuildInputs


class Both:
    """Feeds two builders and compares each batch. Stands in for the engine's own."""

    def __init__(self, fast):
        self.fast, self.rebuild = fast, RebuildInputs(fast.sizes)
        self.num_compared = 0

    def apply(self, plan, rows):
        self.fast.apply(plan, rows)
        self.rebuild.apply(plan, rows)

    def build(self, plan, key):
        fast, slow = self.fast.build(plan, key), self.rebuild.build(plan, key)
        for field in fields(InputBatch):
            a, b = getattr(fast, field.name), getattr(slow, field.name)
            assert np.array_equal(a, b), f"{field.name}: {a} != {b}"
            if isinstance(b, np.ndarray):
                assert a.dtype == b.dtype, field.name
        self.num_compared += 1
        return fast

    def append(self, batch, requests, tokens):
        self.fast.append(batch, requests, tokens)
        self.rebuild.append(batch, requests, tokens)


@pytest.mark.parametrize("inputs", ["persistent", "gather"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget, preempt_every", [(512, 0), (7, 0), (64, 3)])
@pytest.mark.parametrize("method", ["none", "suffix"])
def test_fast_builders_equal_rebuild(inputs, seed, budget, preempt_every, method):
    rng = random.Random(seed)
    overrides = {"scheduler.max_num_batched_tokens": budget, "debug.preempt_every": preempt_every}
    overrides |= {"runner.inputs": inputs, "spec_decode.method": method}
    engine = FakeEngine(24, max_model_len=40, **{"scheduler.max_num_seqs": 5, **overrides})
    engine.worker.inputs = both = Both(engine.worker.inputs)
    for i in range(40):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        engine.add(str(i), prompt, max_tokens=rng.randrange(1, 12))
        for _ in range(rng.randrange(3)):
            engine.step()
        if rng.random() < 0.2:
            engine.core.abort([str(rng.randrange(i + 1))])
    engine.run()
    assert both.num_compared > 40


@pytest.mark.parametrize("inputs", INPUT_BUILDERS.names())
def test_the_fields_of_a_small_mixed_batch(inputs):
    engine = FakeEngine(20, **{"runner.inputs": inputs})
    engine.add("a", [10, 11, 12, 13, 14], max_tokens=9, min_tokens=9)
    engine.step()
    sampled = engine.tokens["a"][0]
    engine.add("b", [20, 21, 22], max_tokens=9, min_tokens=9)
    plan = engine.scheduler.schedule(0.0)
    worker = engine.worker
    worker.inputs.apply(plan, [worker.rows.join(j.req_id) for j in plan.joins])
    batch = worker.inputs.build(plan, BatchKey(6))
    assert batch.req_ids == ["a", "b"]
    assert batch.token_ids.tolist() == [sampled, 20, 21, 22, 0, 0]
    assert batch.positions.tolist() == [5, 0, 1, 2, 0, 0]
    assert batch.slot_mapping.tolist() == [1 * 4 + 1, 8, 9, 10, 80, 80]
    assert batch.query_start.tolist() == [0, 1, 4] and batch.seq_lens.tolist() == [6, 3]
    assert batch.block_tables.tolist() == [[0, 1], [2, 0]]
    assert batch.sample_tokens.tolist() == [0, 3] and batch.sample_requests.tolist() == [0, 1]
    assert batch.draft_tokens.tolist() == [-1, -1]
    assert (batch.num_tokens, batch.max_query, batch.max_seq) == (4, 3, 6)


def test_staged_pieces_are_written_at_once_and_the_later_one_stays():
    table = StagedWrites(3, 4, np.int32)
    table.stage(1, 1, [5, 6, 7])
    table.stage(2, 0, [8])
    table.stage(1, 2, [9])
    table.stage(0, 0, [])
    assert not table.array.any()
    table.write()
    assert table.array.tolist() == [[0, 0, 0, 0], [0, 5, 9, 7], [8, 0, 0, 0]]
    table.array[:] = 0
    table.write()
    assert not table.array.any(), "a piece was written twice"
    with pytest.raises(AssertionError, match="next row"):
        table.stage(0, 3, [1, 2])


def test_a_row_that_is_given_out_again_keeps_nothing_of_its_past():
    engine = FakeEngine(40, **{"runner.inputs": "gather", "scheduler.max_num_seqs": 1})
    engine.add("long", [3] * 30, max_tokens=9, min_tokens=9)
    engine.run()
    engine.add("short", [1, 2], max_tokens=9, min_tokens=9)
    engine.step()
    tables = engine.worker.inputs.block_tables.array
    assert tables.shape[0] == 1 and np.count_nonzero(tables) <= 1
