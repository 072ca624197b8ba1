"""Rule: loaded from the same folder, our decoder computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from models.pairs import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    SMALL,
    error_of,
    greedy_oracle,
    oracle_logits,
    random_tokens,
    save_oracle,
)
from naive_attention import greedy, logits_of
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from minivllm.layers.linear import Unquantized, choose_method
from minivllm.loading import load_model
from minivllm.loading.dummy import write_tokenizer

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama_tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama_head_dim": LlamaConfig(**SMALL, head_dim=24),
    "llama3_rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "linear_rope": LlamaConfig(**SMALL, rope_parameters=LINEAR),
    "dynamic_rope": LlamaConfig(**SMALL, rope_parameters=DYNAMIC),
    "yarn_rope": LlamaConfig(**SMALL, rope_parameters=YARN),
    "mistral_window": MistralConfig(**SMALL, sliding_window=8),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=32),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2_window": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "qwen3_bias": Qwen3Config(**SMALL, head_dim=24, attention_bias=True, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(folder, transformers' model in fp32), every parameter random: biases and norms too."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_oracle(CONFIGS[request.param], folder)


@pytest.fixture
def token_ids() -> list[int]:
    return random_tokens()


def test_logits_in_fp32_equal_transformers(pair, token_ids):
    folder, oracle = pair
    ours = load_model(str(folder), torch.float32, CPU).model
    expected = oracle_logits(oracle, token_ids)
    assert expected.abs().max() > 1  # the comparison means something
    torch.testing.assert_close(logits_of(ours, token_ids), expected, rtol=0, atol=FP32_TOLERANCE)


def test_logits_in_bf16_are_as_near_to_fp32_as_those_of_transformers(pair, token_ids):
    folder, oracle = pair
    ours = load_model(str(folder), torch.bfloat16, CPU).model
    expected = oracle_logits(oracle, token_ids)
    theirs = oracle_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), token_ids)
    error = error_of(logits_of(ours, token_ids), expected)
    assert error < BF16_TOLERANCE
    assert error < 1.25 * error_of(theirs, expected)


def test_greedy_tokens_in_fp32_equal_transformers(pair, token_ids):
    folder, oracle = pair
    ours = load_model(str(folder), torch.float32, CPU).model
    prompt = token_ids[:12]
    assert greedy(ours, prompt, 16) == greedy_oracle(oracle, prompt, 16)


@pytest.mark.parametrize("name", ["llama", "qwen3_bias"])
def test_fp16_runs_near_fp32(name, tmp_path, token_ids):
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    oracle.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, SMALL["vocab_size"])
    ours = load_model(str(tmp_path), torch.float16, CPU).model
    expected = oracle_logits(oracle, token_ids)
    assert error_of(logits_of(ours, token_ids), expected) < BF16_TOLERANCE / 8  # three more bits than bf16


def test_packed_and_dense_weights_compute_the_same(tmp_path, token_ids, monkeypatch):
    if type(choose_method(CPU, torch.bfloat16).method) is Unquantized:
        pytest.skip("nothing to pack with")
    AutoModelForCausalLM.from_config(CONFIGS["llama_biases"]).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, SMALL["vocab_size"])
    packed = logits_of(load_model(str(tmp_path), torch.bfloat16, CPU).model, token_ids)
    monkeypatch.setattr("minivllm.models.decoder.choose_method", lambda *_: (Unquantized(), "test"))
    dense = logits_of(load_model(str(tmp_path), torch.bfloat16, CPU).model, token_ids)
    # Sums are taken in another order before the one rounding to bf16.
    assert error_of(packed, dense) < BF16_TOLERANCE


def test_no_parameter_asks_for_a_gradient(tmp_path):
    loaded = load_model("dummy:tiny", torch.float32, CPU, cache_dir=tmp_path)
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_and_one_row_have_logits(tmp_path, dtype):
    model = load_model("dummy:tiny", dtype, CPU, cache_dir=tmp_path).model
    with torch.inference_mode():
        assert model.logits(torch.empty(0, 64, dtype=dtype)).shape == (0, 512)
        assert model.logits(torch.ones(1, 64, dtype=dtype)).dtype == torch.float32
