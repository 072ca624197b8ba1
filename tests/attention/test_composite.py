"""A pair of backends is a backend: the first computes requests with one query, the second all others, in one cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.batches import CPU, Case, spec
from attention.test_backends import MIXED, assert_right
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.attention.composite import pair
from minivllm.attention.flex import FlexBackend
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.rows import batch_of, split, take
from minivllm.attention.select import choose
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.features import ATTENTION


class First(ReferenceAttention):
    name = "first"
    log: list = []

    def prepare(self, batch):
        self.log.append((self.name, np.diff(batch.query_start).tolist()))
        return super().prepare(batch)


class Second(First):
    name = "second"


@pytest.fixture
def log():
    First.log.clear()
    return First.log


def test_requests_with_one_query_go_to_the_first_and_all_others_to_the_second(log):
    case = Case(spec(), MIXED, padding=3)
    backend = pair(First, Second)([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    backend.prepare(case.batch(case.now, case.padding))
    assert log == [("first", [1, 1, 1, 1]), ("second", [7, 13, 17, 2])]


@pytest.mark.parametrize(
    "requests, asked",
    [([(3, 1), (9, 1)], ["first"]), ([(0, 4)], ["second"]), ([(3, 1), (0, 4)], ["first", "second"])],
    ids=str,
)
def test_who_has_nothing_to_do_is_not_asked(log, requests, asked):
    case = Case(spec(), requests)
    backend = pair(First, Second)([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    backend.prepare(case.batch(case.now))
    assert [name for name, _ in log] == asked


@pytest.mark.parametrize("kinds", [(ReferenceAttention, FlexBackend), (FlexBackend, ReferenceAttention)])
@pytest.mark.parametrize("window", [None, 20])
def test_a_pair_gives_the_dense_answer(kinds, window):
    assert_right(pair(*kinds), Case(spec(window=window), MIXED, padding=3, spare_columns=2))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.just(1) | st.integers(1, 20)), min_size=1, max_size=9),
    block_size=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    padding=st.integers(0, 2),
)
def test_any_batch(requests, block_size, seed, padding):
    assert_right(pair(First, Second), Case(spec(), requests, block_size, seed=seed, padding=padding))


def test_only_the_batchs_slots_are_written():
    case = Case(spec(), MIXED)
    backend = pair(First, Second)([case.spec], case.kv_spec, case.num_blocks + 1, CPU)
    kv = case.cache(backend)
    before = kv.clone()
    case.run(backend, kv)
    changed = (kv != before) & ~(kv.isnan() & before.isnan())
    assert changed.sum() == 2 * sum(new for _, new in case.requests) * case.spec.num_kv_heads * case.spec.head_size


@pytest.mark.parametrize("device", [None, CPU], ids=["host", "device"])
def test_a_part_of_a_batch_is_a_batch(device):
    case = Case(spec(), MIXED, padding=2, device=device)
    batch = case.batch(case.now, case.padding)
    for part, count in zip(split(batch, CPU), (1, None), strict=True):
        own = batch_of(batch, part)
        assert own.num_requests == len(part.requests) and own.num_tokens == own.padded_tokens
        for i, r in enumerate(part.requests):
            rows, whole = slice(*own.query_start[i : i + 2]), slice(*batch.query_start[r : r + 2])
            assert count is None or rows.stop - rows.start == count
            for name in ("positions", "slot_mapping"):
                assert np.array_equal(getattr(own, name)[rows], getattr(batch, name)[whole])
            assert own.seq_lens[i] == batch.seq_lens[r] and own.req_ids[i] == batch.req_ids[r]
            assert np.array_equal(own.block_tables[i], batch.block_tables[r])


def test_a_pair_takes_columns_on_the_device_if_both_do(apart):
    assert pair(FlexBackend, Second).host_tables and not pair(First, Second).host_tables
    assert_right(pair(First, Second), Case(spec(), MIXED, padding=2, device=CPU))
    case = Case(spec(), MIXED, padding=2, device=apart)
    backend = pair(First, Second)([case.spec], case.kv_spec, case.num_blocks + 1, apart)
    assert backend.prepare(case.batch(case.now)).shares[1].meta.tables.device == apart


def test_rows_that_lie_together_are_a_view():
    case = Case(spec(), [(3, 1), (9, 1), (0, 4), (2, 5)])
    decodes, others = split(case.batch(case.now), CPU)
    assert (decodes.rows, others.rows) == (slice(0, 2), slice(2, 11))
    x = torch.randn(11, 3)
    assert take(x, others.rows).data_ptr() == x[2].data_ptr()


def test_whole_decodes_are_the_firsts_and_are_recorded_if_it_can_be():
    prompts = [[1, 2, 3], list(range(30)), [7]]
    tokens = {}
    for attention in ("reference", "reference,flex"):
        overrides = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 40}
        overrides |= {"runner.attention": attention, "scheduler.max_num_seqs": 4, "runner.graphs": "full"}
        with LLM(overrides={**overrides, "debug.check": True, "executor.num_threads": 1}) as llm:
            assert {d.field: str(d.value) for d in llm.decisions}["runner.graphs"] == "full"
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
            tokens[attention] = [list(o.outputs[0].token_ids) for o in outputs]
    assert tokens["reference,flex"] == tokens["reference"]


class Decodes(ReferenceAttention):
    """As FlashInfer might be: it can be captured in decodes alone."""

    def __init__(self, *args):
        super().__init__(*args)
        self.graphs = "decode"


class Apart(ReferenceAttention):
    """Of another name."""


@pytest.mark.parametrize("second, told", [(Apart, ", with 3 drafts each in"), (Decodes, "(with drafts not: ")])
def test_whole_steps_of_drafts_are_the_seconds_and_are_recorded_if_it_can_be(second, told):
    """Drafts of a model with the same weights, so that each step has as many tokens of every request."""
    tokens = {}
    ATTENTION.register("second", second)
    try:
        for attention in ("reference", "reference,second"):
            overrides = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 40, "debug.check": True}
            overrides |= {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny", "spec_decode.k": 3}
            overrides |= {"runner.attention": attention, "scheduler.max_num_seqs": 2, "spec_decode.adaptive": False}
            overrides |= {"runner.graphs": "full", "executor.num_threads": 1}
            with LLM(overrides=overrides) as llm:
                reason = {d.field: d.reason for d in llm.decisions}["runner.graphs"]
                assert (told if "," in attention else ", with 3 drafts each in") in reason
                params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
                outputs = llm.generate([[1, 2, 3], [7, 9]], params, use_tqdm=False)
                tokens[attention] = [list(o.outputs[0].token_ids) for o in outputs]
    finally:
        ATTENTION.unregister("second")
    assert tokens["reference,second"] == tokens["reference"]


def test_a_pair_is_one_option():
    backend, choice = choose("flex,reference", CPU, [spec()], ATTENTION)
    assert backend.kinds == (FlexBackend, ReferenceAttention) and choice.name == "flex,reference"
    assert choice.reason == "asked for: flex for requests with one query, reference for all others"
    assert EngineConfig.build(overrides={"runner.attention": "reference,flex"}).runner.attention == "reference,flex"


@pytest.mark.parametrize(
    "name, what",
    [
        ("reference,sdpa", 'layout of one is "NHD", of the other "heads first"'),
        ("cpu,triton", "cannot share a KV cache"),
        ("flex,flex", "two different ones"),
        ("flex,refrence", 'no option "refrence". Did you mean "reference"'),
        ("flex,auto", 'no option "auto"'),
        ("flex,reference,cpu", 'no option "reference,cpu"'),
    ],
)
def test_what_is_no_pair_is_refused_with_the_reason(name, what):
    with pytest.raises(ConfigError, match=what):
        choose(name, CPU, [spec()], ATTENTION)


def test_a_pair_cannot_run_where_one_of_them_cannot():
    with pytest.raises(ConfigError, match="flash,triton cannot run here: its kernels need a CUDA device"):
        choose("flash,triton", CPU, [spec()], ATTENTION)


def test_a_pair_reads_int8_only_if_both_do():
    with pytest.raises(ConfigError, match="int8"):
        choose("triton,flash", CPU, [spec()], ATTENTION, torch.int8)


@pytest.mark.parametrize("overrides", [{"executor.kind": "naive"}, {"kv.dtype": "int8"}], ids=str)
def test_what_conflicts_with_one_of_them_conflicts_with_the_pair(overrides):
    plain = {"kv.prefix": "none"} if "executor.kind" in overrides else {}
    with pytest.raises(ConfigError, match="cannot be combined with attention=(flashinfer|triton)"):
        EngineConfig.build(overrides={"runner.attention": "flashinfer,triton", **plain, **overrides})


class Wide(ReferenceAttention):
    def kv_shape(self, num_blocks):
        return (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_size + 4)


def test_a_name_that_two_layouts_bear_is_found_out():
    case = Case(spec(), MIXED)
    with pytest.raises(ConfigError, match="its shape is"):
        pair(ReferenceAttention, Wide)([case.spec], case.kv_spec, 4, CPU)


def test_libraries_and_the_triton_kernels_lay_out_one_cache():
    """flash,triton and the like: the pairs that a GPU would run. tests/kernels/interpret_pairs.py runs them."""
    names = ("triton", "flash", "flashinfer")
    for a in names:
        for b in names:
            if a != b:
                assert pair(ATTENTION.get(a), ATTENTION.get(b)).kv_layout == "HND"
