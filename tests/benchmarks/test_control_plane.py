"""What the control plane costs, case by case, in microseconds: no torch, no model.

    make microbench                   measures, and compares with bench/results/microbench.json (compare.py)

In the suite each case runs once (--benchmark-disable), so that none can rot.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import tiny_tokenizers

from minivllm.batch import BatchKey, InputSizes
from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.engine.core import EngineStats
from minivllm.engine.detokenizer import Detokenizer
from minivllm.engine.messages import Report
from minivllm.features import INPUT_BUILDERS
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_hash import HashPrefix, sha256_cbor, xxhash_cbor
from minivllm.kv.prefix_radix import RadixPrefix
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest, Request, SamplingParams
from minivllm.runner.inputs import Rows
from minivllm.scheduler.base import Limits

BLOCK_SIZE, PROMPT, LONG_PROMPT, MAX_LEN = 16, 128, 2048, 4096
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_LEN - PROMPT, ignore_eos=True)
INDEXES = {"hash": lambda: HashPrefix(seed="bench"), "radix": RadixPrefix}


def tokens(seed: int, num: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49_152, num).tolist()


class Decoding:
    """A V1 scheduler in which num_reqs requests decode, one token each a step."""

    def __init__(self, num_reqs: int):
        config = EngineConfig.build("v1", {"kv.block_size": BLOCK_SIZE})
        num_blocks = num_reqs * MAX_LEN // BLOCK_SIZE
        limits = Limits(num_reqs, num_reqs * PROMPT, MAX_LEN, num_blocks * BLOCK_SIZE)
        self.scheduler = build_scheduler(config, build_kv(config, num_blocks, MAX_LEN), limits).base
        self.sizes = InputSizes(num_reqs, MAX_LEN, BLOCK_SIZE, num_blocks)
        for i in range(num_reqs):
            self.scheduler.add(Request.make(EngineRequest(f"cmpl-{i:016x}", tokens(i, PROMPT), PARAMS)))
        self.prefill = self.step()
        self.decode = self.step()
        assert self.decode.total_tokens == len(self.decode.num_tokens) == num_reqs

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.update(plan, StepOutput({req_id: [5] for req_id in plan.num_tokens}))
        return plan


@pytest.fixture(scope="module", params=[64, 256])
def decoding(request) -> Decoding:
    return Decoding(request.param)


@pytest.fixture
def measured(benchmark):
    """Times a call, in so many rounds."""
    return lambda call, rounds=200, setup=None: benchmark.pedantic(call, setup=setup, rounds=rounds, warmup_rounds=20)


def test_yardstick(measured):
    """Nothing of ours: what the interpreter and the machine are worth, which every other case is seen against."""

    def count():
        found = {}
        for i in range(2000):
            found[i % 97] = found.get(i % 97, 0) + i
        return found

    assert len(measured(count)) == 97


def test_schedule_and_update(decoding, measured):
    assert measured(decoding.step).total_tokens == len(decoding.scheduler.requests)


def test_kv_allocate_commit_free(measured):
    """A prompt of 128 blocks in a pool of 4,096 that finds nothing of itself there."""
    kv = PagedKVManager(4096, BLOCK_SIZE, HashPrefix(xxhash_cbor, seed="bench"))
    seeds = itertools.count()

    def new():
        return (Request("a", PARAMS, tokens(next(seeds), LONG_PROMPT), LONG_PROMPT),), {}

    def one_life(req):
        assert kv.lookup(req) == 0
        kv.allocate(req, LONG_PROMPT)
        req.num_computed_tokens = LONG_PROMPT
        kv.commit(req)
        kv.free(req)

    measured(one_life, setup=new)
    kv.check()


@pytest.mark.parametrize("index", INDEXES)
def test_prefix_lookup(index, measured):
    """Of 128 blocks that are all there, and whose keys are known."""
    prefix = INDEXES[index]()
    req = Request("a", PARAMS, tokens(0, LONG_PROMPT), LONG_PROMPT)
    keys = prefix.keys(req, LONG_PROMPT // BLOCK_SIZE, BLOCK_SIZE)
    prefix.publish(keys, 0, range(len(keys)))
    assert measured(lambda: prefix.match(keys)) == list(range(128))


@pytest.mark.parametrize("key_hash", [sha256_cbor, xxhash_cbor], ids=lambda f: f.__name__)
def test_block_hash(key_hash, measured):
    """The keys of a prompt of 128 blocks."""
    prefix, prompt = HashPrefix(key_hash, seed="bench"), tokens(0, LONG_PROMPT)

    def new():
        return (Request("a", PARAMS, prompt, LONG_PROMPT),), {}

    keys = measured(lambda req: prefix.keys(req, LONG_PROMPT // BLOCK_SIZE, BLOCK_SIZE), setup=new)
    assert len(set(keys)) == 128


@pytest.mark.parametrize("inputs", INPUT_BUILDERS.names())
def test_input_batch(inputs, decoding, measured):
    """A decode step's, from a plan that brings nobody new."""
    builder, rows = INPUT_BUILDERS.get(inputs)(decoding.sizes), Rows(decoding.sizes.max_rows)
    builder.apply(decoding.prefill, [rows.join(join.req_id) for join in decoding.prefill.joins])
    num_reqs = len(decoding.prefill.num_tokens)
    first = builder.build(decoding.prefill, BatchKey(decoding.prefill.total_tokens))
    builder.append(first, first.sample_requests, np.full(num_reqs, 5))
    builder.apply(decoding.decode, [])
    batch = measured(lambda: builder.build(decoding.decode, BatchKey(num_reqs)))
    assert batch.token_ids.tolist() == [5] * num_reqs


def test_detokenizer_step(measured):
    """One token of each of 64 streams, with stop strings to look out for."""
    tokenizer = tiny_tokenizers.byte_level()
    text = tokenizer.encode("hello world, and then some ")
    params = SamplingParams(max_tokens=None, stop=["never", "\n\n"])
    streams = [Detokenizer(tokenizer, params, text) for _ in range(64)]
    following = itertools.cycle(text)

    def push():
        token = next(following)
        return [stream.push([token]) for stream in streams]

    assert len(set(measured(push))) == 1


@pytest.mark.parametrize("num_reqs", [64, 256])
@pytest.mark.parametrize("what", ["plan", "report"])
@pytest.mark.parametrize("way", ["encode", "decode"])
def test_msgpack(way, what, num_reqs, measured):
    """Of a decode step: what a worker is told, and what a front end is."""
    ids = [f"cmpl-{i:016x}" for i in range(num_reqs)]
    if what == "plan":
        new_blocks = {req_id: [i] for i, req_id in enumerate(ids) if i % BLOCK_SIZE == 0}
        value = StepPlan(7, dict.fromkeys(ids, 1), dict.fromkeys(ids, PROMPT), new_blocks=new_blocks)
    else:
        deltas = [Delta(req_id, [5]) for req_id in ids]
        value = Report(deltas, EngineStats(), [], num_reqs, {"schedule": 0.1, "execute": 9.0, "update": 0.1})
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(type(value))
    encoded = encoder.encode(value)
    if way == "encode":
        assert measured(lambda: encoder.encode(value)) == encoded
    else:
        assert measured(lambda: decoder.decode(encoded)) == value
