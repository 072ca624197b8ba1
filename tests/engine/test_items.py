"""Rules: what an item holds reaches the workers once and not in plans; of a request that has ended, or was aborted at
any moment, nothing stays; a step encodes as much as it may, and whoever decodes goes on; memory for encoder outputs is
taken as recordings come."""

from __future__ import annotations

import pickle
import sys
import threading
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEngine
from models.speech import CONFIG, START, save_whisper

from minivllm import LLM, trace
from minivllm.attention.base import kv_spec
from minivllm.attention.cross import slot_shape
from minivllm.config import EngineConfig
from minivllm.engine.build import build
from minivllm.engine.build.engine import Engine
from minivllm.engine.build.worker import WorkerBuilder
from minivllm.engine.contents import Contents
from minivllm.errors import ConfigError
from minivllm.kv_groups import one_group
from minivllm.models import read_spec
from minivllm.models.whisper import WhisperModel
from minivllm.plan import StepPlan
from minivllm.request import EngineRequest, Item, SamplingParams
from minivllm.runner.memory import size_memory, size_slots

OPTIONS = {"model.dtype": "float32", "kv.num_blocks": 200, "kv.block_size": 8, "executor.num_threads": 1}
OPTIONS |= {"engine.core": "inproc", "debug.check": True}
NUM_NUMBERS = CONFIG.num_mel_bins * 2 * CONFIG.max_source_positions
EACH = CONFIG.max_source_positions


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("whisper")
    save_whisper(folder)
    return str(folder)


def engine_of(folder: str, **options: Any) -> Engine:
    return build(EngineConfig.build("v1", {"model.path": folder, **OPTIONS, **options}))


def worker_of(engine: Engine) -> Any:
    executor = engine.executor
    return getattr(executor, "inner", executor).worker


def state_of(engine: Engine) -> Any:
    return worker_of(engine).runner.model_state


def content_of(seed: int) -> bytes:
    return np.random.default_rng(seed).normal(size=NUM_NUMBERS).astype(np.float32).tobytes()


def asks(name: str, max_tokens: int = 20, content: bytes | None = None, digest: str = "") -> EngineRequest:
    digest, content = digest or name, content or content_of(sum(map(ord, name)))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, [START], params, items=(Item(0, 1, digest),), contents={digest: content})


def plans_of(engine: Engine) -> list[StepPlan]:
    """All that are submitted from now on."""
    plans: list[StepPlan] = []
    submit = engine.executor.submit
    engine.core.executor.submit = lambda plan: plans.append(plan) or submit(plan)
    return plans


def run(engine: Engine) -> None:
    """Until all have ended, and one step more, which tells the workers so."""
    while engine.core.has_work:
        engine.core.step()
    engine.core.step()
    engine.executor.call("facts")  # behind all that was told


def assert_nothing_stays(engine: Engine) -> None:
    state = state_of(engine)
    assert not state.contents and not state._slots and not state._slot_of
    assert all(list(cache) == [0] for cache in state._caches.values())


# ------------------------------------------------------------------------------------------------- what plans carry


class Workers:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.told: list[tuple[str, ...]] = []

    def tell(self, method: str, *args: Any) -> None:
        self.told.append((method, args[0]))
        if method == "hold_item":
            self.held[args[0]] = args[1]
        else:
            del self.held[args[0]]


def test_what_an_item_holds_is_told_once_for_all_who_name_it_and_dropped_with_the_last():
    workers = Workers()
    contents = Contents(workers)
    for name in "ab":
        contents.take(asks(name, digest="x"))
    contents.take(asks("c"))
    contents.drop(["a", "a", "stranger"])
    assert sorted(workers.held) == ["c", "x"]
    contents.drop(["b"])
    contents.take(asks("d", digest="x"))
    contents.drop("cd")
    assert not workers.held and not contents._of and not contents._num_users
    holds, drops = (
        [digest for method, digest in workers.told if method == name] for name in ("hold_item", "drop_item")
    )
    assert holds == ["x", "c", "x"] and drops == ["x", "c", "x"]


@pytest.mark.parametrize("num_bytes", [100, 100_000])
def test_a_plan_does_not_grow_with_what_its_prompts_have_beside_tokens(num_bytes):
    engine, sizes = FakeEngine(), []
    submit = engine.core.executor.submit
    engine.core.executor.submit = lambda plan: sizes.append(len(pickle.dumps(plan))) or submit(plan)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=3)
    for name in "ab":
        item = Item(0, 1, name)
        engine.core.add(EngineRequest(name, [1, 2], params, items=(item,), contents={name: bytes(num_bytes)}))
        engine.tokens[name] = []
    engine.run()
    assert max(sizes) < 2000


def test_a_recorded_run_with_recordings_is_replayed(whisper, tmp_path):
    file = tmp_path / "run.jsonl"
    engine = engine_of(whisper, **{"debug.trace": str(file), "scheduler.max_num_seqs": 2, "debug.preempt_every": 5})
    for name in "abcd":
        engine.core.add(asks(name, max_tokens=8))
    run(engine)
    engine.core.shutdown()
    report = trace.replay(file)
    assert report.divergence is None and report.num_tokens == 32
    longest = max(len(line) for line in file.read_bytes().splitlines() if b'"type":"step"' in line)
    assert longest < 4 * NUM_NUMBERS


# ------------------------------------------------------------------------------------------- nothing of it stays


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("num_steps", range(5))
def test_nothing_stays_of_a_request_that_is_aborted(whisper, overlap, num_steps):
    """Before it is encoded, in the very step, behind it; alone, or with another that goes on."""
    engine = engine_of(whisper, **{"engine.overlap": overlap})
    for others in ("", "b"):
        content = content_of(7)
        before = sys.getrefcount(content)
        for other in others:
            engine.core.add(asks(other, max_tokens=10))
        engine.core.add(asks("a", content=content))
        for _ in range(num_steps):
            engine.core.step()
        engine.core.abort(["a"])
        run(engine)
        assert_nothing_stays(engine)
        assert sys.getrefcount(content) == before
    engine.core.shutdown()


def test_a_request_that_is_aborted_while_it_is_encoded_leaves_nothing(whisper):
    engine = engine_of(whisper, **{"engine.overlap": 2})
    state, begun, goes_on = state_of(engine), threading.Event(), threading.Event()
    encode = state._model.encode

    def slow(x: torch.Tensor) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return encode(x)

    state._model.encode = slow
    engine.core.add(asks("a"))
    engine.core.step()
    assert begun.wait(20)
    engine.core.abort(["a"])
    assert "a" in state.contents  # it is being read
    goes_on.set()
    run(engine)
    assert_nothing_stays(engine)
    engine.core.shutdown()


@pytest.mark.parametrize("overlap", [1, 2])
def test_an_encoder_that_fails_ends_its_request_and_no_other_and_leaves_nothing(whisper, overlap):
    engine = engine_of(whisper, **{"engine.overlap": overlap})
    bad = asks("bad", content=b"\0" * 8)  # no spectrogram
    for er in (asks("a"), bad, asks("b")):
        engine.core.add(er)
    deltas = []
    while engine.core.has_work:
        deltas += engine.core.step()
    assert {d.req_id: d.finish_reason for d in deltas if d.finish_reason} == {
        "a": "length",
        "b": "length",
        "bad": "error",
    }
    run(engine)
    assert_nothing_stays(engine)
    engine.core.shutdown()


def test_what_requests_hold_is_gone_when_they_have_ended(whisper):
    engine = engine_of(whisper)
    for name in "abc":
        engine.core.add(asks(name))
    assert len(state_of(engine).contents) == 3
    run(engine)
    assert_nothing_stays(engine)
    engine.core.shutdown()


# ------------------------------------------------------------------------------------------------------ the budget


@pytest.mark.parametrize("budget, most", [(None, 1), (1, 1), (EACH, 1), (2 * EACH - 1, 1), (3 * EACH, 3), (10**6, 32)])
@pytest.mark.parametrize("overlap", [1, 2])
def test_no_step_encodes_more_and_every_step_decodes_all_who_run(whisper, budget, most, overlap):
    engine = engine_of(whisper, **{"scheduler.encoder_budget": budget, "engine.overlap": overlap})
    state, encoded = state_of(engine), []
    encode = state._model.encode
    state._model.encode = lambda x: encoded.append(1) or encode(x)
    for i in range(8):
        engine.core.add(asks(f"r{i}", max_tokens=50))
    for _ in range(12):
        engine.core.step()
    plans = plans_of(engine)
    for i in range(32):
        engine.core.add(asks(f"n{i}", max_tokens=2))
    running = {f"r{i}" for i in range(8)}
    while sum(len(plan.encode) for plan in plans) < 32:
        engine.core.step()
        plan = plans[-1]
        assert len(plan.encode) <= most and running <= plan.num_tokens.keys()
    assert max(len(plan.encode) for plan in plans) == most and len(plans) >= 32 // most
    run(engine)
    assert len(encoded) == 40
    engine.core.shutdown()


def test_the_table_at_start_says_what_a_step_encodes(whisper):
    def told(budget: int | None) -> tuple[Any, str]:
        engine = engine_of(whisper, **{"scheduler.encoder_budget": budget})
        engine.core.shutdown()
        (found,) = [each for each in engine.decisions if each.field == "scheduler.encoder_budget"]
        return found.value, found.reason

    assert told(None) == (EACH, f"1 item of {EACH} positions in a step")
    assert told(EACH - 1) == (EACH - 1, f"1 item of {EACH} positions in a step")
    assert told(4 * EACH + 1) == (4 * EACH + 1, f"4 items of {EACH} positions in a step")


@pytest.mark.parametrize(
    "budget, what",
    [
        (0, "must be at least 1"),
        (-1500, "must be at least 1"),
        ("all", "must be int | null"),
        (1.5, "must be int | null"),
        (True, "must be int | null"),
    ],
)
def test_what_is_no_budget_is_refused(budget, what):
    with pytest.raises(ConfigError, match="scheduler.encoder_budget") as error:
        EngineConfig.build("v1", {"scheduler.encoder_budget": budget})
    assert what in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"model.path": "dummy:tiny"},
        {"model.path": "dummy:tiny", "executor.kind": "naive", "kv.prefix": "none"},
        {"model.path": "dummy:tiny", "executor.kind": "simulated"},
    ],
)
def test_a_budget_for_a_model_without_an_encoder_is_refused(options):
    with pytest.raises(ConfigError, match="has no encoder: leave it out"):
        LLM(overrides={**options, "scheduler.encoder_budget": 1500, "engine.core": "inproc", "kv.num_blocks": 20})


# ----------------------------------------------------------------------------------------------------- the memory


def test_memory_for_encoder_outputs_is_taken_as_recordings_come(whisper):
    engine = engine_of(whisper)
    caches = state_of(engine)._caches.values()
    assert [len(cache) for cache in caches] == [1] * CONFIG.decoder_layers
    most = 0
    for i in range(5):
        engine.core.add(asks(f"r{i}", max_tokens=10 + i))
    while engine.core.has_work:
        engine.core.step()
        most = max(most, *map(len, caches))
    assert most == 5
    run(engine)
    assert_nothing_stays(engine)
    engine.core.shutdown()


LARGE = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "num_mel_bins": 128}
LARGE |= {
    "d_model": 1280,
    "decoder_layers": 32,
    "encoder_layers": 32,
    "decoder_attention_heads": 20,
    "vocab_size": 51866,
}
LARGE |= {"encoder_attention_heads": 20, "decoder_ffn_dim": 5120, "encoder_ffn_dim": 5120}  # large-v3's config.json


def test_a_start_with_large_v3_takes_the_memory_of_one_recording():
    """Of 128 requests at once, each of whose encoder outputs takes 246 MB."""
    with torch.device("meta"):
        spec = read_spec(LARGE)
        layers = WhisperModel(spec, torch.bfloat16, torch.device("meta")).attention_layers
    each = sum(2 * prod(slot_shape(layer)) for layer in layers if layer.cross is not None)
    assert each == 245_760_000
    own = [layer for layer in layers if layer.cross is None]
    groups = one_group([layer.kind for layer in layers])
    builder: Any = SimpleNamespace(groups=groups, dtype=torch.bfloat16, device=torch.device("meta"))
    caches = WorkerBuilder._caches(builder, layers, [torch.empty(0)] * len(own))
    assert sum(x.nbytes for cache in caches if isinstance(cache, dict) for x in cache.values()) == each
    config, blocks = EngineConfig.build(), kv_spec(own, 16, torch.bfloat16)
    device: Any = SimpleNamespace(type="cuda")
    for free, count in ((76 << 30, 128), (20 << 30, 60), (1 << 30, 3)):
        slots = size_slots(config, blocks, groups, device, 448, 0, each, free)
        assert slots == (count, count * each)
        sizes, _ = size_memory(config, blocks, groups, device, 448, slots.num_bytes, free)
        assert sizes.num_blocks >= count * 28 and sizes.max_model_len == 448  # all of them find room for 448 tokens
        assert slots.num_bytes + sizes.num_blocks * blocks.bytes_per_block <= free
    with pytest.raises(
        ConfigError, match=r"no room for an encoder's output: K and V that are made of it take 234.4 MiB"
    ):
        size_slots(config, blocks, groups, device, 448, 0, each, 300 << 20)


def test_a_pool_leaves_room_for_what_is_encoded(whisper, monkeypatch):
    """Each of 3 layers keeps 2 * 50 * 64 floats of a recording; a request of 64 tokens takes 8 blocks."""
    monkeypatch.setattr("minivllm.runner.memory.free_memory", lambda device: 16 << 20)
    block, slot, half = 2 * 3 * 64 * 4 * 8, 3 * 2 * 50 * 64 * 4, 8 << 20

    def started(**more: Any) -> tuple[int, int]:
        """Blocks, and slots."""
        options = {name: value for name, value in OPTIONS.items() if name != "kv.num_blocks"}
        with LLM(whisper, overrides=options | more) as llm:
            (told,) = [decision for decision in llm.decisions if decision.field == "scheduler.max_num_seqs"]
            count = llm._core.scheduler.base.items.most
            assert (
                told.reason
                == f"as configured; {count} at once may have an encoder's output, 75.0 KiB each when it comes"
            )
            return llm.info["num_blocks"], count

    assert started(**{"scheduler.max_num_seqs": 8}) == (64, 8)
    assert started() == (half // block, half // (slot + 8 * block))
    assert started(**{"kv.num_blocks": 1000}) == (1000, (half - 500 * block) // slot)
    assert started(**{"kv.memory": "10MiB"}) == ((10 << 20) // block, (3 << 20) // slot)
    assert started(**{"kv.memory": "1GiB"}) == (1024, (half - 512 * block) // slot)  # no more than 128 requests use
    assert started(**{"kv.memory": "10MiB", "kv.memory_fraction": 0.9})[1] == int(0.9 * (6 << 20)) // slot
    with pytest.raises(ConfigError, match="no room for an encoder's output"):
        started(**{"kv.num_blocks": 1360})


def test_requests_wait_for_memory_of_those_that_run(whisper, monkeypatch):
    monkeypatch.setattr("minivllm.runner.memory.free_memory", lambda device: 16 << 20)
    engine = engine_of(
        whisper, **{"kv.num_blocks": ((16 << 20) - 400_000) // 12_288, "scheduler.encoder_budget": 10**6}
    )
    limits = engine.core.scheduler.base.limits
    assert limits.max_items is not None and 1 < limits.max_items < 4
    for name in "abcdefgh":
        engine.core.add(asks(name))
    ended, most = set(), 0
    while engine.core.has_work:
        ended |= {delta.req_id for delta in engine.core.step() if delta.finish_reason == "length"}
        most = max(most, len(state_of(engine)._slots))
    assert ended == set("abcdefgh") and most == limits.max_items
    engine.core.shutdown()
