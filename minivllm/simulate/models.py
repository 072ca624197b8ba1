"""Models by name for a simulated device: what their published config.json says of sizes, and nothing else.

A simulated model needs no weights, so a name is enough. Where a checkpoint is published in few bits (DeepSeek-V3 in
fp8, gpt-oss with experts in MXFP4), so is it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.loading.dummy import SHAPES


def _llama(num_layers: int, hidden: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        **others,
    }


def _qwen3(num_layers: int, hidden: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    own = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
    return _llama(num_layers, hidden, heads, inner, **own, **others)


def _opt(num_layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
    }


_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_NEXT = {  # three of four layers keep a state
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MISTRAL = {"max_position_embeddings": 32_768}
_EVERY_SIXTH = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(62)]

_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_FP8 = {"quantization_config": {"quant_method": "fp8"}}


def _kimi(max_position: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "intermediate_size": 18_432,
        "vocab_size": 163_840,
        "max_position_embeddings": max_position,
        **_LATENT,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 1,
    }


def _minimax(max_position: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "vocab_size": 200_064,
        "max_position_embeddings": max_position,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "qk_norm_type": "per_layer",
        **_FP8,
    }


def _gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2),
        "quantization_config": {"quant_method": "mxfp4"},
    }


_DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "intermediate_size": 18_432,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    **_LATENT,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    **_FP8,
}
_GLM_4_5 = {
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "vocab_size": 151_552,
    "max_position_embeddings": 131_072,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": SHAPES["llama-3.1-8b"],
    "llama-3.1-70b": _llama(80, 8192, 64, 28_672),
    "llama-3.3-70b": _llama(80, 8192, 64, 28_672),
    "llama-3.1-405b": _llama(126, 16_384, 128, 53_248),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"],
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 12_288, **_QWEN3_EXPERTS, moe_intermediate_size=1536)
    | {"num_key_value_heads": 4},
    "qwen3-next-80b-a3b": _qwen3(48, 2048, 16, 5120, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512)
    | _QWEN3_NEXT,
    "mistral-7b": _llama(32, 4096, 32, 14_336) | _MISTRAL | {"vocab_size": 32_768},
    "mixtral-8x7b": _llama(32, 4096, 32, 14_336, num_local_experts=8, num_experts_per_tok=2)
    | _MISTRAL
    | {"vocab_size": 32_000},
    "gemma-3-27b": _llama(62, 5376, 32, 21_504, head_dim=128, tie_word_embeddings=True)
    | {"num_key_value_heads": 16, "vocab_size": 262_208, "sliding_window": 1024, "layer_types": _EVERY_SIXTH},
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12_288, 96),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": _kimi(131_072),
    "kimi-k2.5": _kimi(262_144),
    "minimax-m2": _minimax(196_608),
    "minimax-m2.5": _minimax(196_608),
    "glm-4.5": _GLM_4_5,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
