"""executor.kind=simulated with every option that it can hold, and every pair of these: equal tokens. They mean nothing,
but are a function of prompt and seed as a model's would be. That plans are a real worker's: tests/simulate."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from conformance.cover import all_pairs, in_conflict, label

from minivllm import LLM, SamplingParams
from minivllm.features import FEATURES

pytestmark = pytest.mark.usefixtures("forked_cores")

SIMULATED = ("executor", "simulated")
AXES = [
    replace(axis, options=tuple(o for o in axis.options if not in_conflict([SIMULATED, (axis.name, o)])))
    for axis in FEATURES
    if axis.name != "executor"
]
AXES.append(replace(next(axis for axis in FEATURES if axis.name == "executor"), options=("simulated",)))
TINY = {
    "model.path": "dummy:tiny",
    "executor.kind": "simulated",
    "executor.device": "b200",
    "executor.answer_tokens": 20,
    "kv.num_blocks": 40,
    "kv.block_size": 8,
    "debug.check": True,
}


def generate(overrides):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [shared[: rng.randrange(21)] + [rng.randrange(200)] * rng.randrange(1, 30) for _ in range(14)]
    params = [SamplingParams(seed=i, max_tokens=30, logprobs=i % 3 or None, n=1 + i % 2) for i in range(14)]
    with LLM(overrides={**TINY, **overrides}) as llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(one.token_ids), one.finish_reason, one.logprobs) for out in outs for one in out.outputs]


@pytest.fixture(scope="module")
def wanted():
    return generate({"kv.num_blocks": 500, "runner.inputs": "rebuild"})


@pytest.mark.parametrize("config", all_pairs(AXES), ids=label)
def test_every_pair_of_options_gives_the_same_tokens(config, wanted):
    assert generate(config) == wanted
