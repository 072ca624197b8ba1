"""Rule: a prompt given as its tokens' embeddings is answered as the tokens are, whatever the engine does meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import BadRequest
from minivllm.loading import load_model

TINY = {
    "model.path": "dummy:tiny",
    "model.dtype": "float32",
    "model.max_model_len": 128,
    "kv.num_blocks": 60,
    "executor.num_threads": 1,
}
PROMPTS = [[5, 6, 7], [9] * 40, list(range(3, 60))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6)
WAYS = {
    "as it is": {},
    "in chunks, preempted": {"scheduler.max_num_batched_tokens": 16, "debug.preempt_every": 3},
    "swapped": {"debug.preempt_every": 3, "kv.preemption": "swap", "kv.swap_memory": "16MiB"},
    "eager": {"runner.forward": "eager", "runner.inputs": "rebuild", "kv.prefix": "radix"},
    "captured": {"runner.forward": "eager", "runner.graphs": "full+piecewise", "runner.inputs": "gather"},
    "two steps in flight": {"engine.overlap": 2},
    "drafts of its own layers": {"spec_decode.method": "self_draft", "spec_decode.layers": 1},
    "in a process": {"engine.core": "process"},
}


@pytest.fixture(scope="module")
def embed():
    model = load_model("dummy:tiny", torch.float32, torch.device("cpu")).model
    return lambda token_ids: model.embed(torch.tensor(token_ids))


@pytest.fixture(scope="module")
def expected():
    with LLM(overrides=TINY) as llm:
        return answers(llm, [{"prompt_token_ids": ids} for ids in PROMPTS])


def answers(llm, prompts) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_of_tokens_are_answered_as_the_tokens(way, embed, expected):
    with LLM(overrides={**TINY, "debug.check": True, **WAYS[way]}) as llm:
        assert answers(llm, [{"prompt_embeds": embed(ids)} for ids in PROMPTS]) == expected
        soft = [{"prompt_embeds": embed(ids[:2]), "prompt_token_ids": ids[2:]} for ids in PROMPTS]
        mixed = [{"prompt_token_ids": PROMPTS[0]}, *soft[1:]]  # with and without in one batch
        assert answers(llm, mixed) == expected


def test_the_prefix_cache_finds_equal_vectors_and_no_others(embed):
    first, other = embed(PROMPTS[2]), embed(PROMPTS[2])
    other[20] += 1  # in the second block
    with LLM(overrides=TINY) as llm:

        def cached(vectors, **more) -> int:
            (output,) = llm.generate([{"prompt_embeds": vectors, **more}], PARAMS, use_tqdm=False)
            return output.num_cached_tokens

        assert [cached(first), cached(first), cached(other), cached(first, cache_salt="s")] == [0, 48, 0, 0]
        assert cached(first.numpy()) == cached(first.bfloat16().float()[None]) + 48  # an array; rounded: others
        (output,) = llm.generate({"prompt_token_ids": [0] * 57}, PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == 0  # the placeholders as tokens


def test_samples_of_a_prompt_share_what_is_carried_and_nothing_stays(embed):
    with LLM(overrides={**TINY, "engine.core": "inproc"}) as llm:
        state, plans = llm._core.executor.worker.runner.model_state, []
        encode = state.encode
        state.encode = lambda plan: plans.append(plan) or encode(plan)
        params = SamplingParams(n=3, seed=1, max_tokens=5)
        vectors, twice = embed(PROMPTS[1]), [0, 1]
        llm.generate([{"prompt_embeds": vectors} for _ in twice], params, use_tqdm=False)
        llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
        assert sum(len(plan.encode) for plan in plans) == sum(len(plan.forget) for plan in plans) == 1
        assert not state._vectors and not state._items


@pytest.mark.parametrize(
    "wrong, what",
    [
        (torch.zeros(3, 7), "shape"),
        (torch.zeros(0, 64), "shape"),
        (torch.zeros(2, 3, 64), "shape"),
        (torch.zeros(500, 64), "500 positions"),
        (torch.zeros(3, 64, dtype=torch.int64), "floating-point"),
        (torch.zeros(3, 64).to_sparse(), "dense"),
        (torch.full((3, 64), float("nan")), "numbers from"),
        (torch.full((3, 64), 1e30), "numbers from"),
        ("text", "tensor"),
        (None, "tensor"),
        (np.zeros((3, 64), np.complex64), "floating-point"),
    ],
)
def test_what_is_no_prompt_is_refused(engine, wrong, what):
    with pytest.raises(BadRequest, match=what):
        engine.generate({"prompt_embeds": wrong}, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"repetition_penalty": 1.5}])
def test_what_needs_the_prompts_tokens_is_refused(engine, params):
    with pytest.raises(BadRequest, match="does not go with prompt_embeds"):
        engine.generate({"prompt_embeds": torch.zeros(3, 64)}, PARAMS.replace(**params), use_tqdm=False)


@pytest.fixture(scope="module")
def engine():
    with LLM(overrides=TINY) as llm:
        yield llm


def test_transformers_own_model_takes_none():
    with (
        LLM(preset="naive", overrides=TINY) as llm,
        pytest.raises(BadRequest, match="takes no prompt embeddings"),
    ):
        llm.generate({"prompt_embeds": torch.zeros(3, 64)}, PARAMS, use_tqdm=False)
