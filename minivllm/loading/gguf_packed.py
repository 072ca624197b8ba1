"""A GGUF file's 4- and 8-bit matrices, with their codes as they are: packed.safetensors.

Q4_0, Q4_1 and Q8_0 are blocks of 32 weights of a row: an fp16 scale, for Q4_1 an fp16 minimum, then the codes. Taking
these apart loses nothing, and the result is what minivllm/quantization keeps. Other types have no such form and are
de-quantised (gguf_convert.py).

For a module `m` of the checkpoint: m.codes, m.scales and, with 4 bits, m.minima. The matrix that embedding and LM head
share is written as the LM head's: the embedding looks rows up in the de-quantised one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.loading.gguf_convert import TARGETS, hf_config, hf_name, unpermute
from minivllm.loading.gguf_file import GGUFFile, TensorInfo
from minivllm.loading.safetensors_io import Entry, read_tensors, write_tensors

PACKING_VERSION = 1  # count up whenever the file written here changes
FILE = "packed.safetensors"
GROUP = 32


class Blocks(NamedTuple):
    codes: np.ndarray  # 4 bits: uint8 [rows, n_in / 2], two to a byte as in the file; 8 bits: int8 [rows, n_in]
    scales: np.ndarray  # fp16 [rows, n_in / GROUP]
    minima: np.ndarray | None


def write_packed(source: Path, folder: Path) -> None:
    """Write FILE, which is empty if no matrix of `source` can be kept packed."""
    file = GGUFFile(source)
    arch = file.metadata["general.architecture"]
    config, target = hf_config(file), TARGETS[arch]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for info, blocks in _packable(file):
        part = info.name.split(".")[-2]
        name = hf_name(file, info).removesuffix(".weight")
        if part == "token_embd":
            if not config["tie_word_embeddings"]:
                continue
            name = "lm_head"
        for kind, values in blocks._asdict().items():
            if values is not None:
                rows = unpermute(values, heads[part]) if target.permuted and part in heads else values
                tensors[f"{name}.{kind}"] = torch.from_numpy(np.ascontiguousarray(rows))
    entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_tensors(folder / FILE, entries, tensors.values())


def stored_bits(path: Path) -> dict[str, int]:
    """{module of the checkpoint: 4 or 8}."""
    names = {name for name, _, _ in read_tensors([path])}
    modules = [name.removesuffix(".codes") for name in names if name.endswith(".codes")]
    return {module: 4 if f"{module}.minima" in names else 8 for module in modules}


def _packable(file: GGUFFile) -> Iterator[tuple[TensorInfo, Blocks]]:
    for info in file.tensors.values():
        if info.type_name in SPLIT and len(info.shape) == 2 and info.name.endswith(".weight"):
            blocks = split(info.type_name, file.bytes_of(info))
            if blocks.minima is None or np.isfinite(blocks.minima).all():
                yield info, blocks


def split(kind: str, raw: np.ndarray) -> Blocks:
    """raw: uint8 [rows, bytes a row]."""
    return SPLIT[kind](raw)


def _q8_0(raw: np.ndarray) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 2 + GROUP)
    return Blocks(_flat(blocks[..., 2:]).view(np.int8), _fp16(blocks[..., :2]), None)


def _q4_1(raw: np.ndarray) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 4 + GROUP // 2)
    return Blocks(_flat(blocks[..., 4:]), _fp16(blocks[..., :2]), _fp16(blocks[..., 2:4]))


def _q4_0(raw: np.ndarray) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 2 + GROUP // 2)
    scales = _fp16(blocks[..., :2])
    with np.errstate(over="ignore"):  # to infinity: then the matrix is not kept packed
        return Blocks(_flat(blocks[..., 2:]), scales, scales * np.float16(-8))  # a power of two: exact


SPLIT = {"Q8_0": _q8_0, "Q4_1": _q4_1, "Q4_0": _q4_0}


def _flat(parts: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(parts).reshape(len(parts), -1)


def _fp16(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0]
