"""Models with random weights of a real shape, for speed measurements and tests: `dummy:<name>`.

Weights are made on the device from a seed, never zeros (zeros multiply faster on some hardware and hide errors),
scaled by 1/sqrt(inputs) so that activations keep their size through any number of layers. The tokenizer has a token
for each byte, so any text encodes; the other ids decode to made-up words, so that random output is visible as text.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minivllm.models import read_spec
from minivllm.models.spec import ModelSpec

TOKENIZER_VERSION = 1  # count up whenever the files of `write_tokenizer` change
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {"hidden_act": "silu", "bos_token_id": BOS, "eos_token_id": EOS, "dtype": "bfloat16"}
_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_parameters": _LLAMA31_ROPE,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_parameters": _LLAMA31_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "gemma3-270m": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 2048,
        "vocab_size": 262_144,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "qwen3.5-0.8b": {  # its text decoder
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "intermediate_size": 3584,
        "vocab_size": 248_320,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "granite-4.0-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "mamba_n_heads": 48,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_head": 32,
        "mamba_d_conv": 4,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.246,
        "attention_multiplier": 0.015625,
        "logits_scaling": 3,
        "position_embedding_type": "nope",
        "vocab_size": 100_352,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    "tiny": {  # every seam at once: heads * head_size != hidden, grouped KV heads, QK-norm, untied
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
}

SHAPES["tiny-short"] = SHAPES["tiny"] | {"num_hidden_layers": 2}  # for what is slow layer by layer
SHAPES["tiny-gemma3"] = SHAPES["tiny"] | {  # every second layer sees a window
    "architectures": ["Gemma3ForCausalLM"],
    "rope_theta": 50_000.0,
    "rope_local_base_freq": 500.0,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
}
SHAPES["tiny-qwen3.5"] = SHAPES["tiny"] | {  # of four layers three keep a state
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
SHAPES["tiny-moe"] = SHAPES["tiny"] | {  # of four layers one is dense
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def hf_config(name: str) -> dict[str, Any]:
    """What config.json would say."""
    return _COMMON | SHAPES[name]


def dummy_spec(name: str) -> ModelSpec:
    return read_spec(hf_config(name), where=f"dummy:{name}")


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json for a vocabulary of any size above 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_words = vocab_size - len(SPECIAL) - len(alphabet)
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))  # 456,976 of them
    tokens = [*SPECIAL, *alphabet, *islice(words, num_words)]
    assert len(tokens) == vocab_size, vocab_size
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
