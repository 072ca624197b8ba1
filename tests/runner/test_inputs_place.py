"""Rules: runner.inputs=gather has its tables on the device wherever that is not the host and attention can do with it;
tokens are then those of any other builder."""

import random

import pytest
import torch
from lora.adapters import write_adapter
from runner import test_async_engine
from runner.test_async_engine import SlowCopies, tokens_of

from minivllm import LLM, SamplingParams
from minivllm.attention.composite import pair
from minivllm.attention.flex import FlexBackend
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.sdpa import SDPAAttention
from minivllm.batch import InputSizes
from minivllm.config import EngineConfig
from minivllm.engine.build import build
from minivllm.features import ATTENTION, DEVICE_INPUT_BUILDERS, INPUT_BUILDERS
from minivllm.kernels.dispatch import Dispatch
from minivllm.request import EngineRequest
from minivllm.runner import async_sampling, inputs_place
from minivllm.runner.inputs_place import place_inputs

CPU = torch.device("cpu")
SIZES = InputSizes(max_rows=3, max_model_len=40, block_size=4, spare_block=9)
TINY = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.block_size": 8, "executor.num_threads": 1}
TINY |= {"kv.num_blocks": 60, "debug.check": True, "runner.attention": "reference"}
TINY |= {"spec_decode.k": 3, "spec_decode.adaptive": False}  # several passes of a draft model in each step


def placed(name, attention, device):
    kernels = Dispatch("torch", device)
    return place_inputs(name, INPUT_BUILDERS, DEVICE_INPUT_BUILDERS, device, attention, kernels)


def test_where_the_tables_are_and_why(apart):
    device = placed("gather", ReferenceAttention, apart)
    builder = device.make(SIZES)
    assert builder.on_device and builder.tables.device == apart and "on the device" in device.reason
    for attention in (SDPAAttention, pair(ReferenceAttention, FlexBackend)):
        host = placed("gather", attention, apart)
        assert not host.make(SIZES).on_device and attention.__name__ in host.reason
    for name, where in (("gather", CPU), ("persistent", apart), ("rebuild", apart)):
        nowhere_else = placed(name, ReferenceAttention, where)
        assert not nowhere_else.make(SIZES).on_device and nowhere_else.reason is None


def test_every_form_for_devices_is_one_of_a_builder_and_every_backend_says_what_it_reads():
    assert set(DEVICE_INPUT_BUILDERS.names()) <= set(INPUT_BUILDERS.names())
    assert {type(ATTENTION.get(name).host_tables) for name in ATTENTION.names()} == {bool}


# ---------------------------------------------------------------- engines


@pytest.fixture
def tables_apart(monkeypatch):
    monkeypatch.setattr(inputs_place, "is_apart", lambda device: True)


@pytest.fixture
def stream(monkeypatch):
    """Of copies to the host that are slow (test_async_engine.py)."""
    found = SlowCopies(0)
    monkeypatch.setattr(async_sampling, "make_copies", lambda device: found)
    return found


KINDS = [  # the first two outlive those that need the host between two steps
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "n": 2},
]


def generate(inputs="gather", **options):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [shared[: rng.randrange(21)] + [rng.randrange(200)] * (1 + i % 5) for i in range(14)]
    params = [SamplingParams(seed=i, max_tokens=5 + i + 20 * (i % 5 < 2), **KINDS[i % len(KINDS)]) for i in range(14)]
    with LLM(overrides={**TINY, "runner.inputs": inputs, **options}) as llm:
        reasons = [d.reason for d in llm.decisions if d.field == "runner.inputs"]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.token_ids), o.finish_reason) for out in outputs for o in out.outputs], reasons


@pytest.fixture(scope="module")
def wanted():
    return generate("rebuild")[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine.overlap": 2},
        {"engine.overlap": 2, "runner.graphs": "full"},
        {"engine.overlap": 2, "runner.graphs": "full+piecewise", "scheduler.max_num_seqs": 5, "debug.evict_all": True},
        {"engine.overlap": 2, "debug.preempt_every": 3, "kv.num_blocks": 30},
        {"engine.overlap": 2, "scheduler.max_num_batched_tokens": 9, "kv.prefix": "radix"},
        {"runner.graphs": "full", "spec_decode.method": "ngram", "debug.preempt_every": 5},
        {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny", "scheduler.max_num_batched_tokens": 30},
        {"spec_decode.method": "draft", "spec_decode.model": "dummy:tiny", "spec_decode.acceptance": "rejection"},
        {"spec_decode.method": "self_draft", "spec_decode.layers": 1, "runner.graphs": "full"},
        {"spec_decode.method": "eagle", "spec_decode.model": "dummy:eagle", "debug.preempt_every": 4},
        {"kv.preemption": "swap", "debug.preempt_every": 3},
        {"runner.forward": "piecewise", "engine.overlap": 2},
    ],
    ids=str,
)
def test_no_token_changes(options, wanted, tables_apart, stream):
    if options.get("spec_decode.acceptance") == "rejection":
        wanted = generate("rebuild", **options)[0]
    got, (reason,) = generate(**options)
    assert got == wanted and "on the device" in reason
    assert (stream.num_copies > 5) == (options.get("engine.overlap") == 2) and not stream._in_flight


def test_tokens_of_a_step_are_the_next_steps_inputs_before_the_host_has_seen_them(tables_apart, stream, monkeypatch):
    """No placeholder stands anywhere: the builder is asked for the next step by itself."""
    monkeypatch.setattr(async_sampling, "NewestTokens", None)
    overrides = {**TINY, "runner.inputs": "gather", "engine.overlap": 2}
    core = build(EngineConfig.build("v1", overrides)).core
    tokens = tokens_of(core, [EngineRequest("a", [3, 4, 5], SamplingParams(temperature=0.0, max_tokens=20))])
    assert len(tokens["a"]) == 20 and stream.most_in_flight == 2


def test_adapters_are_those_of_the_requests(tables_apart, stream, tmp_path):
    """The step that has one is not replayed whole: its shape is another, and so is its padding."""
    folders = {name: str(write_adapter(tmp_path / name, i, 8)) for i, name in enumerate("ab")}
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 9, 9, 20)]

    def tokens(**options):
        own = {"lora.enabled": True, "lora.adapters": folders, "engine.overlap": 2, **options}
        with LLM(overrides={**TINY, **own}) as llm:
            outputs = llm.generate([[7, 8, 9]] * 4, params, lora_request=["a", None, "b", None], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    host = tokens(**{"runner.inputs": "rebuild"})
    assert host[0] != host[1] != host[2] and host[1] == host[3][:9]
    assert tokens(**{"runner.inputs": "gather", "runner.graphs": "full"}) == host


@pytest.mark.parametrize("seed", range(2))
def test_aborts_and_failing_steps_leave_the_others_their_tokens(seed, tables_apart, stream, monkeypatch):
    """What a step left in the tables that failed behind its launch is nobody's."""
    run = test_async_engine.test_aborts_and_failing_steps_leave_the_others_their_tokens
    run("gather", "full+piecewise", seed, [stream], monkeypatch)
