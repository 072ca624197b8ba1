"""Tiny GGUF files, written with the gguf package from random tensors in Hugging Face's layout.

The package cannot quantise to K-quants and IQ4: a matrix of such a kind is of random blocks, and what they mean is what
the package's own decoder makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

SIZE = 0.2  # the standard deviation of weights
HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, FFN, LAYERS = 4, 2, 32, 64, 96, 2
WIDE = {"head_size": 64, "hidden": 256, "ffn": 512, "size": 256**-0.5}  # rows of whole blocks of 256; scores near 1

# Where a block has its fp16 scale, and its fp16 minimum with what it is to be, so that weights are about 0 in the mean:
# as a multiple of the scale.
SCALES = {
    **dict.fromkeys((Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS, Type.IQ2_XXS), (0, None, 0.0)),
    Type.Q4_1: (0, 2, -7.5),
    Type.Q5_1: (0, 2, -15.5),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0.0),
    Type.Q6_K: (208, None, 0.0),
}
SPECIAL = ["<|end|>", "<|user|>", "<|bot|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "Ġ Ġ"]
TOKENS = [*SPECIAL, *ALPHABET, *(m.replace(" ", "") for m in MERGES)]
TOKENS += [f"<unused{i}>" for i in range(-len(TOKENS) % 32)]
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|bot|>"


def random_blocks(kind: Type, rows: int, n_in: int, rng: np.random.Generator, size: float = SIZE) -> np.ndarray:
    """uint8 [rows, bytes a row]: every code and every group's scale, and blocks of unequal scales."""
    at, minimum_at, ratio = SCALES[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, n_in // block, num_bytes), dtype=np.uint8)

    def put(scales: np.ndarray) -> None:
        raw[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
        if minimum_at is not None:
            raw[..., minimum_at : minimum_at + 2] = (ratio * scales).astype(np.float16)[..., None].view(np.uint8)

    put(np.ones(raw.shape[:2]))
    spread = gguf.quants.dequantize(raw.reshape(rows, -1)[:32], kind).std()
    put(size / spread * rng.uniform(0.5, 1.4, raw.shape[:2]))
    return raw.reshape(rows, -1)


def hf_tensors(
    arch: str, tied: bool, head_size: int = HEAD_SIZE, seed: int = 0, hidden: int = HIDDEN, ffn: int = FFN, size=SIZE
) -> dict[str, np.ndarray]:
    """{GGUF name: fp32 tensor in the row order of Hugging Face}."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * head_size, KV_HEADS * head_size
    shapes = {"token_embd.weight": (len(TOKENS), hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), hidden)
    for i in range(LAYERS):
        layer = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q, hidden),
            "attn_k.weight": (kv, hidden),
            "attn_v.weight": (kv, hidden),
            "attn_output.weight": (hidden, q),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_down.weight": (hidden, ffn),
        }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (head_size,), "attn_k_norm.weight": (head_size,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {
        n: rng.normal(1.0 if "norm" in n else 0.0, SIZE if len(s) == 1 else size, s).astype(np.float32)
        for n, s in shapes.items()
    }


def permuted(name: str, tensor: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a llama: halves of a head become neighbours."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: Type | Callable[[str], Type] = Type.Q8_0,
    *,
    tied: bool = True,
    head_size: int = HEAD_SIZE,
    hidden: int = HIDDEN,
    ffn: int = FFN,
    size: float = SIZE,
    pre: str = "default",
    extra: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    decode: bool = True,
) -> dict[str, np.ndarray]:
    """Matrices are stored as `kind`, or as what it says of their names, vectors as F32. Returns {GGUF name:
    dequantised, in Hugging Face's order}, or nothing without `decode`, which takes long for large ones."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(ffn)
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
    found, rng = {}, np.random.default_rng(1)
    made = hf_tensors(arch, tied, head_size, hidden=hidden, ffn=ffn, size=size) if tensors is None else tensors
    for name, tensor in made.items():
        stored = permuted(name, tensor) if arch == "llama" else tensor
        of = Type.F32 if tensor.ndim < 2 else kind if isinstance(kind, Type) else kind(name)
        raw = gguf.quants.quantize(stored, of) if is_writable(of) else random_blocks(of, *tensor.shape, rng, size)
        writer.add_tensor(name, raw, raw_dtype=of)
        if not decode:
            continue
        values = gguf.quants.dequantize(raw, of) if of not in (Type.F32, Type.F16) else raw.astype(np.float32)
        found[name] = unpermuted(name, values) if arch == "llama" else values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def is_writable(kind: Type) -> bool:
    try:
        gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
    except NotImplementedError:
        return False
    return True


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
