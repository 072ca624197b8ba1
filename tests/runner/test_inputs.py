"""Every input builder equals a fresh rebuild, field by field, after any sequence of joins and leaves."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from fakes import FakeEngine

from minivllm.batch import BatchKey, InputBatch, InputSizes, pad_requests
from minivllm.features import INPUT_BUILDERS
from minivllm.plan import Join, StepPlan
from minivllm.request import SamplingParams
from minivllm.runner import tables_device
from minivllm.runner.inputs_gather import GatherInputs
from minivllm.runner.inputs_persistent import PersistentInputs
from minivllm.runner.inputs_rebuild import RebuildInputs
from minivllm.runner.tables import StagedWrites
from minivllm.runner.tables_device import DeviceTables, StagedRows

CPU = torch.device("cpu")
DEVICE_COLUMNS = "token_ids", "positions", "slot_mapping", "block_tables"


def on_device(sizes: InputSizes, device: torch.device = CPU) -> GatherInputs:
    """The form of runner.inputs=gather whose tables are on the device, without Triton."""
    return GatherInputs(sizes, DeviceTables(sizes, device, tables_device.TORCH))


def on_host(batch: InputBatch) -> InputBatch:
    return replace(batch, **{name: np.asarray(getattr(batch, name)) for name in DEVICE_COLUMNS})


class Both:
    """Feeds two builders and compares each batch. Stands in for the engine's own."""

    def __init__(self, fast):
        self.fast, self.rebuild = fast, RebuildInputs(fast.sizes)
        self.num_compared = 0

    def apply(self, plan, rows):
        self.fast.apply(plan, rows)
        self.rebuild.apply(plan, rows)

    def build(self, plan, key):
        fast, slow = on_host(self.fast.build(plan, key)), self.rebuild.build(plan, key)
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


@pytest.mark.parametrize("inputs", ["persistent", "gather", "gather on the device"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget, preempt_every", [(512, 0), (7, 0), (64, 3)])
@pytest.mark.parametrize("method, windows", [("none", (None,)), ("suffix", (None,)), ("suffix", (None, 6, 3))])
def test_fast_builders_equal_rebuild(inputs, seed, budget, preempt_every, method, windows):
    rng = random.Random(seed)
    overrides = {"scheduler.max_num_batched_tokens": budget, "debug.preempt_every": preempt_every}
    overrides |= {"runner.inputs": inputs.partition(" ")[0], "spec_decode.method": method}
    num_blocks = 24 * len(windows)
    engine = FakeEngine(num_blocks, max_model_len=40, windows=windows, **{"scheduler.max_num_seqs": 5, **overrides})
    fast = on_device(engine.worker.sizes) if "device" in inputs else engine.worker.inputs
    engine.worker.inputs = both = Both(fast)
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


class Steps:
    """Makes plans by hand and drives two builders: requests whose lengths differ decode, mostly undisturbed. Block size
    4, room for 40 tokens."""

    def __init__(self, inputs: str, seed: int):
        self.rng = random.Random(seed)
        self.fast = on_device(SIZES) if "device" in inputs else INPUT_BUILDERS.get(inputs)(SIZES)
        self.both = Both(self.fast)
        self.known: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.blocks = list(range(50))
        self.held: dict[str, list[int]] = {}
        self.num_joined = 0

    def step(self) -> None:
        plan, rng = StepPlan(0), self.rng
        ended = [name for name, known in self.known.items() if known == SIZES.max_model_len or rng.random() < 0.03]
        for name in ended:
            plan.leaves.append(name)
            self.blocks += self.held.pop(name)
            del self.known[name], self.rows[name]
        if len(self.known) < 4 and (not self.known or rng.random() < 0.1):
            self._join(plan)
        drafts = rng.random() < 0.05
        for name, known in self.known.items():
            if plan.joins and name == plan.joins[0].req_id:
                plan.start[name], plan.num_tokens[name] = 0, known
            elif rng.random() < 0.99:
                plan.start[name], plan.num_tokens[name] = known - 1, 1
                if drafts and known < SIZES.max_model_len:
                    plan.drafts[name], plan.num_tokens[name] = [rng.randrange(99)], 2
            elif known > 1:  # a piece before the last known token: nothing is sampled
                plan.start[name], plan.num_tokens[name] = known - 2, 1
            if name in plan.num_tokens:
                self._grow(plan, name, rng.randrange(2) * rng.randrange(3))
        if rng.random() < 0.03:
            for column in ("num_tokens", "start"):
                setattr(plan, column, dict(reversed(getattr(plan, column).items())))
        self.both.apply(plan, [self.rows[join.req_id] for join in plan.joins])
        if plan.num_tokens:
            self._run(plan)

    def _join(self, plan: StepPlan) -> None:
        name, num = f"request {self.num_joined}", self.rng.randrange(1, 20)
        self.num_joined += 1
        self.known[name], self.held[name] = num, []
        self.rows[name] = self.rng.choice([row for row in range(6) if row not in self.rows.values()])
        plan.joins.append(Join(name, [self.rng.randrange(99) for _ in range(num)], num, SamplingParams()))

    def _grow(self, plan: StepPlan, name: str, ahead: int) -> None:
        """Blocks for what is computed, and sometimes some ahead."""
        held = self.held[name]
        wanted = -(-(plan.start[name] + plan.num_tokens[name]) // 4)
        if wanted > len(held):
            num = min(wanted + ahead, 10) - len(held)
            plan.new_blocks[name] = [self.blocks.pop(0) for _ in range(num)]
            held += plan.new_blocks[name]

    def _run(self, plan: StepPlan) -> None:
        rng = self.rng
        key = BatchKey(plan.total_tokens + (rng.random() < 0.05) * 3)
        batch = self.both.build(plan, key)
        if rng.random() < 0.03:  # a draft model looks at the same step once more
            batch = self.both.build(plan, key)
        kept = np.flatnonzero(batch.draft_tokens < 0) if rng.random() < 0.5 else np.arange(len(batch.sample_tokens))
        requests = batch.sample_requests[kept]  # the first of a draft's two tokens is final alone, or both are
        if rng.random() < 0.03:
            requests = requests[: rng.randrange(len(requests) + 1)]  # those that are not kept are drawn again
        for i in requests.tolist():
            self.known[batch.req_ids[i]] = min(self.known[batch.req_ids[i]] + 1, SIZES.max_model_len)
        self.both.append(batch, requests, np.array([rng.randrange(99) for _ in requests], np.int64))


@pytest.mark.parametrize("inputs", ["persistent", "gather", "gather on the device"])
@pytest.mark.parametrize("seed", range(6))
def test_long_runs_of_decodes_and_what_ends_them_equal_rebuild(inputs, seed):
    """Joins, leaves, drafts, pieces, orders, paddings, blocks ahead, a step that is built twice or not kept."""
    steps, num_followed = Steps(inputs, seed), 0
    for _ in range(400):
        steps.step()
        run = getattr(steps.fast, "_run", None)
        num_followed += run is not None and run.phase > 0
    assert inputs != "persistent" or num_followed > 80, "the runs were too short to show anything"


def test_a_batch_that_was_handed_out_is_not_written_to_by_the_next():
    """runner/async_sampling.py reports a step behind the start of the next one."""
    builder = PersistentInputs(SIZES)
    builder.apply(
        StepPlan(0, joins=[Join("a", [1] * 5, 5, SamplingParams()), Join("b", [2] * 12, 12, SamplingParams())]), [3, 1]
    )
    builder.apply(StepPlan(1, new_blocks={"a": [7, 8], "b": [20, 21, 22, 23]}), [])
    handed_out = []
    for i in range(12):
        plan = StepPlan(i, {"a": 1, "b": 1}, {"a": 4 + i, "b": 11 + i})
        blocks = {name: [30 + i] for name, n in plan.start.items() if n % 4 == 0 and n // 4 >= {"a": 2, "b": 4}[name]}
        builder.apply(StepPlan(i, new_blocks=blocks), [])
        batch = builder.build(plan, BatchKey(2))
        handed_out.append([(getattr(batch, f.name), np.copy(getattr(batch, f.name))) for f in fields(InputBatch)])
        builder.append(batch, batch.sample_requests, np.array([40 + i, 60 + i]))
    assert builder._run.phase == (12 - 2) % 4
    for columns in handed_out:
        for now, before in columns:
            assert np.array_equal(now, before)


def test_a_run_that_comes_to_the_longest_length_writes_into_no_other_row():
    builder = PersistentInputs(SIZES)
    joins = [Join("a", [1] * 30, 30, SamplingParams()), Join("b", [2] * 31, 31, SamplingParams())]
    builder.apply(StepPlan(0, joins=joins, new_blocks={"a": list(range(10)), "b": list(range(10, 20))}), [2, 5])
    for i in range(10):
        batch = builder.build(StepPlan(i, {"a": 1, "b": 1}, {"a": 29 + i, "b": 30 + i}), BatchKey(2))
        builder.append(batch, batch.sample_requests, np.array([7, 8]))
        expected = [[1] * 30 + [7] * (i + 1), [2] * 31 + [8] * min(i + 1, 9)]
        for row, tokens in zip((2, 5), expected, strict=True):
            assert builder.token_ids[row].tolist() == tokens + [0] * (40 - len(tokens))
    assert not builder.token_ids[[0, 1, 3, 4]].any() and builder.num_tokens[[2, 5]].tolist() == [40, 41]


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
    tables = engine.worker.inputs.tables.block_tables.array
    assert tables.shape[0] == 1 and np.count_nonzero(tables) <= 1


# ---------------------------------------------------------------- tables on the device

SIZES = InputSizes(max_rows=6, max_model_len=40, block_size=4, spare_block=50)


class Told:
    """Two builders that are told the same; batches are compared by whoever asks."""

    def __init__(self, device: torch.device):
        self.device, self.host = on_device(SIZES, device), RebuildInputs(SIZES)

    def apply(self, plan, rows):
        self.device.apply(plan, rows)
        self.host.apply(plan, rows)

    def build(self, plan, key):
        return self.device.build(plan, key), self.host.build(plan, key)

    def join(self, lengths: dict[str, int]) -> None:
        """Each in another row than its place, with blocks for 8 tokens more."""
        joins = [Join(name, list(range(7, 7 + n)), n, SamplingParams()) for name, n in lengths.items()]
        blocks = {name: [*range(9 * i, 9 * i + min(2 + -(-n // 4), 10))] for i, (name, n) in enumerate(lengths.items())}
        self.apply(StepPlan(0, joins=joins, new_blocks=blocks), [3, 0, 4, 1, 2][: len(joins)])


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("padded", [3, 4, 8])
def test_a_whole_forward_is_gathered_with_its_padding(padded, num_drafts):
    """What is read of it equals the host's, which is padded behind its building."""
    both, queries = Told(CPU), 1 + num_drafts
    both.join({"a": 5, "b": 9, "c": 12})
    start = {"a": 4, "b": 8, "c": 11}
    drafts = {name: [60 + at, 61 + at] for name, at in start.items()} if num_drafts else {}
    plan = StepPlan(1, dict.fromkeys(start, queries), start, drafts=drafts)
    key = BatchKey(padded * queries, queries)
    device, host = (pad_requests(batch, SIZES, batch.block_tables.shape[1]) for batch in both.build(plan, key))
    real, device = 3 * queries, on_host(device)
    for name in ("query_start", "seq_lens", "sample_tokens", "sample_requests", "draft_tokens", "slot_mapping"):
        assert np.array_equal(getattr(device, name), getattr(host, name)), name
    assert np.array_equal(device.token_ids, host.token_ids)
    assert np.array_equal(device.positions[:real], host.positions[:real])
    assert np.array_equal(device.block_tables[:3], host.block_tables[:3])
    assert (device.block_tables[3:, 0] == SIZES.spare_block).all()
    assert device.block_tables.shape == host.block_tables.shape


def test_nothing_is_waited_for_and_every_size_is_known_to_the_host(apart):
    both = Told(apart)
    both.join({"a": 5, "b": 9, "c": 40, "d": 12})
    drafts = {"b": [5], "a": [5, 6]}
    steps = [
        (StepPlan(1, {"a": 5, "b": 9}, {"a": 0, "b": 0}), BatchKey(16)),
        (StepPlan(2, {"b": 2, "c": 40, "a": 3}, {"b": 9, "c": 0, "a": 5}, drafts=drafts), BatchKey(45)),
        (StepPlan(3, {"a": 1, "b": 1}, {"a": 8, "b": 11}, leaves=["c"], new_blocks={"a": [44]}), BatchKey(3, 1)),
    ]
    for plan, key in steps:
        both.apply(plan, [])
        device, host = both.build(plan, key)
        num_requests = key.num_tokens // key.queries if key.whole else host.num_requests
        for name in DEVICE_COLUMNS:
            a, b = getattr(device, name), getattr(host, name)
            shape = (num_requests, b.shape[1]) if name == "block_tables" else b.shape
            assert a.device == apart and a.shape == shape and str(a.dtype) == f"torch.{b.dtype}", name
        tokens = np.arange(len(device.sample_requests))
        both.device.append(device, device.sample_requests, torch.from_numpy(tokens).to(apart))
        both.host.append(host, host.sample_requests, tokens)


def test_a_last_token_behind_the_longest_length_has_no_place_in_the_next_row():
    both = Told(CPU)
    both.join({"a": 40, "b": 9})
    plan = StepPlan(1, {"a": 40, "b": 9}, {"a": 0, "b": 0})
    device, _ = both.build(plan, BatchKey(49))
    before = both.device.tables.token_ids.table.clone()
    both.device.append(device, device.sample_requests, torch.tensor([77, 78]))
    changed = both.device.tables.token_ids.table != before
    assert changed.nonzero().tolist() == [[0, 9]] and both.device.tables.token_ids.table[0, 9] == 78


def test_pieces_of_one_row_are_one_write_and_the_row_is_cleared_behind_them():
    table, sent = torch.full((3, 9), -1, dtype=torch.int32), []

    def write(table, writes):
        sent.append(writes)
        tables_device.write_rows(table, writes)

    staged = StagedRows(table, write)
    staged.stage(2, 0, (), clear_to=7)  # somebody leaves
    staged.stage(2, 0, [5, 6])  # somebody else has the row
    staged.stage(0, 8, [4])
    staged.stage(2, 2, [8])
    with pytest.raises(AssertionError, match="row 2"):
        staged.stage(2, 5, [1])
    with pytest.raises(AssertionError):
        staged.stage(0, 9, [1])  # the next row
    staged.write()
    staged.write()
    assert len(sent) == 1 and len(sent[0]) == 2
    assert table.tolist() == [[-1] * 8 + [4], [-1] * 9, [5, 6, 8, 0, 0, 0, 0, -1, -1]]


def test_what_is_sent_begins_where_16_bytes_do_whatever_the_number_of_requests():
    """Else Triton would compile another kernel for some numbers, when a step first has them."""
    offsets = []

    def watched(tokens, tables, *arguments):
        sent = arguments[:3]  # rows, starts, query_start
        offsets.append([(tensor.data_ptr() - sent[0].data_ptr()) % 16 for tensor in sent])
        return tables_device.gather_tokens(tokens, tables, *arguments)

    launches = tables_device.TORCH._replace(gather_tokens=watched)
    builder = GatherInputs(SIZES, DeviceTables(SIZES, CPU, launches))
    names = "abcde"
    joins = [Join(name, [1, 2, 3], 3, SamplingParams()) for name in names]
    builder.apply(StepPlan(0, joins=joins, new_blocks={name: [i] for i, name in enumerate(names)}), range(5))
    for n in range(1, 6):
        builder.build(StepPlan(1, dict.fromkeys(names[:n], 3), dict.fromkeys(names[:n], 0)), BatchKey(3 * n))
    assert offsets == [[0, 0, 0]] * 5
