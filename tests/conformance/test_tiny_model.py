"""Every pair of data-plane options on a tiny random model: equal greedy and equal sampled tokens."""

import functools
import random
from dataclasses import replace

import pytest
from conformance.cover import all_pairs, label

from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.features import FEATURES, NEEDS_GPU
from minivllm.kernels.cpu import build

pytestmark = pytest.mark.usefixtures("forked_cores")

ELSEWHERE = NEEDS_GPU | {("executor", "simulated")}  # tests/kernels, test_simulated.py
AXES = [
    replace(feature, options=tuple(o for o in feature.options if (feature.name, o) not in ELSEWHERE))
    for feature in FEATURES
]
SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 40, "kv.block_size": 8}
SMALL["spec_decode.model"] = "dummy:tiny"  # for method draft: its own weights, so every guess is right
SMALL["executor.num_threads"] = 1  # threads only get in each other's way on a model this small
# What all backends of structured output have in common: equal masks, so equal tokens.
EXTRAS = [
    {},
    {"repetition_penalty": 1.3},
    {"min_tokens": 12},
    {"structured": StructuredParams(regex="([a-z ]{2,5}[0-9]){2,9}")},
    {"structured": StructuredParams(json={"type": "array", "items": {"enum": ["a", 1]}}, disable_any_whitespace=True)},
]


def generate(overrides):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [
        shared[: rng.randrange(21)] + [rng.randrange(200) for _ in range(rng.randrange(1, 30))] for _ in range(14)
    ]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, top_p=0.9 if i % 4 else 1.0, seed=i, max_tokens=12, **extra)
        for i, extra in zip(range(14), EXTRAS * 4, strict=False)
    ]
    with LLM(overrides={**SMALL, "debug.check": True, **overrides}) as llm:
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def wanted_of():
    """The tokens of a KV dtype and of weights: 8 bits change them, and then every other option must agree on it."""
    plain = {"runner.inputs": "rebuild", "runner.forward": "eager", "kv.num_blocks": 500, "structured.backend": "dfa"}
    plain["runner.attention"] = "reference"

    @functools.cache
    def wanted(kv_dtype="auto", quantization="none"):
        return generate({**plain, "kv.dtype": kv_dtype, "model.quantization": quantization})

    return wanted


def skip_without_compiler(config):
    needs = [("runner.attention", ("cpu",)), ("model.quantization", ("int8", "int4"))]
    if any(config.get(field) in values for field, values in needs) and build.unsupported_reason():
        pytest.skip(build.unsupported_reason())


@pytest.mark.parametrize("config", all_pairs(AXES), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config, wanted_of):
    skip_without_compiler(config)
    quantization = config["model.quantization"]
    # The tiny model's checkpoint has nothing to keep packed, and in fp32 nothing is: auto must be none.
    wanted = wanted_of(config["kv.dtype"], "none" if quantization == "auto" else quantization)
    got = generate(config)
    if config["spec_decode.acceptance"] == "rejection":  # keeps the distribution of sampled requests, not their tokens
        got, wanted = got[1::2], wanted[1::2]  # the greedy ones
    assert got == wanted


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_fewer_bits_give_other_tokens(quantization, wanted_of):
    """Else the comparisons above would compare nothing."""
    skip_without_compiler({"model.quantization": quantization})
    assert wanted_of("auto", quantization) != wanted_of()


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize(
    "attention, kv_dtype",
    [
        *((name, "auto") for name in ("reference", "sdpa", "cpu")),
        *(("cpu", kind) for kind in ("float16", "int8", "float8_e4m3fn")),
    ],
)
def test_every_chunk_size_gives_the_same_tokens(budget, attention, kv_dtype, wanted_of):
    config = {"scheduler.max_num_batched_tokens": budget, "runner.attention": attention, "kv.dtype": kv_dtype}
    skip_without_compiler(config)
    assert generate(config) == wanted_of(kv_dtype)
