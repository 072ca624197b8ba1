"""Tiny GGUF files, written with the gguf package from random tensors in Hugging Face's layout."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, FFN, LAYERS = 4, 2, 32, 64, 96, 2
SPECIAL = ["<|end|>", "<|user|>", "<|bot|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "Ġ Ġ"]
TOKENS = [*SPECIAL, *ALPHABET, *(m.replace(" ", "") for m in MERGES)]
TOKENS += [f"<unused{i}>" for i in range(-len(TOKENS) % 32)]
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|bot|>"


def hf_tensors(arch: str, tied: bool, head_size: int = HEAD_SIZE, seed: int = 0) -> dict[str, np.ndarray]:
    """{GGUF name: fp32 tensor in the row order of Hugging Face}."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * head_size, KV_HEADS * head_size
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        layer = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (head_size,), "attn_k_norm.weight": (head_size,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {n: rng.normal(1.0 if "norm" in n else 0.0, 0.2, s).astype(np.float32) for n, s in shapes.items()}


def permuted(name: str, tensor: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a llama: halves of a head become neighbours."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: Type = Type.Q8_0,
    *,
    tied: bool = True,
    head_size: int = HEAD_SIZE,
    pre: str = "default",
    extra: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Matrices are stored as `kind`, vectors as F32. Returns {GGUF name: dequantised, in Hugging Face's order}."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(head_size)
    add_tokenizer(writer, pre)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    found = {}
    for name, tensor in (hf_tensors(arch, tied, head_size) if tensors is None else tensors).items():
        stored = permuted(name, tensor) if arch == "llama" else tensor
        of = kind if tensor.ndim == 2 else Type.F32
        raw = gguf.quants.quantize(stored, of)
        writer.add_tensor(name, raw, raw_dtype=of)
        values = gguf.quants.dequantize(raw, of) if of not in (Type.F32, Type.F16) else raw.astype(np.float32)
        found[name] = unpermuted(name, values) if arch == "llama" else values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def unpermuted(name: str, tensor: np.ndarray) -> np.ndarray:
    rows = permuted(name, np.arange(len(tensor))[:, None])[:, 0]  # where each stored row came from
    back = np.empty_like(tensor)
    back[rows] = tensor
    return back


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types([USER_DEFINED if t.startswith("<unused") else k for t, k in zip(TOKENS, kinds, strict=True)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
