"""Every option that meets LoRA in the all-pairs cover, with adapters at work: equal greedy and equal sampled tokens."""

from __future__ import annotations

import functools
import random

import pytest
from conformance.cover import all_pairs, label
from conformance.test_tiny_model import (
    AXES,
    NOTHING_PACKED,
    SMALL,
    assert_equal,
    of_the_reference,
    skip_without_compiler,
)
from lora.adapters import write_adapter

from minivllm import LLM, SamplingParams, trace
from minivllm.features import CONFLICTS
from minivllm.lora import layer

pytestmark = pytest.mark.usefixtures("forked_cores")

NAMES = (None, "a", "b", "c")
# In int8 a rounding of 1e-6, as two kernels differ by, can put a cached value on the next of its 127 steps. Seen from
# that: log-probabilities that differ by 5e-4. Two tokens nearer than this are a tie, and either of them is right.
TIE_IN_INT8 = 1e-3
CONFIGS = [config for config in all_pairs(AXES, CONFLICTS + NOTHING_PACKED) if config["lora.enabled"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    targets = {"a": ("q_proj",), "b": ("v_proj", "gate_proj", "down_proj")}
    ranks = {"a": 8, "b": 16, "c": 40}
    return {
        name: str(write_adapter(root / name, i, rank, **({"targets": targets[name]} if name in targets else {})))
        for i, (name, rank) in enumerate(ranks.items())
    }


def run(folders, overrides, observers=()):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [
        shared[: rng.randrange(21)] + [rng.randrange(200) for _ in range(rng.randrange(1, 30))] for _ in range(12)
    ]
    wanted = {"max_tokens": 10, "ignore_eos": True, "logprobs": 2}
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, **wanted) for i in range(12)]
    lora = {"lora.enabled": True, "lora.max_loras": 2, "lora.adapters": folders, "debug.check": True}
    with LLM(overrides={**SMALL, **lora, **overrides}, observers=observers) as llm:
        used = [NAMES[i % 4] for i in range(12)]
        outputs = llm.generate(prompts, params, lora_request=used, use_tqdm=False)
        assert not any(adapter.num_users for adapter in llm.list_loras())
        return [output.outputs[0] for output in outputs]


def generate(folders, overrides, observers=()):
    return [list(output.token_ids) for output in run(folders, overrides, observers)]


def up_to_a_tie(tokens, oracle):
    """The tokens up to a greedy tie (TIE_IN_INT8), then the oracle's: no more can be said from there on."""
    wanted = list(oracle.token_ids)
    for place, (token, found) in enumerate(zip(tokens, oracle.logprobs, strict=True)):
        if token != wanted[place]:
            best, second = sorted((logprob.logprob for logprob in found.values()), reverse=True)[:2]
            is_tie = token in found and best - second < TIE_IN_INT8
            return wanted if is_tie else tokens
    return tokens


@pytest.fixture(scope="module")
def wanted_of(folders):
    """By what changes tokens: with as many slots as adapters and inputs made from scratch."""
    plain = {"runner.inputs": "rebuild", "runner.forward": "eager", "kv.num_blocks": 500, "lora.max_loras": 3}
    plain["runner.attention"] = "reference"

    @functools.cache
    def wanted(items):
        return run(folders, {**plain, **dict(items)})

    return lambda config: wanted(tuple(of_the_reference(config).items()))


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_option_gives_the_same_tokens_with_adapters(config, folders, wanted_of):
    skip_without_compiler(config)
    is_auto = config["model.quantization"] == "auto"  # nothing is packed in this checkpoint
    oracle = wanted_of(config | ({"model.quantization": "none"} if is_auto else {}))
    got, wanted = generate(folders, config), [list(output.token_ids) for output in oracle]
    if config["kv.dtype"] == "int8":
        got[::2] = [up_to_a_tie(*pair) for pair in zip(got[::2], oracle[::2], strict=True)]  # the greedy ones
    if config["spec_decode.acceptance"] == "rejection":  # keeps the distribution of sampled requests, not their tokens
        got, wanted = got[::2], wanted[::2]
    assert_equal(got, wanted, config)


@pytest.fixture(scope="module")
def plain_tokens(wanted_of):
    return [list(output.token_ids) for output in wanted_of({})]


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_every_chunk_size_gives_the_same_tokens_with_adapters(budget, folders, plain_tokens):
    assert generate(folders, {"scheduler.max_num_batched_tokens": budget}) == plain_tokens


def test_both_ways_to_multiply_give_the_same_tokens(folders, plain_tokens, monkeypatch):
    monkeypatch.setattr(layer.cpu_kernel, "unsupported_reason", lambda: "no compiler")
    assert generate(folders, {}) == plain_tokens


def test_a_recorded_run_replays_with_the_adapters_of_its_configuration(folders, tmp_path, plain_tokens):
    path = tmp_path / "run.jsonl"
    assert generate(folders, {}, [trace.TraceRecorder(path)]) == plain_tokens
    report = trace.replay(path)
    assert report.divergence is None and report.num_tokens == 120
