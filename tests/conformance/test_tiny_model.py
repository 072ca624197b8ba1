"""Every pair of data-plane options on a tiny random model: equal greedy and equal sampled tokens."""

import random

import pytest
from conformance.cover import all_pairs, label

from minivllm import LLM, SamplingParams
from minivllm.features import FEATURES

AXES = list(FEATURES)
SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 8}
SMALL["spec_decode.model"] = "dummy:tiny"  # for method draft: its own weights, so every guess is right
SMALL["executor.num_threads"] = 1  # threads only get in each other's way on a model this small


def generate(overrides):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [
        shared[: rng.randrange(21)] + [rng.randrange(200) for _ in range(rng.randrange(1, 30))] for _ in range(14)
    ]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, top_p=0.9 if i % 4 else 1.0, seed=i, max_tokens=12, **extra)
        for i, extra in zip(range(14), [{}, {"repetition_penalty": 1.3}, {"min_tokens": 12}, {}] * 4, strict=False)
    ]
    with LLM(overrides={**SMALL, "debug.check": True, **overrides}) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted():
    return generate({"runner.attention": "reference", "runner.inputs": "rebuild", "kv.num_blocks": 500})


@pytest.mark.parametrize("config", all_pairs(AXES), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config, wanted):
    got = generate(config)
    if config["spec_decode.acceptance"] == "rejection":  # keeps the distribution of sampled requests, not their tokens
        got, expected = got[1::2], wanted[1::2]  # the greedy ones
    else:
        expected = wanted
    assert got == expected


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_every_chunk_size_gives_the_same_tokens(budget, attention, wanted):
    got = generate({"scheduler.max_num_batched_tokens": budget, "runner.attention": attention})
    assert got == wanted
