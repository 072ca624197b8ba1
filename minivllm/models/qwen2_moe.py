"""Qwen1.5-MoE and Qwen2-MoE (Qwen Team 2024): beside the experts that a router chooses, a token's MLP has one that all
tokens share, multiplied by a gate of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers import sharded
from minivllm.layers.experts import Router, SparseMLP
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import MLP
from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.rope_decoder import WEIGHTS, PreNormLayer, RopeDecoder
from minivllm.models.spec import FULL, ConfigReader, ExpertsSpec
from minivllm.parallel.group import Ranks

DEFAULTS = {  # Qwen2MoeConfig's
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeSpec(DecoderSpec):
    experts: ExpertsSpec
    shared_size: int  # the inner one of the expert that all tokens share

    @property
    def num_mlp_parameters(self) -> int:
        of = self.experts
        each = 3 * (of.num_experts * of.intermediate_size + self.shared_size) + of.num_experts + 1
        sizes = (each if is_sparse else 3 * self.intermediate_size for is_sparse in of.sparse)
        return self.hidden_size * sum(sizes)


def read_config(reader: ConfigReader, architecture: str) -> Qwen2MoeSpec:
    only_silu(reader)
    reader = replace(reader, config={**DEFAULTS, **reader.config})
    if reader.config.get("use_sliding_window"):
        raise reader.fail("use_sliding_window=True: sliding windows beside experts are not supported")
    if set(reader.config.get("layer_types") or ()) - {FULL}:
        raise reader.fail(f"layer_types may name {FULL} alone: sliding windows beside experts are not supported")
    return read_decoder(
        reader,
        architecture,
        DEFAULTS,
        Qwen2MoeSpec,
        experts=_experts(reader),
        shared_size=reader.need("shared_expert_intermediate_size"),
        qkv_bias=bool(reader.config.get("qkv_bias", True)),
        o_bias=False,
        mlp_bias=False,
    )


def _experts(reader: ConfigReader) -> ExpertsSpec:
    count, per_token = reader.need("num_experts"), reader.need("num_experts_per_tok")
    if per_token > count:
        raise reader.fail(f"num_experts_per_tok is {per_token}, and there are {count} experts")
    step, dense = reader.optional("decoder_sparse_step", 1), set(reader.config.get("mlp_only_layers") or ())
    return ExpertsSpec(
        num_experts=count,
        experts_per_token=per_token,
        intermediate_size=reader.need("moe_intermediate_size"),
        normalised=bool(reader.config.get("norm_topk_prob", False)),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(reader.num_layers())),
    )


def weight_map(spec: Qwen2MoeSpec) -> WeightMap:
    found = {**WEIGHTS.layer, "mlp.gate": ("mlp.sparse.router", ""), "mlp.shared_expert_gate": ("mlp.shared_gate", "")}
    found |= {f"mlp.shared_expert.{part}_proj": ("mlp.shared.gate_up", part) for part in ("gate", "up")}
    found["mlp.shared_expert.down_proj"] = ("mlp.shared.down", "")
    for e in range(spec.experts.num_experts):
        for part in ("gate", "up"):
            found[f"mlp.experts.{e}.{part}_proj"] = ("mlp.sparse.experts.gate_up", f"{e}.{part}")
        found[f"mlp.experts.{e}.down_proj"] = ("mlp.sparse.experts.down", f"{e}.")
    return replace(WEIGHTS, layer=found)


class SharedGate(nn.Module):
    def __init__(self, n_in: int, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(1, n_in, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, n_in] -> [T, 1], from 0 to 1."""
        return F.linear(x, self.weight).sigmoid()


class SharedSparseMLP(nn.Module):
    def __init__(self, sparse: SparseMLP, shared: MLP, shared_gate: SharedGate):
        super().__init__()
        self.sparse, self.shared, self.shared_gate = sparse, shared, shared_gate

    def forward(self, x: Tensor) -> Tensor:
        """x [T, n_in] -> like x."""
        return self.sparse(x) + self.shared_gate(x) * self.shared(x)


class Qwen2MoeLayer(PreNormLayer):
    def make_mlp(
        self, spec: Qwen2MoeSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> nn.Module:
        of, size = spec.experts, spec.hidden_size
        if not of.sparse[index]:
            return super().make_mlp(spec, index, dtype, method, ranks)
        router = Router(size, of.num_experts, of.experts_per_token, of.normalised)
        sparse = sharded.sparse_mlp(ranks, router, size, of.intermediate_size, of.num_experts, dtype)
        inner = replace(spec, intermediate_size=spec.shared_size)
        shared = MLP(inner, dtype, method, ranks, activation="silu", bias=False)
        return SharedSparseMLP(sparse, shared, SharedGate(size, dtype))


class Qwen2MoeModel(RopeDecoder):
    weights_of = staticmethod(weight_map)
    layer = Qwen2MoeLayer
