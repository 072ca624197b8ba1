"""A Whisper of transformers as CTranslate2's converter writes it: the layout of model.bin, variable by variable."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

TYPES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}
NORMS = {"weight": "gamma", "bias": "beta"}


def text(value: str) -> bytes:
    raw = value.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def variable(name: str, value: np.ndarray) -> bytes:
    shape = b"".join(struct.pack("<I", size) for size in value.shape)
    head = text(name) + struct.pack("<B", value.ndim) + shape
    return head + struct.pack("<BI", TYPES[str(value.dtype)], value.nbytes) + value.tobytes()


def variables(oracle: Any, dtype: str = "float32") -> dict[str, np.ndarray]:
    """By CTranslate2's names (converters/transformers.py there)."""
    state, found = {name: tensor.float() for name, tensor in oracle.state_dict().items()}, {}

    def put(theirs: str, *modules: str, kinds: tuple[str, ...] = ("weight", "bias"), norm: bool = False) -> None:
        for kind in kinds:
            parts = [state.get(f"model.{module}.{kind}") for module in modules]
            size = state[f"model.{modules[0]}.weight"].shape[0]
            whole = torch.cat([torch.zeros(size) if part is None else part for part in parts])
            found[f"{theirs}/{NORMS[kind] if norm else kind}"] = whole.numpy().astype(dtype)

    for conv in ("conv1", "conv2"):
        put(f"encoder/{conv}", f"encoder.{conv}")
    put("decoder/embeddings", "decoder.embed_tokens", kinds=("weight",))
    for part in ("encoder", "decoder"):
        positions = state[f"model.{part}.embed_positions.weight"]
        found[f"{part}/position_encodings/encodings"] = positions.numpy().astype(dtype)
        found[f"{part}/num_heads"] = np.array(getattr(oracle.config, f"{part}_attention_heads"), np.int16)
        put(f"{part}/layer_norm", f"{part}.layer_norm", norm=True)
        for i in range(getattr(oracle.config, f"{part}_layers")):
            own, theirs = f"{part}.layers.{i}", f"{part}/layer_{i}"
            put(f"{theirs}/self_attention/linear_0", *(f"{own}.self_attn.{name}_proj" for name in "qkv"))
            put(f"{theirs}/self_attention/linear_1", f"{own}.self_attn.out_proj")
            put(f"{theirs}/self_attention/layer_norm", f"{own}.self_attn_layer_norm", norm=True)
            put(f"{theirs}/ffn/linear_0", f"{own}.fc1")
            put(f"{theirs}/ffn/linear_1", f"{own}.fc2")
            put(f"{theirs}/ffn/layer_norm", f"{own}.final_layer_norm", norm=True)
            if part == "decoder":
                put(f"{theirs}/attention/linear_0", f"{own}.encoder_attn.q_proj")
                put(f"{theirs}/attention/linear_1", *(f"{own}.encoder_attn.{name}_proj" for name in "kv"))
                put(f"{theirs}/attention/linear_2", f"{own}.encoder_attn.out_proj")
                put(f"{theirs}/attention/layer_norm", f"{own}.encoder_attn_layer_norm", norm=True)
    found |= {"decoder/activation": np.array(3, np.int8), "decoder/alibi": np.array(0, np.int8)}
    return found


def model_bin(found: dict[str, np.ndarray], version: int = 6, kind: str = "WhisperSpec") -> bytes:
    body = b"".join(variable(name, value) for name, value in sorted(found.items()))
    aliases = struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return struct.pack("<I", version) + text(kind) + struct.pack("<II", 3, len(found)) + body + aliases


def write_folder(folder: Path, data: bytes, tokenizer: Path) -> None:
    """tokenizer: a folder with one; it gets Whisper's tokens for the ends."""
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    own.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", "<|startoftranscript|>")])
    own.save(str(folder / "tokenizer.json"))
    (folder / "model.bin").write_bytes(data)
    told = {"suppress_ids": [5, 6], "suppress_ids_begin": [7], "lang_ids": [8]}
    (folder / "config.json").write_text(json.dumps(told))


def copy_without(folder: Path, to: Path, name: str) -> None:
    shutil.copytree(folder, to)
    (to / name).unlink()
