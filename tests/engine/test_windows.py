"""Rule: whatever a model's layers keep, the tokens are those of transformers. Layers with windows give blocks back."""

from __future__ import annotations

import functools

import pytest
from models.pairs import SMALL, greedy_oracle, random_tokens, save_oracle
from transformers import MistralConfig, Qwen2Config

from minivllm import LLM, SamplingParams

WINDOW, BLOCK, NUM_TOKENS = 12, 4, 16
KINDS = ["full_attention", "sliding_attention", "sliding_attention"] * 2  # groups of two: one full, two with windows
SIZES = {**SMALL, "num_hidden_layers": 6}
CONFIGS = {
    "mixed": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=KINDS),
    "windows": MistralConfig(**SMALL, sliding_window=WINDOW),
}
SHARED = random_tokens(2, 40)
PROMPTS = [random_tokens(1, 7), SHARED + random_tokens(7, 6), SHARED[:22] + random_tokens(8, 3)]
AGAIN = [SHARED, SHARED + random_tokens(9, 9)]
BASE = {"model.dtype": "float32", "kv.block_size": BLOCK, "kv.num_blocks": 400, "debug.check": True}
BASE |= {"executor.num_threads": 1, "scheduler.max_num_seqs": 4, "engine.core": "inproc"}


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """(folder, transformers' tokens for a prompt)"""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = save_oracle(CONFIGS[request.param], folder)
    return str(folder), functools.cache(lambda prompt: greedy_oracle(oracle, list(prompt), NUM_TOKENS))


def tokens_of(llm, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


WAYS = {
    "reference": {"runner.attention": "reference", "runner.forward": "eager", "runner.inputs": "rebuild"},
    "sdpa": {"runner.attention": "sdpa", "runner.inputs": "gather", "kv.prefix": "radix"},
    "chunks": {"runner.attention": "cpu", "runner.forward": "eager", "scheduler.max_num_batched_tokens": 16},
    "fused": {"runner.forward": "fused", "kv.prefix": "none"},
    "pieces": {"runner.forward": "piecewise", "runner.attention": "sdpa"},
    "overlap": {"engine.overlap": 2},
    "preempted": {"kv.num_blocks": 100, "scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 5},
    "swapped": {"kv.preemption": "swap", "kv.swap_memory": "1MiB", "debug.preempt_every": 5},
    "drafts": {"spec_decode.method": "ngram", "spec_decode.k": 3, "spec_decode.ngram_min": 1},
    "own layers": {"spec_decode.method": "self_draft", "spec_decode.k": 3, "spec_decode.layers": 2}
    | {"spec_decode.adaptive": False},
    "a draft model": {"spec_decode.method": "draft", "spec_decode.k": 3},
    "a draft model, preempted": {"spec_decode.method": "draft", "spec_decode.k": 3, "kv.num_blocks": 130}
    | {"kv.preemption": "swap", "kv.swap_memory": "1MiB", "debug.preempt_every": 5},
    "eagle": {"spec_decode.method": "eagle", "spec_decode.model": "dummy:eagle", "spec_decode.adaptive": False},
    "one run a request": {"kv.allocation": "max", "kv.prefix": "none", "model.max_model_len": 120},
    "recorded": {"runner.graphs": "full", "runner.forward": "eager", "runner.attention": "reference"},
    "phased": {"scheduler.kind": "phased", "scheduler.chunked_prefill": False},
}


CASES = [("mixed", way) for way in WAYS] + [("windows", "chunks"), ("windows", "a draft model")]


@pytest.mark.parametrize("model, way", CASES, indirect=["model"])
def test_greedy_tokens_equal_transformers(model, way):
    folder, oracle = model
    own = {"spec_decode.model": folder} if way.startswith("a draft model") else {}
    with LLM(overrides={**BASE, "model.path": folder, **own, **WAYS[way]}) as llm:
        for prompts in (PROMPTS, AGAIN):  # the second time prefixes are found
            assert tokens_of(llm, prompts) == [oracle(tuple(prompt)) for prompt in prompts]


@pytest.mark.parametrize("model", ["mixed"], indirect=True)
def test_a_draft_model_keeps_its_own_tokens_where_windows_give_blocks_back(model):
    """It is the target itself, so a guess that is refused was made of wrong K and V."""
    draft = {**WAYS["a draft model"], "spec_decode.model": model[0], "spec_decode.adaptive": False}
    with LLM(overrides={**BASE, "model.path": model[0], **draft}) as llm:
        for prompts in (PROMPTS, AGAIN):  # the second time prefixes are found, and of windows their last blocks alone
            tokens_of(llm, prompts)
        stats = llm._core.stats
        assert stats.num_accepted == stats.num_drafted > 40 and stats.prefix_hits > 40


SAID = {
    "mixed": ("layers in groups: 2 of all tokens, 2 of 12 tokens, 2 of 12 tokens", ""),
    "windows": (
        "layers in groups: 3 of 12 tokens",
        "layers with windows keep all tokens: a draft model keeps its K and V under the same block ids",
    ),
}


@pytest.mark.parametrize("model", SAID, indirect=True)
def test_the_start_says_what_layers_keep(model, request):
    def said(field, **overrides):
        with LLM(overrides={**BASE, "model.path": model[0], **overrides}) as llm:
            return "; ".join(d.reason for d in llm.decisions if d.field == field)

    groups, beside_a_draft = SAID[request.node.callspec.params["model"]]
    assert groups in said("kv.num_blocks")
    draft = {**WAYS["a draft model"], "spec_decode.model": model[0]}
    assert said("kv.allocation", **draft) == beside_a_draft
    assert ("layers in groups" in said("kv.num_blocks", **draft)) == (not beside_a_draft)
