"""What a GGUF file says of its model, as a Hugging Face folder: config.json, generation_config.json, tokenizer files;
and INDEX, which says where in the file each tensor lies, under its name at Hugging Face.

This is done once for a file and kept in the cache. Weights are never written: they come out of the file itself at
every start (gguf_weights.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from minivllm import file_keys
from minivllm.errors import ModelError
from minivllm.loading.gguf_file import GGUFFile, TensorInfo
from minivllm.loading.gguf_tokenizer import write_tokenizer
from minivllm.loading.gguf_vocabulary import read_vocabulary, special_id
from minivllm.loading.gguf_weights import Place, write_index
from minivllm.models import GGUF_FILES, read_gguf_names
from minivllm.models.gguf import GGUFNames, Metadata
from minivllm.quantization.gguf import PLAIN

UNKNOWN = "unknown_keys.json"
CONVERSION_VERSION = 5  # count up whenever a file written here changes


def convert(source: Path, folder: Path) -> None:
    """Write what `source` says of its model into `folder`. Raises ModelError for what cannot be converted."""
    file = GGUFFile(source)
    config = hf_config(file)
    places = index(file, config)
    write_tokenizer(file, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    write_index(folder, places)
    _write_json(folder / UNKNOWN, unknown_keys(file))


def unknown_keys(file: GGUFFile) -> list[str]:
    """Of its metadata, once all else has been read. Raises ModelError for a value that would have to be followed."""
    table = file_keys.gguf_table(file.metadata, _metadata(file)[0].architecture)
    return file_keys.check(str(file.path), file.metadata, file.read, table)


def index(file: GGUFFile, config: dict[str, Any]) -> list[Place]:
    about, names = _metadata(file)
    heads = names.heads(about, config)
    return [
        Place(
            hf_name(file, info, names),
            info.type_name,
            names.shapes.get(tail, list)(info.shape),
            info.offset,
            info.num_bytes,
            heads.get(module, 0),
            names.changes.get(module, names.changes.get(tail, "")),
        )
        for info in file.tensors.values()
        if info.name not in names.unused
        for _, tail in [_in_layer(info)]
        for module in [tail.rpartition(".")[0]]
    ]


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that transformers would have for this model."""
    about, names = _metadata(file)
    config = names.config(about)
    name, whole = f"{about.architecture}.rope.dimension_count", config["head_dim"]
    if name not in file.read and (size := file.value(name, int, whole)) != whole:  # else it has been followed
        raise ModelError(f'{file.path}: metadata "{name}" is {size}, and only whole heads are rotated')
    return {**config, **generation_config(file), "dtype": _config_dtype(file)}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Token ids."""
    ends = read_vocabulary(file).ends
    return {"bos_token_id": special_id(file, "bos"), "eos_token_id": ends[0] if len(ends) == 1 else [*ends] or None}


def hf_name(file: GGUFFile, info: TensorInfo, names: GGUFNames | None = None) -> str:
    """names: of the file's architecture; None: they are looked up."""
    names = names or _metadata(file)[1]
    layer, tail = _in_layer(info)
    prefix, known = (f"model.layers.{layer}.", names.layer) if layer else ("", names.top)
    if tail in known:
        return prefix + known[tail]
    module, _, kind = tail.rpartition(".")
    if module not in known or kind not in ("weight", "bias"):
        raise ModelError(f'{file.path}: tensor "{info.name}" has no place in this architecture')
    return f"{prefix}{known[module]}.{kind}"


def _in_layer(info: TensorInfo) -> tuple[str, str]:
    """Its layer's number, or nothing, and its name there."""
    if not info.name.startswith("blk."):
        return "", info.name
    layer, _, tail = info.name.removeprefix("blk.").partition(".")
    return layer, tail


def _metadata(file: GGUFFile) -> tuple[Metadata, GGUFNames]:
    arch = file.value("general.architecture", str)
    if file.value(f"{arch}.expert_count", int):
        raise ModelError(f"{file.path}: a mixture of experts is not read from GGUF. Take its safetensors folder")
    if arch not in GGUF_FILES:
        known = ", ".join(GGUF_FILES)
        raise ModelError(f'{file.path}: GGUF architecture "{arch}" is not supported. Supported: {known}')
    return Metadata(file, arch), read_gguf_names(arch)


def _tensor(file: GGUFFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise ModelError(f'{file.path}: tensor "{name}" is missing. Fetch or convert the file again')
    return file.tensors[name]


def _config_dtype(file: GGUFFile) -> str:
    """What most of the weights are stored as; blocks mean numbers of which fp32 loses nothing."""
    kind = _tensor(file, "token_embd.weight").type_name
    return str(PLAIN.get(kind, torch.float32)).removeprefix("torch.")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
