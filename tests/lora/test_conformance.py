"""Every option that meets LoRA in the all-pairs cover, with adapters at work: equal greedy and equal sampled tokens."""

from __future__ import annotations

import functools
import random

import pytest
from conformance.cover import all_pairs, label
from conformance.test_tiny_model import AXES, SMALL, skip_without_compiler
from lora.adapters import write_adapter

from minivllm import LLM, SamplingParams, trace
from minivllm.lora import layer

NAMES = (None, "a", "b", "c")
CONFIGS = [config for config in all_pairs(AXES) if config["lora.enabled"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    targets = {"a": ("q_proj",), "b": ("v_proj", "gate_proj", "down_proj")}
    ranks = {"a": 8, "b": 16, "c": 40}
    return {
        name: str(write_adapter(root / name, i, rank, **({"targets": targets[name]} if name in targets else {})))
        for i, (name, rank) in enumerate(ranks.items())
    }


def generate(folders, overrides, observers=()):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [
        shared[: rng.randrange(21)] + [rng.randrange(200) for _ in range(rng.randrange(1, 30))] for _ in range(12)
    ]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10, ignore_eos=True) for i in range(12)]
    lora = {"lora.enabled": True, "lora.max_loras": 2, "lora.adapters": folders, "debug.check": True}
    with LLM(overrides={**SMALL, **lora, **overrides}, observers=observers) as llm:
        used = [NAMES[i % 4] for i in range(12)]
        outputs = llm.generate(prompts, params, lora_request=used, use_tqdm=False)
        assert not any(adapter.num_users for adapter in llm.list_loras())
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def wanted_of(folders):
    """By KV dtype and by weights: with as many slots as adapters and inputs made from scratch."""
    plain = {"runner.inputs": "rebuild", "runner.forward": "eager", "kv.num_blocks": 500, "lora.max_loras": 3}
    of_dtype = {"auto": {"runner.attention": "reference"}, "int8": {"runner.attention": "cpu", "kv.dtype": "int8"}}

    @functools.cache
    def wanted(kv_dtype="auto", quantization="none"):
        return generate(folders, {**plain, **of_dtype[kv_dtype], "model.quantization": quantization})

    return wanted


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_option_gives_the_same_tokens_with_adapters(config, folders, wanted_of):
    skip_without_compiler(config)
    quantization = config.get("model.quantization", "auto")
    wanted = wanted_of(config.get("kv.dtype", "auto"), "none" if quantization == "auto" else quantization)
    assert generate(folders, config) == wanted


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_every_chunk_size_gives_the_same_tokens_with_adapters(budget, folders, wanted_of):
    assert generate(folders, {"scheduler.max_num_batched_tokens": budget}) == wanted_of()


def test_both_ways_to_multiply_give_the_same_tokens(folders, wanted_of, monkeypatch):
    monkeypatch.setattr(layer.cpu_kernel, "obstacle", lambda: "no compiler")
    assert generate(folders, {}) == wanted_of()


def test_a_recorded_run_replays_with_the_adapters_of_its_configuration(folders, tmp_path, wanted_of):
    path = tmp_path / "run.jsonl"
    assert generate(folders, {}, [trace.TraceRecorder(path)]) == wanted_of()
    report = trace.replay(path)
    assert report.divergence is None and report.num_tokens == 120
