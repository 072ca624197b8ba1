"""GGUF files of a model's shape with random weights, in the mixture that most files are found in (Q4_K_M): for figures
of sizes whose weights are not at hand. Each byte but those of a block's scales is random, so nothing is multiplied by
zero and no answer means anything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

# What llama.cpp's `Q4_K_M` gives: half of the layers more bits for V and the MLP's last matrix, and the head.
USUAL, BETTER = "Q4_K", "Q6_K"
SCALES = {"Q4_K": ((0, 2e-5), (2, 2e-4)), "Q6_K": ((208, 6e-6),)}  # where a block's float16 numbers are, and their size
BLOCK = 256


def fits(shape: str) -> bool:
    """Whether its matrices' rows are whole blocks, and it is dense."""
    from minivllm.loading.dummy import dummy_spec

    spec = dummy_spec(shape)
    sizes = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_size
    return spec.experts is None and all(size % BLOCK == 0 for size in sizes)


def random_rows(kind: str, num_rows: int, n_in: int, generator: np.random.Generator) -> np.ndarray:
    """uint8 [num_rows, bytes]: weights of some 0.01. Of a large matrix the first rows are repeated."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    raw = generator.integers(0, 256, (min(num_rows, 1024) * n_in // BLOCK, size), np.uint8)
    for at, scale in SCALES[kind]:
        raw[:, at : at + 2] = np.full(len(raw), scale, np.float16).view(np.uint8).reshape(-1, 2)
    rows = raw.reshape(-1, n_in // BLOCK * size)
    return np.concatenate([rows] * -(-num_rows // len(rows)))[:num_rows]


def write_gguf(shape: str, path: Path, num_layers: int | None = None) -> None:
    """The file of a dummy shape that `fits`. Raises KeyError for a shape that is not there."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    from minivllm.loading.dummy import dummy_spec

    spec, generator = dummy_spec(shape), np.random.default_rng(0)
    assert fits(shape), shape
    layers, hidden, head = num_layers or spec.num_layers, spec.hidden_size, spec.head_size
    normed = spec.qk_norm
    out = GGUFWriter(path, "qwen3" if normed else "llama")
    out.add_context_length(spec.max_position)
    out.add_embedding_length(hidden)
    out.add_block_count(layers)
    out.add_feed_forward_length(spec.intermediate_size)
    out.add_head_count(spec.num_heads)
    out.add_head_count_kv(spec.num_kv_heads)
    out.add_key_length(head)
    out.add_value_length(head)
    out.add_rope_dimension_count(head)
    out.add_rope_freq_base(spec.rope.theta)
    out.add_layer_norm_rms_eps(spec.rms_eps)
    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), "he", "ll"]
    tokens += [f"Ġ{i}" for i in range(spec.vocab_size - len(tokens))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([3] + [1] * (len(tokens) - 1))
    out.add_token_merges(["h e", "l l"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)

    def matrix(name: str, kind: str, num_rows: int, n_in: int) -> None:
        rows = random_rows(kind, num_rows, n_in, generator)
        out.add_tensor(f"{name}.weight", rows, raw_dtype=GGMLQuantizationType[kind])

    def norm(name: str, size: int) -> None:
        out.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", BETTER, spec.vocab_size, hidden)
    norm("output_norm", hidden)
    if not spec.tie_embeddings:
        matrix("output", BETTER, spec.vocab_size, hidden)
    q, kv = spec.num_heads * head, spec.num_kv_heads * head
    for i in range(layers):
        more = BETTER if i % 2 else USUAL
        norm(f"blk.{i}.attn_norm", hidden)
        norm(f"blk.{i}.ffn_norm", hidden)
        if normed:
            norm(f"blk.{i}.attn_q_norm", head)
            norm(f"blk.{i}.attn_k_norm", head)
        matrix(f"blk.{i}.attn_q", USUAL, q, hidden)
        matrix(f"blk.{i}.attn_k", USUAL, kv, hidden)
        matrix(f"blk.{i}.attn_v", more, kv, hidden)
        matrix(f"blk.{i}.attn_output", USUAL, hidden, q)
        matrix(f"blk.{i}.ffn_gate", USUAL, spec.intermediate_size, hidden)
        matrix(f"blk.{i}.ffn_up", USUAL, spec.intermediate_size, hidden)
        matrix(f"blk.{i}.ffn_down", more, hidden, spec.intermediate_size)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
