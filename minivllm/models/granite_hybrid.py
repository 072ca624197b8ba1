"""Granite 4 (IBM 2025): Granite's decoder, of whose layers most are Mamba-2 (Dao and Gu 2024), which keep one state for
all tokens, and some attention, without positions where there are states to know them. A layer's MLP is shared by all
tokens; beside it may be experts that a router chooses.

Mamba-2 by the names of attention/state.py: of a token B is k and C is q, of as many heads as there are groups, x is v,
and its time step dt, above 0, is the rate. The state fades by exp(A dt), and D of x is added to what it answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.compile.context import attend_state
from minivllm.kv_groups import StateSpec
from minivllm.layers import sharded
from minivllm.layers.experts import MixtureMLP, Router
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import ENDS, MLP
from minivllm.models.decoder_config import HybridSpec, linear_layers, only_silu, read_decoder
from minivllm.models.gguf import GGUF_ENDS, GGUF_LAYER, GGUFNames, Metadata, decoder_config, heads_of_llama
from minivllm.models.granite import DEFAULTS as GRANITE
from minivllm.models.granite import GraniteLayer, gguf_scales, scales
from minivllm.models.hybrid import Convolution, HybridDecoder
from minivllm.models.rope_decoder import WEIGHTS
from minivllm.models.spec import ConfigReader, ExpertsSpec
from minivllm.parallel.group import Ranks

DEFAULTS: dict[str, Any] = GRANITE | {  # GraniteMoeHybridConfig's
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridSpec(HybridSpec):
    """intermediate_size is of the MLP that all tokens share."""

    experts: ExpertsSpec | None  # beside it; None: there are none
    conv_bias: bool
    projection_bias: bool  # of Mamba's products

    @property
    def num_parameters(self) -> int:
        of, size = self.state, self.hidden_size
        attention = size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        inner = of.num_v_heads * of.v_size
        mamba = size * (2 * inner + of.channels + of.num_v_heads)
        mixers = sum(mamba if is_linear else attention for is_linear in self.linear)
        ends = self.vocab_size * size * (1 if self.tie_embeddings else 2)
        return mixers + self.num_mlp_parameters + ends

    @property
    def num_mlp_parameters(self) -> int:
        each = 3 * self.intermediate_size
        if (of := self.experts) is not None:
            each += of.num_experts * (3 * of.intermediate_size + 1)
        return self.num_layers * self.hidden_size * each


def read_config(reader: ConfigReader, architecture: str) -> GraniteHybridSpec:
    only_silu(reader)
    reader = replace(reader, config={**DEFAULTS, **reader.config})
    config, num_layers = reader.config, reader.num_layers()
    low, high = map(_number, config.get("time_step_limit") or (0.0, math.inf))
    if low > 0 or high < math.inf:
        raise reader.fail(f"time_step_limit [{low}, {high}] is not supported: transformers has it for prompts alone")
    if (positions := config.get("position_embedding_type")) not in (None, "nope", "rope"):
        raise reader.fail(f'position_embedding_type "{positions}" is not supported, only "rope" and "nope"')
    return read_decoder(
        replace(reader, config={**config, "layer_types": None}),
        architecture,
        DEFAULTS,
        GraniteHybridSpec,
        **scales(reader),
        intermediate_size=reader.need("shared_intermediate_size"),
        experts=_experts(reader),
        state=_state(reader),
        linear=linear_layers(reader, ["linear_attention"] * num_layers),
        rotated=(positions == "rope",) * num_layers,
        conv_bias=bool(config["mamba_conv_bias"]),
        projection_bias=bool(config.get("mamba_proj_bias")),
        mlp_bias=False,
    )


def _number(stated: Any) -> float:
    """transformers writes infinity as {"__float__": "Infinity"}."""
    return float(stated["__float__"] if isinstance(stated, dict) else stated)


def _state(reader: ConfigReader) -> StateSpec:
    heads, groups = reader.need("mamba_n_heads"), reader.need("mamba_n_groups")
    inner, size = reader.need("mamba_expand") * reader.need("hidden_size"), reader.config.get("mamba_d_head", "auto")
    size = inner // heads if size in ("auto", None) else reader.need("mamba_d_head")
    if heads * size != inner or heads % groups:
        raise reader.fail(f"{heads} heads of {size} in {groups} groups do not make {inner} channels")
    return StateSpec(groups, heads, reader.need("mamba_d_state"), size, reader.need("mamba_d_conv"), "ssd")


def _experts(reader: ConfigReader) -> ExpertsSpec | None:
    if not reader.config["num_local_experts"]:
        return None
    count, per_token = reader.need("num_local_experts"), reader.need("num_experts_per_tok")
    if per_token > count:
        raise reader.fail(f"num_experts_per_tok is {per_token}, and there are {count} experts")
    of_all = (True,) * reader.num_layers()
    return ExpertsSpec(count, per_token, reader.need("intermediate_size"), normalised=True, sparse=of_all)


def gguf_config(about: Metadata) -> dict[str, Any]:
    tensors = about.file.tensors
    kv_heads = about.need("attention.head_count_kv", memoryview)  # of each layer; 0: it has a state
    heads, inner = about.need("ssm.time_step_rank"), about.need("ssm.inner_size")
    return decoder_config(about, kv_heads=max(kv_heads, key=bool)) | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if about.get("rope.scaling.finetuned", bool, False) else "nope",
        "rope_parameters": about.rope_parameters(),
        "num_local_experts": 0,
        "shared_intermediate_size": about.need("feed_forward_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // about.need("embedding_length"),
        "mamba_n_groups": about.need("ssm.group_count"),
        "mamba_d_state": about.need("ssm.state_size"),
        "mamba_d_conv": about.need("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
        "hidden_act": "silu",
        **gguf_scales(about),
    }


def flat(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape)]


GGUF = GGUFNames(
    gguf_config,
    top=GGUF_ENDS,
    layer=GGUF_LAYER
    | {
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "shared_mlp.gate",
        "ffn_up": "shared_mlp.up",
        "ffn_down": "shared_mlp.output_linear",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
        "ssm_a": "mamba.A_log",
        "ssm_d": "mamba.D",
        "ssm_dt.bias": "mamba.dt_bias",
    },
    heads=heads_of_llama,
    changes={"ssm_a": "decay"},
    shapes={
        "ssm_a": flat,
        "ssm_d": flat,
        "ssm_norm.weight": flat,
        "ssm_conv1d.weight": lambda shape: [shape[0], 1, shape[1]],
    },
)

MAMBA = {
    "mamba": ("attention", ""),
    "mamba.in_proj": ("attention.project", ""),
    "mamba.conv1d": ("attention.conv", ""),
    "mamba.norm": ("attention.norm", ""),
    "mamba.out_proj": ("attention.out", ""),
}


def weight_map(spec: GraniteHybridSpec) -> WeightMap:
    layer = {name: to for name, to in WEIGHTS.layer.items() if not name.startswith("mlp.")}
    mlp = "mlp" if spec.experts is None else "mlp.shared"
    layer |= {f"shared_mlp.{part}": (f"{mlp}.gate_up", part) for part in ("gate", "up")}
    layer |= {"shared_mlp.output_linear": (f"{mlp}.down", ""), "mlp.router": ("mlp.routed.router", "")}
    for e in range(spec.experts.num_experts if spec.experts else 0):
        for part in ("gate", "up"):
            layer[f"mlp.experts.{e}.{part}_proj"] = ("mlp.routed.experts.gate_up", f"{e}.{part}")
        layer[f"mlp.experts.{e}.down_proj"] = ("mlp.routed.experts.down", f"{e}.")
    return WeightMap(ENDS, layer | MAMBA, fused={"shared_mlp.input_linear": ("shared_mlp.gate", "shared_mlp.up")})


class Mamba2(nn.Module):
    """index: among the layers of the whole model."""

    def __init__(self, spec: GraniteHybridSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        of = self.state = spec.state
        inner = of.num_v_heads * of.v_size
        self.index = index - ranks.placement.layers(spec.num_layers).start
        how = {"bias": spec.projection_bias, "dtype": dtype, "method": method}
        self.sizes = inner, of.channels, of.num_v_heads  # of a gate, of v, k and q, and of dt
        self.project = sharded.column_linear(ranks, spec.hidden_size, {"": sum(self.sizes)}, **how)
        self.conv = Convolution(of, spec.conv_bias, dtype)
        self.A_log, self.D, self.dt_bias = (empty_parameter(of.num_v_heads, dtype=torch.float32) for _ in range(3))
        self.norm = GatedNorm(inner, of.num_k_heads, spec.norm_eps)
        self.out = sharded.row_linear(ranks, inner, spec.hidden_size, **how)

    def finish(self) -> None:
        self.register_buffer("weights", self.conv.with_skip(self.D.data), persistent=False)

    def forward(self, x: Tensor, rotate: Any) -> Tensor:
        z, qkv, dt = self.project(x).split(self.sizes, 1)
        rate = F.softplus(dt.float() + self.dt_bias)
        gates = torch.stack((-self.A_log.exp() * rate, rate), 1)  # [T, 2, heads]
        answers = attend_state(qkv, gates, self.weights, self.state.v_size, self.index)
        return self.out(self.norm(answers.flatten(1), z))


class GatedNorm(nn.Module):
    """RMSNorm of each group, of what a gate has multiplied; in fp32, rounded once."""

    def __init__(self, size: int, num_groups: int, eps: float):
        super().__init__()
        self.num_groups, self.shape, self.eps = num_groups, (size // num_groups,), eps
        self.weight = empty_parameter(size, dtype=torch.float32)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, size] fp32, gate [T, size] -> like gate."""
        groups = (x * F.silu(gate.float())).unflatten(1, (self.num_groups, -1))
        return (F.rms_norm(groups, self.shape, None, self.eps).flatten(1) * self.weight).to(gate.dtype)


class GraniteHybridLayer(GraniteLayer):
    def make_attention(
        self, spec: GraniteHybridSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> nn.Module:
        if spec.linear[index]:
            return Mamba2(spec, index, dtype, method, ranks)
        return super().make_attention(spec, index, dtype, method, ranks)

    def make_mlp(
        self, spec: GraniteHybridSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> nn.Module:
        of, shared = spec.experts, MLP(spec, dtype, method, ranks, activation="silu", bias=False)
        if of is None:
            return shared
        router = Router(spec.hidden_size, of.num_experts, of.experts_per_token, of.normalised)
        sizes = spec.hidden_size, of.intermediate_size, of.num_experts
        return MixtureMLP(sharded.sparse_mlp(ranks, router, *sizes, dtype), shared)


class GraniteHybridModel(HybridDecoder):
    weights_of = staticmethod(weight_map)
    layer = GraniteHybridLayer
