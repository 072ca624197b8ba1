"""A tiny random model of transformers, saved to a folder: the oracle of the models' tests; how near to it is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from naive_attention import greedy, logits_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from minivllm.loading import load_model
from minivllm.loading.dummy import write_tokenizer

LENGTH = 48
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that logits spread over several units and differences show
}

# fp32: both sides round each of ~60 products of up to 128 terms differently; with logits of a few units the error stays
# near 60 * sqrt(128) * 2^-24 * 4 = 1.6e-4, and is seen to be under 3e-5.
FP32_TOLERANCE = 2e-4
# bf16 keeps 8 bits: a rounding is at most 2^-9, 1.1e-3 in the mean; about 12 of them a layer on 3 layers add up like a
# random walk to 0.7 % of the logits. These wide random weights amplify each error some 3 to 6 times (transformers' own
# bf16 model is seen at 1.6 to 5.4 %).
BF16_TOLERANCE = 0.06


def save_oracle(config: Any, folder: Path, **how: Any) -> Any:
    """transformers' model in fp32, every parameter random, saved with a tokenizer. how: to save it."""
    torch.manual_seed(0)
    oracle = make_random(AutoModelForCausalLM.from_config(config).eval())
    oracle.save_pretrained(folder, **how)
    write_tokenizer(folder, config.vocab_size)
    return oracle


def make_random(oracle: Any) -> Any:
    """Biases and norms too, which transformers makes alike."""
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return oracle


def random_tokens(seed: int = 1, length: int = LENGTH) -> list[int]:
    return torch.randint(SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0].float()


def greedy_oracle(oracle: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    with torch.inference_mode():  # without a mask it would take the prompt's own zeros for padding
        ids = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **how)
    return ids[0, len(prompt) :].tolist()


def greedy_behind(oracle: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The oracle's choice behind the prompt and each beginning of `tokens`: these again, exactly if they are its greedy
    continuation. One forward, where greedy_oracle needs one a token."""
    return oracle_logits(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1).tolist()


def error_of(logits: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected logits: a single outlier moves it little."""
    return float((logits - expected).norm() / expected.norm())


def check_in_fp32(folder: str, oracle: Any, tolerance: float = FP32_TOLERANCE) -> None:
    """Logits and greedy tokens are transformers'."""
    ours, token_ids = load_model(folder, torch.float32, torch.device("cpu")).model, random_tokens()
    expected = oracle_logits(oracle, token_ids)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits_of(ours, token_ids), expected, rtol=0, atol=tolerance)
    assert greedy(ours, token_ids[:12], 16) == greedy_oracle(oracle, token_ids[:12], 16)


def check_in_bf16(folder: str, oracle: Any, tolerance: float = BF16_TOLERANCE) -> None:
    """Logits are near to fp32's, and no further from them than transformers'."""
    token_ids = random_tokens()
    expected = oracle_logits(oracle, token_ids)
    theirs = oracle_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), token_ids)
    ours = load_model(folder, torch.bfloat16, torch.device("cpu")).model
    error = error_of(logits_of(ours, token_ids), expected)
    assert error < tolerance and error < 1.25 * error_of(theirs, expected)
