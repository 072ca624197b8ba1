"""Inputs gathered on the device, in the interpreter, are those that the engine builds on the host. Run by
test_interpreter.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fakes import FakeEngine
from runner.test_inputs import Both
from torch import Tensor

from minivllm.batch import BatchKey, InputSizes
from minivllm.kernels import reference
from minivllm.kernels.dispatch import Dispatch
from minivllm.kernels.triton import gather
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.plan import Join, StepPlan
from minivllm.request import SamplingParams
from minivllm.runner import tables_device
from minivllm.runner.inputs_gather import GatherInputs
from minivllm.runner.inputs_persistent import PersistentInputs

assert INTERPRETED
CPU = torch.device("cpu")


def int32(*shape: int) -> Tensor:
    return torch.randint(0, 1 << 20, shape, dtype=torch.int32)


def poisoned(count: int) -> gather.Inputs:
    return gather.Inputs(*(torch.full((count,), -1) for _ in range(3)))


@pytest.mark.parametrize("num_new", [[1], [5], [1] * 7, [3, 1, 40, 1, 2], [600, 1, 500, 3], [1] * 700])
@pytest.mark.parametrize("padding", [0, 1, 30])
def test_tokens_positions_and_slots_equal_the_references(num_new, padding):
    count, total = len(num_new), sum(num_new)
    tokens, tables = int32(count + 3, 700), int32(count + 3, 51)
    rows = torch.randperm(count + 3)[:count]
    firsts = torch.tensor([int(torch.randint(0, 700 - n + 1, ())) for n in num_new])
    query_start = torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32)
    got = gather.gather_tokens(tokens, tables, rows, firsts, query_start, poisoned(total + padding), 14, 99)
    wanted = reference.gather_tokens(tokens, tables, rows, firsts, query_start, total + padding, 14, 99)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("columns, width", [(40, 40), (40, 3), (1100, 700)])
def test_rows_equal_the_references(columns, width):
    table, rows = int32(9, columns), torch.tensor([8, 0, 3])
    wide = torch.full((3, width + 5), -1, dtype=torch.int32)
    got = gather.gather_rows(table, rows, wide[:, :width])
    assert torch.equal(got, reference.gather_rows(table, rows, width)) and (wide[:, width:] == -1).all()


def test_staged_writes_equal_the_references():
    """New rows over longer old ones, rows that grow, a write of nothing, one of more than a program's piece."""
    table = int32(6, 300)
    wanted = table.clone()
    writes = [(4, 0, [7, 8, 9], 40), (1, 20, [5], 0), (5, 0, list(range(200)), 290), (0, 300, [], 0), (2, 0, [], 3)]
    gather.write_rows(table, writes)
    reference.write_rows(wanted, writes)
    assert torch.equal(table, wanted)


@pytest.mark.parametrize("budget, preempt_every, windows", [(512, 0, (None,)), (9, 3, (None,)), (9, 3, (None, 6))])
def test_batches_equal_those_of_a_fresh_rebuild(budget, preempt_every, windows):
    """Over the tables of runner.inputs=gather, after any sequence of joins and leaves."""
    overrides = {"scheduler.max_num_batched_tokens": budget, "debug.preempt_every": preempt_every}
    overrides |= {"spec_decode.method": "suffix", "scheduler.max_num_seqs": 5}
    engine = FakeEngine(24 * len(windows), max_model_len=40, windows=windows, **overrides)
    sizes, kernels = engine.worker.sizes, Dispatch("triton", CPU)
    launches = tables_device.choose_launches(kernels, sizes.block_size)
    assert not set(launches) & set(tables_device.TORCH)
    engine.worker.inputs = both = Both(GatherInputs(sizes, tables_device.DeviceTables(sizes, CPU, launches)))
    rng = random.Random(0)
    for i in range(30):
        engine.add(str(i), [rng.randrange(3) for _ in range(rng.randrange(1, 30))], max_tokens=rng.randrange(1, 12))
        engine.step()
    engine.run()
    assert both.num_compared > 20


def test_a_step_of_the_engine_comes_out_as_on_the_host():
    """Over the state of minivllm.runner.inputs_persistent: a prompt, a chunk, two decodes, a row that leaves."""
    builder = PersistentInputs(InputSizes(max_rows=5, max_model_len=40, block_size=4, spare_block=50))
    joins = [Join(name, list(range(7 * i, 8 * i + 9)), 9 + i, SamplingParams()) for i, name in enumerate("abcde")]
    blocks = {join.req_id: list(range(10 * i, 10 * i + 4)) for i, join in enumerate(joins)}
    builder.apply(StepPlan(0, joins=joins, new_blocks=blocks), [3, 0, 4, 1, 2])
    plan = StepPlan(1, {"c": 5, "e": 1, "a": 9, "d": 1}, {"c": 4, "e": 12, "a": 0, "d": 11}, leaves=["b"])
    builder.apply(plan, [])
    batch = builder.build(plan, BatchKey(20))
    state = torch.from_numpy(builder.token_ids), torch.from_numpy(builder.block_tables)
    rows, firsts = torch.from_numpy(batch.rows), torch.tensor(list(plan.start.values()))
    query_start = torch.from_numpy(batch.query_start)
    got = gather.gather_tokens(*state, rows, firsts, query_start, poisoned(20), 4, 50)
    for a, b in zip(got, (batch.token_ids, batch.positions, batch.slot_mapping), strict=True):
        assert np.array_equal(a, b)
    width = batch.block_tables.shape[1]
    tables = gather.gather_rows(state[1], rows, torch.empty(4, width, dtype=torch.int32))
    assert np.array_equal(tables, batch.block_tables)
