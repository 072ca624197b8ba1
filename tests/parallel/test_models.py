"""Rule: ranks that hold parts of a model compute together what one device computes alone, and what transformers does.

Each rank is a thread with a model, a reference attention backend and a KV cache, of its own heads and layers.

How near: a row-parallel product adds, for each of tp ranks, a sum of some of its inputs, where one device takes one sum
of all of them; and a library may add a narrower matrix's products in another order. So both results are sums of the
same products in float32 in two orders, and differ as those of two implementations do: models/pairs.py has the bound.
Looking up, gathering, sending and adding zeros round nothing, so a pipeline's logits are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from models.pairs import FP32_TOLERANCE, SMALL, greedy_oracle, oracle_logits, random_tokens, save_oracle
from parallel.devices import NUM_PROMPT, run, together
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from minivllm.parallel.group import ONE_DEVICE
from minivllm.parallel.placement import Placement

PROMPTS = [random_tokens(seed, length=NUM_PROMPT) for seed in (1, 2)]  # of two replicas
NUM_NEW = 5
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
ODD = SMALL | {"vocab_size": 323}  # which neither 2 nor 4 divides
CONFIGS = {
    "llama": LlamaConfig(**ODD, attention_bias=True, mlp_bias=True),  # biases of row-parallel products
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),  # with biases of q, k and v
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "one_kv_head": MistralConfig(**ODD | {"num_key_value_heads": 1}, head_dim=32, sliding_window=8),  # as Gemma's
    "moe": Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
}
ALONE = [Placement(tp=2), Placement(tp=4), Placement(pp=2, stages=(2, 1)), Placement(pp=3)]
PRODUCTS = [Placement(tp=2, pp=3), Placement(tp=4, pp=2, stages=(1, 2)), Placement(tp=2, pp=2, stages=(2, 1))]
MIXTURES = [
    *[Placement(tp=2, ep=2), Placement(tp=4, ep=2), Placement(tp=4, ep=4), Placement(dp=2, ep=2)],
    *[Placement(dp=2, tp=2, ep=4), Placement(dp=2, tp=2, ep=2), Placement(tp=2, ep=2, pp=3), Placement(dp=2, tp=2)],
]


class Known(NamedTuple):
    """A model, and of each prompt the greedy answer behind it, with the logits: transformers' and one device's."""

    folder: Any
    texts: list[list[int]]
    oracle: list[Tensor]
    alone: list[Tensor]


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Callable[[str], Known]:
    @cache
    def make(name: str) -> Known:
        folder = tmp_path_factory.mktemp(name)
        oracle = save_oracle(CONFIGS[name], folder)
        texts = [prompt + greedy_oracle(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
        wanted = [oracle_logits(oracle, text) for text in texts]
        return Known(folder, texts, wanted, [run(folder, ONE_DEVICE, text) for text in texts])

    return make


CASES = [(name, placement) for name in CONFIGS for placement in ALONE]
CASES += [(name, placement) for name in ("tied", "moe") for placement in PRODUCTS]
CASES += [("moe", placement) for placement in MIXTURES]


@pytest.mark.parametrize("name, placement", CASES, ids=str)
def test_ranks_give_the_logits_and_the_greedy_tokens_of_one_device_and_of_transformers(name, placement, known):
    folder, texts, oracle, alone = known(name)
    assert oracle[0].abs().max() > 1
    for i, ranks in enumerate(together(folder, placement, texts)):
        assert len(ranks) == placement.tp and all(torch.equal(logits, ranks[0]) for logits in ranks)
        torch.testing.assert_close(ranks[0], alone[i], rtol=0, atol=FP32_TOLERANCE)
        torch.testing.assert_close(ranks[0], oracle[i], rtol=0, atol=FP32_TOLERANCE)
        assert ranks[0].argmax(-1)[NUM_PROMPT - 1 : -1].tolist() == texts[i][NUM_PROMPT:]
        if placement.size == placement.pp:
            assert torch.equal(ranks[0], alone[i])
