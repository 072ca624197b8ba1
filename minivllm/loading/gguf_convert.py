"""A GGUF file as a Hugging Face folder: config.json, generation_config.json, tokenizer files, model.safetensors.

After the conversion there is one kind of model to load, and a second start reads mapped tensors instead of
dequantising. Each tensor is stored in the smallest dtype that loses nothing: F16 and BF16 stay, everything else
becomes fp32. A quantised weight d*q + m with 11-bit d has more bits than fp16 or bf16 hold, and a run in fp32 must not
compute with rounded weights; casting to bf16 while loading is one pass over the file (135M weights from the page
cache: 0.11 s, from bf16 0.04 s).

llama.cpp's converter reorders the rows of q and k of the `llama` architecture, so that its rotary embedding can rotate
neighbours; `unpermute` puts them back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.loading.gguf_file import GGUFFile, TensorInfo
from minivllm.loading.gguf_tokenizer import write_tokenizer
from minivllm.loading.safetensors_io import SINGLE, Entry, write_tensors

CONVERSION_VERSION = 1  # count up whenever a file written here changes


class Target(NamedTuple):
    architecture: str
    model_type: str
    permuted: bool  # q and k rows reordered by llama.cpp's converter


TARGETS = {
    "llama": Target("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Target("Qwen2ForCausalLM", "qwen2", permuted=False),
    "qwen3": Target("Qwen3ForCausalLM", "qwen3", permuted=False),
}

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling as a divisor of each frequency; becomes rope parameters


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` as a Hugging Face folder. Raises ModelError for what cannot be converted."""
    file = GGUFFile(source)
    target = _target(file)
    config = hf_config(file, target)
    entries = [Entry(hf_name(file, info), info.shape, stored_dtype(info)) for info in _weights(file)]
    write_tokenizer(file, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(file))
    write_tensors(folder / SINGLE, entries, _tensors(file, config, target))


def hf_config(file: GGUFFile, target: Target | None = None) -> dict[str, Any]:
    """The config.json that transformers would have for this model."""
    target = target or _target(file)
    arch = file.metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        return shortest(value) if isinstance(value, float) else value

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise ModelError(f'{file.path}: metadata "{arch}.{key}" is missing. Fetch or convert the file again')
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    window = get("attention.sliding_window")
    sliding_llama = bool(window) and target.model_type == "llama"  # Mistral has no GGUF architecture of its own
    return {
        "architectures": ["MistralForCausalLM" if sliding_llama else target.architecture],
        "model_type": "mistral" if sliding_llama else target.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length") or hidden // heads,
        "intermediate_size": need("feed_forward_length"),
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "rope_parameters": rope_parameters(file, get),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        **({"sliding_window": window} if sliding_llama else {}),
        **generation_config(file),
        "dtype": _config_dtype(file),
    }


def rope_parameters(file: GGUFFile, get: Any) -> dict[str, Any]:
    parameters = {"rope_theta": get("rope.freq_base", 10_000.0), "rope_type": "default"}
    kind = get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": get("rope.scaling.factor", 1.0)}
        if kind == "yarn" and (original := get("rope.scaling.original_context_length")):
            parameters["original_max_position_embeddings"] = original
    elif kind != "none":
        raise ModelError(f'{file.path}: rope scaling "{kind}" is not supported')
    if ROPE_FACTORS in file.tensors:
        parameters |= _llama3(file, parameters["rope_theta"])
    return parameters


def _llama3(file: GGUFFile, theta: float) -> dict[str, Any]:
    """The parameters behind a table of factors. All published Llama 3 models differ only in the largest factor."""
    factors = dequantise(file, file.tensors[ROPE_FACTORS]).ravel()  # [head_size / 2]
    found = {
        "rope_type": "llama3",
        "factor": shortest(float(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    from minivllm.layers.rotary import llama3, plain
    from minivllm.models.spec import RopeSpec

    rope = RopeSpec("llama3", theta, found["factor"], 8192, 1.0, 4.0)
    expected = plain(rope, 2 * len(factors)).per_pair / llama3(rope, 2 * len(factors)).per_pair
    if not np.allclose(factors, expected.numpy(), rtol=1e-3):
        raise ModelError(f"{file.path}: the table {ROPE_FACTORS} is not Llama 3's rope scaling and is not supported")
    return found


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Token ids. A chat model may name its end of turn (eot, eom) apart from its end of text."""
    ids = {k: file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(v for k, v in ids.items() if k != "bos" and v is not None))
    return {"bos_token_id": ids["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def hf_name(file: GGUFFile, info: TensorInfo) -> str:
    stem, _, kind = info.name.rpartition(".")
    prefix, names = "", TOP_NAMES
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".", 2)
        prefix, names = f"model.layers.{layer}.", LAYER_NAMES
    if stem not in names or kind not in ("weight", "bias"):
        raise ModelError(f'{file.path}: tensor "{info.name}" has no place in the Llama family')
    return f"{prefix}{names[stem]}.{kind}"


def stored_dtype(info: TensorInfo) -> torch.dtype:
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(info.type_name, torch.float32)


def dequantise(file: GGUFFile, info: TensorInfo) -> np.ndarray:
    """fp32, info.shape."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw, kind = file.bytes_of(info), GGMLQuantizationType(info.type_id)
    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(kind.name)
    try:
        values = raw.view(plain) if plain else dequantize(raw, kind)
    except NotImplementedError:
        raise ModelError(
            f'{file.path}: tensor "{info.name}" has type {kind.name}, which cannot be dequantised'
        ) from None
    return values.astype(np.float32, copy=False).reshape(info.shape)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads * head_size, ...]: the two of each pair, neighbours in GGUF, go back to the two halves of their head."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_size / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tensors(file: GGUFFile, config: dict[str, Any], target: Target) -> Iterator[Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for info in _weights(file):
        values = dequantise(file, info)
        part = info.name.split(".")[-2]
        if target.permuted and part in heads:
            values = unpermute(values, heads[part])
        yield torch.from_numpy(np.array(values)).to(stored_dtype(info))


def _weights(file: GGUFFile) -> list[TensorInfo]:
    return [info for info in file.tensors.values() if info.name != ROPE_FACTORS]


def _target(file: GGUFFile) -> Target:
    arch = file.metadata.get("general.architecture")
    if file.metadata.get(f"{arch}.expert_count"):
        raise ModelError(f"{file.path}: a mixture of experts is not read from GGUF. Take its safetensors folder")
    if arch not in TARGETS:
        raise ModelError(f'{file.path}: GGUF architecture "{arch}" is not supported. Supported: {", ".join(TARGETS)}')
    return TARGETS[arch]


def _tensor(file: GGUFFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise ModelError(f'{file.path}: tensor "{name}" is missing. Fetch or convert the file again')
    return file.tensors[name]


def _config_dtype(file: GGUFFile) -> str:
    """What most of the weights are stored as."""
    return str(stored_dtype(_tensor(file, "token_embd.weight"))).removeprefix("torch.")


def shortest(value: float) -> float:
    """The shortest decimal that names this fp32 number: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
