"""A draft model with the target's weights is always right, unless its K and V are wrong: so every draft that is refused
shows a slot that was not written, or written with something else."""

import random

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.loading import load_model
from minivllm.loading.dummy import SHAPES
from minivllm.plan import Join
from minivllm.spec_decode.draft_model import first_layers

SMALL = {
    "model.path": "dummy:tiny",
    "model.dtype": "float32",
    "kv.num_blocks": 60,
    "kv.block_size": 4,
    "executor.num_threads": 1,
    "debug.check": True,
    "spec_decode.method": "draft",
    "spec_decode.model": "dummy:tiny",
    "spec_decode.adaptive": False,
}
WHERE = {
    "plain": {},
    "chunks": {"scheduler.max_num_batched_tokens": 9},
    "preempted": {"debug.preempt_every": 3},
    "swapped": {"debug.preempt_every": 3, "kv.preemption": "swap"},
    "crowded": {"kv.num_blocks": 24},
    "v0": {
        "scheduler.kind": "phased",
        "scheduler.chunked_prefill": False,
        "kv.preemption": "swap",
        "kv.num_blocks": 40,
    },
    "radix": {"kv.prefix": "radix"},
    "contiguous": {"kv.allocation": "oracle", "kv.prefix": "none"},
    "rebuilt": {"runner.inputs": "rebuild", "runner.attention": "reference"},
}


def requests(temperature: float) -> tuple[list[dict], list[SamplingParams]]:
    rng = random.Random(1)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [
        shared[: rng.randrange(21)] + [rng.randrange(200) for _ in range(rng.randrange(1, 20))] for _ in range(8)
    ]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=rng.randrange(1, 25),
            ignore_eos=True,
            n=1 + i % 2 if temperature else 1,
        )
        for i in range(8)
    ]
    return [{"prompt_token_ids": p} for p in prompts], params


def generate(temperature: float, **overrides):
    with LLM(overrides={**SMALL, **overrides}) as llm:
        outputs = []
        for _ in range(2):  # the second time with prefixes in the cache
            done = llm.generate(*requests(temperature), use_tqdm=False)
            outputs.append([[list(o.token_ids) for o in out.outputs] for out in done])
        return outputs, llm._core.stats


@pytest.fixture(scope="module")
def wanted():
    return {t: generate(t, **{"spec_decode.method": "none"})[0] for t in (0.0, 0.9)}


@pytest.mark.parametrize("where, temperature", [*((w, 0.9) for w in WHERE), ("plain", 0.0), ("v0", 0.0)])
def test_the_same_model_is_never_refused(where, temperature, wanted):
    outputs, stats = generate(temperature, **WHERE[where])
    assert outputs == wanted[temperature]
    assert stats.num_drafted == stats.num_accepted > 100


def test_equal_distributions_are_never_refused_by_rejection_sampling():
    _, stats = generate(0.9, **{"spec_decode.acceptance": "rejection", "scheduler.max_num_batched_tokens": 9})
    assert stats.num_drafted == stats.num_accepted > 100


@pytest.mark.parametrize("where", ["plain", "chunks", "swapped", "rebuilt"])
def test_the_models_first_layers_change_no_token(where, wanted):
    outputs, stats = generate(0.0, **{**WHERE[where], "spec_decode.method": "self_draft", "spec_decode.layers": 3})
    assert outputs == wanted[0.0]
    assert 0 < stats.num_accepted < stats.num_drafted


def test_the_first_layers_leave_the_model_as_it_is():
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    early = first_layers(model, 2)
    assert len(model.layers) == len(model.attention_layers) == 4
    assert len(early.layers) == len(early.attention_layers) == 2
    assert early.layers[1] is model.layers[1] and early.embedding is model.embedding


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"spec_decode.model": None}, "needs spec_decode.model"),
        (
            {"spec_decode.model": "dummy:smollm2-135m"},
            "^spec_decode.model=dummy:smollm2-135m has 49152 tokens, the model 512: a draft model must have the same",
        ),
        ({"spec_decode.method": "self_draft", "spec_decode.layers": 4}, "must be fewer than the model's 4"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        LLM(overrides={**SMALL, **overrides})


@pytest.mark.parametrize("max_tokens, last", [(5, 11), (57, 63), (58, 63), (None, 63)])
def test_no_draft_is_made_behind_the_last_token_that_can_be_output(max_tokens, last):
    """Of a prompt of 7 tokens, where 64 may be in all."""
    with LLM(overrides={**SMALL, "model.max_model_len": 64}) as llm:
        proposer = llm._core.executor.worker.runner.head.proposer
        proposer.join(3, Join("x", list(range(7)), 7, SamplingParams(max_tokens=max_tokens)))
        assert proposer.last[3] == last


def test_a_draft_model_for_shorter_texts_is_refused(monkeypatch):
    monkeypatch.setitem(SHAPES, "short", SHAPES["tiny"] | {"max_position_embeddings": 64})
    how = {**SMALL, "spec_decode.model": "dummy:short"}
    with LLM(overrides={**how, "model.max_model_len": 64}) as llm:
        assert llm.info["num_blocks"] == 60
    with pytest.raises(ConfigError, match="=dummy:short was made for 64 tokens, fewer than model.max_model_len=65"):
        LLM(overrides={**how, "model.max_model_len": 65})


def test_a_block_takes_both_models_bytes():
    with LLM(overrides={**SMALL, "kv.num_blocks": None, "kv.memory": "1MiB"}) as with_draft:
        blocks = with_draft.info["num_blocks"]
    with LLM(overrides={**SMALL, "kv.num_blocks": None, "kv.memory": "1MiB", "spec_decode.method": "none"}) as alone:
        assert abs(alone.info["num_blocks"] - 2 * blocks) <= 1
