"""What a model file says of GGUF files of its architectures, and what it is given to read them.

`GGUF` in a model file: how metadata become a config.json (which its `read_config` reads then), and how tensors are
called. The file's layout, token ids, the tokenizer and the blocks are the loader's affair (minivllm/loading).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from minivllm.errors import ModelError

NUMBER = (int, float)  # kinds of metadata, beside int, str and bool


class TensorShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class GGUFFile(Protocol):
    """minivllm/loading/gguf_file.py has it."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, TensorShape]: ...

    def value(self, key: str, kind: Any, default: Any = None) -> Any:
        """Of the metadata. Raises ModelError for one of another kind."""
        ...

    def numbers(self, name: str) -> Tensor:
        """A tensor, de-quantised."""
        ...


class GGUFNames(NamedTuple):
    config: Callable[[Metadata], dict[str, Any]]  # what config.json would say, but of token ids and the dtype
    top: Mapping[str, str]  # {GGUF's module: Hugging Face's}
    layer: Mapping[str, str]  # below blk.{i} and model.layers.{i}; of no module but a tensor, its whole name
    heads: Callable[[Metadata, Mapping[str, Any]], Mapping[str, int]]  # modules whose rows are reordered: heads
    unused: tuple[str, ...] = ()  # tensors that `config` has read
    changes: Mapping[str, str] = {}  # {module or tensor, without its layer: what was done to its numbers (CHANGES)}
    shapes: Mapping[str, Callable[[Sequence[int]], list[int]]] = {}  # {tensor, likewise: Hugging Face's of the file's}


# What llama.cpp's converter does to numbers, undone.
CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda values: values,
    "raised": lambda values: values - 1.0,  # by 1, as those of Gemma's norms
    "decay": lambda values: values.neg().log(),  # A for A_log, as Mamba's
}


class Metadata(NamedTuple):
    """Of one file, under the prefix of its architecture."""

    file: GGUFFile
    architecture: str

    def get(self, key: str, kind: Any = int, default: Any = None) -> Any:
        value = self.file.value(f"{self.architecture}.{key}", kind, default)
        return shortest(value) if isinstance(value, float) else value

    def need(self, key: str, kind: Any = int) -> Any:
        if not (value := self.get(key, kind)):
            name = f"{self.architecture}.{key}"
            raise ModelError(f'{self.file.path}: metadata "{name}" is missing or 0. Fetch or convert the file again')
        return value

    def rope_parameters(self) -> dict[str, Any]:
        parameters = {"rope_theta": self.get("rope.freq_base", NUMBER, 10_000.0), "rope_type": "default"}
        kind = self.get("rope.scaling.type", str, "none")
        factor = self.get("rope.scaling.factor", NUMBER, 1.0)
        original = self.get("rope.scaling.original_context_length")
        betas = {f"beta_{end}": self.get(f"rope.scaling.yarn_beta_{end}", NUMBER) for end in ("fast", "slow")}
        if kind in ("linear", "yarn"):
            parameters |= {"rope_type": kind, "factor": factor}
            parameters |= {name: value for name, value in betas.items() if value is not None and kind == "yarn"}
            if kind == "yarn" and original:
                parameters["original_max_position_embeddings"] = original
        elif kind != "none":
            raise ModelError(f'{self.file.path}: rope scaling "{kind}" is not supported')
        return parameters


# What llama.cpp calls a decoder's modules, as far as all have them; below blk.{i} and model.layers.{i}.
GGUF_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def decoder_config(
    about: Metadata, norm: str = "attention.layer_norm_rms_epsilon", kv_heads: int | None = None
) -> dict[str, Any]:
    """What config.json says of any decoder, but for its names and its rotary embedding. norm: where its epsilon is.
    kv_heads: of a file that does not say it by one number. Raises ModelError, also for heads of K and V that differ."""
    file, heads, hidden = about.file, about.need("attention.head_count"), about.need("embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f'{file.path}: tensor "token_embd.weight" is missing. Fetch or convert the file again')
    size = about.get("attention.key_length") or hidden // heads
    if (of_values := about.get("attention.value_length", int, size)) != size:
        name = f"{about.architecture}.attention.value_length"
        raise ModelError(f'{file.path}: metadata "{name}" is {of_values}, and a head of K has {size}: not supported')
    return {
        "hidden_size": hidden,
        "num_hidden_layers": about.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": about.get("attention.head_count_kv", int, heads) if kv_heads is None else kv_heads,
        "head_dim": size,
        "intermediate_size": about.need("feed_forward_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": about.need(norm, NUMBER),
        "max_position_embeddings": about.need("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def heads_of_llama(about: Metadata, config: Mapping[str, Any]) -> dict[str, int]:
    """Whose rows llama.cpp's converter reorders for a Llama and those that its converter treats as one."""
    return {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}


def shortest(value: float) -> float:
    """The shortest decimal that names this fp32 number: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
