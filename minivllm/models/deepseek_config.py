"""What configs of DeepSeek V2 and V3 say (deepseek.py has the network). No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from minivllm.kv_groups import Latent
from minivllm.models.spec import Config, ConfigReader, ExpertsSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses a token's experts, and weighs them."""

    scores: Literal["softmax", "sigmoid"]  # sigmoid: chosen by scores to which a correction of each expert is added
    num_groups: int  # of neighbouring experts; only those of the best groups can be chosen
    groups_taken: int
    scale: float  # of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekSpec(ModelSpec):
    rms_eps: float
    rope: RopeSpec
    scale: float  # of scores; sharpened where rope is stretched
    interleaved: bool  # whether the numbers of a pair that rope turns are neighbours, or half a head apart
    query_rank: int  # of the vector that queries are made of; 0: they are made of x
    nope_size: int  # of a head's q and K: what does not turn
    value_size: int
    bias: bool  # of the products before the first norms of attention, and behind it
    mlp_bias: bool
    experts: ExpertsSpec | None  # None: every layer is dense
    shared_size: int  # inner one of the experts that every token has
    routing: Routing
    num_behind: int  # layers of the checkpoint behind the last, which guess further tokens; they are not loaded

    @property
    def num_parameters(self) -> int:
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * self._num_attention_parameters + self.num_mlp_parameters + ends

    @property
    def _num_attention_parameters(self) -> int:
        """Of a layer."""
        assert self.latent is not None
        hidden, heads = self.hidden_size, self.num_heads
        of_queries = self.query_rank * (hidden + heads * self.head_size) or hidden * heads * self.head_size
        expanded = self.latent.rank * heads * (self.nope_size + self.value_size)
        return of_queries + hidden * self.latent.size + expanded + heads * self.value_size * hidden

    @property
    def num_mlp_parameters(self) -> int:
        dense, of = 3 * self.hidden_size * self.intermediate_size, self.experts
        if of is None:
            return self.num_layers * dense
        sparse = self.hidden_size * (3 * of.num_experts * of.intermediate_size + of.num_experts + 3 * self.shared_size)
        return sum(sparse if is_sparse else dense for is_sparse in of.sparse)


# What transformers takes when a config does not say.
COMMON: Config = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
COMMON = {**COMMON, "v_head_dim": 128, "moe_layer_freq": 1}
DEFAULTS: dict[str, Config] = {
    "DeepseekV2ForCausalLM": COMMON
    | {
        **{"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
        **{"routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"},
        **{"bos_token_id": 1, "eos_token_id": 2},
    },
    "DeepseekV3ForCausalLM": COMMON
    | {
        **{"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
        **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "rope_interleave": True, "mlp_bias": False},
        **{"bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1},
    },
}
# What each architecture can compute; another value is refused.
ONLY: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "DeepseekV2ForCausalLM": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False, None),  # transformers never divides, DeepSeek's own code does: no model asks for it
    },
    "DeepseekV3ForCausalLM": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "mlp_bias": (False, None)},
}
ONLY_BOTH: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "moe_layer_freq": (1,)}


def read_config(reader: ConfigReader, architecture: str) -> DeepseekSpec:
    reader = replace(reader, config={"hidden_act": "silu", **DEFAULTS[architecture], **reader.config})
    _refuse_unsupported(reader, architecture)
    heads, rope, latent = reader.need("num_attention_heads"), reader.rope(), _latent(reader)
    nope_size, ends = reader.need("qk_nope_head_dim"), reader.token_ids("bos_token_id")
    return DeepseekSpec(
        architecture=architecture,
        hidden_size=reader.need("hidden_size"),
        num_layers=reader.num_layers(),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=nope_size + latent.rope_size,
        latent=latent,
        intermediate_size=reader.need("intermediate_size"),
        vocab_size=reader.need("vocab_size"),
        rms_eps=reader.positive("rms_norm_eps", 1e-6),
        rope=rope,
        scale=(nope_size + latent.rope_size) ** -0.5 * _sharpening(reader) ** 2,
        interleaved=architecture == "DeepseekV2ForCausalLM" or bool(reader.config["rope_interleave"]),
        query_rank=0 if reader.config["q_lora_rank"] is None else reader.need("q_lora_rank"),
        nope_size=nope_size,
        value_size=reader.need("v_head_dim"),
        bias=bool(reader.config.get("attention_bias", False)),
        mlp_bias=bool(reader.config.get("mlp_bias", False)),
        experts=_experts(reader, architecture),
        shared_size=reader.need("moe_intermediate_size") * reader.need("n_shared_experts"),
        routing=_routing(reader, architecture),
        num_behind=reader.config.get("num_nextn_predict_layers") or 0,
        tie_embeddings=bool(reader.config.get("tie_word_embeddings", False)),
        windows=(None,) * reader.num_layers(),
        max_position=reader.max_position(rope),
        bos_token_id=ends[0] if ends else None,
        eos_token_ids=reader.token_ids("eos_token_id"),
        dtype=reader.dtype(),
    )


def _refuse_unsupported(reader: ConfigReader, architecture: str) -> None:
    for field, can in {**ONLY_BOTH, **ONLY[architecture]}.items():
        if field in reader.config and (value := reader.config[field]) not in can:
            raise reader.fail(f"{field}={value!r} is not supported, only {can[0]!r}")
    heads, kv_heads = reader.need("num_attention_heads"), reader.config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise reader.fail(f"num_key_value_heads is {kv_heads}, and K and V are made for each of {heads} heads")


def _latent(reader: ConfigReader) -> Latent:
    latent = Latent(reader.need("kv_lora_rank"), reader.need("qk_rope_head_dim"))
    if latent.rope_size % 2:
        raise reader.fail(f"qk_rope_head_dim {latent.rope_size} is odd, rotary embedding needs pairs")
    return latent


def _sharpening(reader: ConfigReader) -> float:
    """Of q and K each, by how far rope is stretched (YaRN's attention temperature), beside what is in its cosines."""
    rope = reader.rope_parameters()
    weight, kind = rope.get("mscale_all_dim"), rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or not weight or (factor := reader.positive("factor", of=rope)) <= 1:
        return 1.0
    return 0.1 * reader.positive("mscale_all_dim", of=rope) * math.log(factor) + 1.0


def _experts(reader: ConfigReader, architecture: str) -> ExpertsSpec | None:
    layers, dense = reader.num_layers(), reader.config["first_k_dense_replace"] or 0
    if dense >= layers:
        return None
    num_experts, per_token = reader.need("n_routed_experts"), reader.need("num_experts_per_tok")
    routing = _routing(reader, architecture)
    num_open = num_experts // routing.num_groups * routing.groups_taken
    if num_experts % routing.num_groups or routing.groups_taken > routing.num_groups or per_token > num_open:
        raise reader.fail(
            f"{per_token} of {num_experts} experts cannot be chosen out of {routing.groups_taken} of "
            f"{routing.num_groups} groups (num_experts_per_tok, n_routed_experts, topk_group, n_group)"
        )
    if routing.scores == "sigmoid" and num_experts // routing.num_groups < 2:
        raise reader.fail("a group must have two experts at least: it is as good as its best two")
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=reader.need("moe_intermediate_size"),
        normalised=bool(reader.config["norm_topk_prob"]),
        sparse=tuple(i >= dense for i in range(layers)),
    )


def _routing(reader: ConfigReader, architecture: str) -> Routing:
    scores: Literal["softmax", "sigmoid"] = "softmax" if architecture == "DeepseekV2ForCausalLM" else "sigmoid"
    in_groups = reader.config["topk_method"] != "greedy"
    groups, taken = (reader.need(f) if in_groups else 1 for f in ("n_group", "topk_group"))
    return Routing(scores, groups, taken, reader.positive("routed_scaling_factor"))
