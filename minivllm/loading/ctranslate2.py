"""Whisper as CTranslate2 keeps it (what faster-whisper reads), written down as a Hugging Face folder, once.

`model.bin`, version 6 and later, in little endian: the version and a name with its revision; then variables, each with
its name, the number of its dimensions, these, its type and its number of bytes, and the bytes; then names that stand
for other variables. Names are length (16 bits) and text. Of a Whisper q, k and v are one matrix, and those of cross
attention k and v.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.files import read_json

CONVERSION_VERSION = 1  # count up whenever a file written here changes
VERSION = 6  # the oldest that is read
WHISPER = "WhisperSpec"
TYPES = {0: torch.float32, 4: torch.float16, 5: torch.bfloat16}
SCALARS = {1: "<b", 2: "<h"}  # 8 and 16 bits: how flags and numbers of heads are kept
GELU = 3  # among activations
TOKENS = ("<|endoftext|>", "<|startoftranscript|>")

# Names of modules, theirs and ours; of those with several, whose rows are one below the other.
ENDS = {"decoder/embeddings": "decoder.embed_tokens"}
ENDS |= {f"encoder/{conv}": f"encoder.{conv}" for conv in ("conv1", "conv2")}
ENDS |= {f"{part}/layer_norm": f"{part}.layer_norm" for part in ("encoder", "decoder")}
SELF = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
}
CROSS = {
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
}
MLP = {"ffn/layer_norm": ("final_layer_norm",), "ffn/linear_0": ("fc1",), "ffn/linear_1": ("fc2",)}
LAYER = {"encoder": SELF | MLP, "decoder": SELF | CROSS | MLP}
KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def convert(model: Path, folder: Path) -> None:
    """Write what model.bin and the files beside it have into `folder`. Raises ModelError for what is no Whisper in 16
    or 32 bits."""
    from safetensors.torch import save_file

    source = model.parent
    if not (source / "tokenizer.json").is_file():
        raise ModelError(f"{source}: no tokenizer.json beside {model.name}: add that of the model it was made from")
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        found = read_variables(data, model)
        config = _config(found, _token_ids(source), model)
        tensors = {name: tensor.contiguous() for name, tensor in _tensors(found, model)}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        del tensors, found  # views of the file
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(_generation(config, source), indent=2), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": TOKENS[0], "bos_token": TOKENS[0]}), "utf-8")


# ------------------------------------------------------------------------------------------------------- what is there


def read_variables(data: Any, where: Path) -> dict[str, Tensor | int]:
    """Of the bytes of a model.bin: tensors, which are views of them, and numbers. Raises ModelError."""
    try:
        return dict(_variables(_Reader(data), where))
    except (struct.error, ValueError, UnicodeDecodeError) as e:
        raise ModelError(f"{where}: the file is damaged or cut off ({e})") from None


class _Reader:
    def __init__(self, data: Any):
        self.data, self.at = data, 0

    def number(self, form: str) -> int:
        (found,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def skip(self, size: int) -> int:
        """-> where what is skipped begins."""
        if self.at + size > len(self.data):
            raise ValueError(f"{size} bytes at {self.at} of {len(self.data)}")
        self.at += size
        return self.at - size

    def text(self) -> str:
        size = self.number("<H")
        begin = self.skip(size)
        return bytes(self.data[begin : self.at]).rstrip(b"\0").decode()


def _variables(reader: _Reader, where: Path) -> Iterator[tuple[str, Tensor | int]]:
    version = reader.number("<I")
    if not VERSION <= version < 100:
        raise ModelError(f"{where}: version {version} of CTranslate2's format is not read: convert the model again")
    if (kind := reader.text()) != WHISPER:
        raise ModelError(f"{where}: a {kind} of CTranslate2 is not supported, only {WHISPER}")
    reader.number("<I")  # its revision: what it changed has names of its own
    for _ in range(reader.number("<I")):
        name = reader.text()
        shape = [reader.number("<I") for _ in range(reader.number("<B"))]
        kind, size = reader.number("<B"), reader.number("<I")
        begin = reader.skip(size)
        if not shape and kind in SCALARS:
            yield name, struct.unpack_from(SCALARS[kind], reader.data, begin)[0]
        elif kind in TYPES:
            view = torch.frombuffer(reader.data, dtype=TYPES[kind], count=size // TYPES[kind].itemsize, offset=begin)
            yield name, view.view(shape)
        elif name.endswith("/weight"):
            raise ModelError(f"{where}: its weights are in 8 or 16 bit integers; take a conversion to float16")


# ---------------------------------------------------------------------------------------------------- what is written


def _config(found: Mapping[str, Any], tokens: list[int], where: Path) -> dict[str, Any]:
    """tokens: the ids of TOKENS."""
    try:
        numbers = {name: found[f"{name}/num_heads"] for name in ("encoder", "decoder")}
        if (activation := found.get("decoder/activation", GELU)) != GELU or found.get("decoder/alibi"):
            raise ModelError(f"{where}: activation {activation}, or ALiBi, is no Whisper's")
        vocab_size, size = found["decoder/embeddings/weight"].shape
        config = {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "dtype": str(found["decoder/embeddings/weight"].dtype).removeprefix("torch."),
            "vocab_size": vocab_size,
            "d_model": size,
            "num_mel_bins": found["encoder/conv1/weight"].shape[1],
            "max_source_positions": found["encoder/position_encodings/encodings"].shape[0],
            "max_target_positions": found["decoder/position_encodings/encodings"].shape[0],
            "bos_token_id": tokens[0],
            "eos_token_id": tokens[0],
            "decoder_start_token_id": tokens[1],
        }
        for part, heads in numbers.items():
            layers = [name for name in found if name.startswith(f"{part}/") and name.endswith("/ffn/linear_0/bias")]
            config[f"{part}_layers"] = len(layers)
            config[f"{part}_attention_heads"] = heads
            config[f"{part}_ffn_dim"] = found[f"{part}/layer_0/ffn/linear_0/bias"].shape[0]
    except KeyError as e:
        raise ModelError(f"{where}: no variable {e}, which a Whisper has") from None
    return config


def _tensors(found: Mapping[str, Any], where: Path) -> Iterator[tuple[str, Tensor]]:
    for part in LAYER:
        yield f"model.{part}.embed_positions.weight", found[f"{part}/position_encodings/encodings"]
    for name, tensor in found.items():
        module, _, kind = name.rpartition("/")
        if not isinstance(tensor, Tensor) or kind == "encodings" or module == "decoder/projection":
            continue
        part, _, tail = module.partition("/")
        layer, _, tail = tail.partition("/")
        theirs = LAYER.get(part, {}).get(tail) if layer.startswith("layer_") else None
        if kind not in KINDS or (theirs is None and module not in ENDS):
            raise ModelError(f'{where}: variable "{name}" has no place in a Whisper')
        if theirs is None:
            yield f"model.{ENDS[module]}.{KINDS[kind]}", tensor
            continue
        prefix = f"model.{part}.layers.{layer.removeprefix('layer_')}"
        for own, rows in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            if KINDS[kind] == "bias" and own.endswith("k_proj"):  # kept as zeros, beside the others'
                if rows.any():
                    raise ModelError(f'{where}: "{name}" has a bias of keys, which no Whisper has')
                continue
            yield f"{prefix}.{own}.{KINDS[kind]}", rows


def _generation(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """What of transformers' generation_config.json a CTranslate2 folder knows."""
    told = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    same = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
    return {
        **{name: config[name] for name in same},
        "suppress_tokens": told.get("suppress_ids", []),
        "begin_suppress_tokens": told.get("suppress_ids_begin", []),
    }


def _token_ids(source: Path) -> list[int]:
    """Of TOKENS."""
    added = {token["content"]: token["id"] for token in read_json(source / "tokenizer.json").get("added_tokens", [])}
    if missing := [token for token in TOKENS if token not in added]:
        raise ModelError(f"{source / 'tokenizer.json'}: no token {missing[0]}: it is not a Whisper's")
    return [added[token] for token in TOKENS]
