"""The tests of chapter 1's exercise: a made-up model whose rule you can follow, and a small one with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from exercise import generate_naive

from chapters.lab import all_logits
from minivllm import LLM, SamplingParams
from minivllm.loading import load_model

VOCAB = 50


def follow_the_sum(token_ids: Sequence[int]) -> torch.Tensor:
    """A model: what follows is the sum of all tokens so far, plus their number. [n, VOCAB]"""
    logits = torch.zeros(len(token_ids), VOCAB)
    for i in range(len(token_ids)):
        logits[i, (sum(token_ids[: i + 1]) + i + 1) % VOCAB] = 1.0
    return logits


def test_each_token_follows_from_all_before_it():
    # 1 + 2 and two tokens: 5. Then 1 + 2 + 5 and three: 11. Then 19 and four: 23.
    assert generate_naive(follow_the_sum, [1, 2], 3) == [5, 11, 23]


def test_max_new_is_kept():
    for n in (0, 1, 5):
        assert len(generate_naive(follow_the_sum, [1, 2], n)) == n


def test_a_stop_token_is_the_last_one():
    assert generate_naive(follow_the_sum, [1, 2], 10, stop_ids={11}) == [5, 11]
    assert generate_naive(follow_the_sum, [1, 2], 10, stop_ids=(7, 5)) == [5]


def test_the_callers_prompt_stays_as_it_is():
    prompt = [1, 2]
    generate_naive(follow_the_sum, prompt, 3)
    assert prompt == [1, 2]


def test_the_ids_are_those_of_the_engine():
    prompt = [10, 200, 30, 4]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("dummy:tiny", dtype="float32", overrides={"kv.num_blocks": 8}) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    assert generate_naive(lambda ids: all_logits(model, ids), prompt, 12) == output.outputs[0].token_ids
