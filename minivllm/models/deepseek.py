"""DeepSeek V2 (2024) and V3 (2024): latent attention, and experts of which some see every token.

Attention keeps of a token one vector and one key that turns, in the place of K and V of each head; what expands the
vector goes with the call, and the backend says how it is used (minivllm/attention/latent.py). The first layers are
dense; the others add to what chosen experts give the result of shared ones, which is one MLP. V2 chooses by a softmax,
in its larger model among the groups of experts with the highest share; V3 by sigmoids and a correction of each expert,
which balances the load and weighs nothing, among the groups whose best two are highest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import attend_latent
from minivllm.layers import sharded
from minivllm.layers.experts import MatrixStack, MixtureMLP, Router, Routes, experts_of
from minivllm.layers.linear import Linear, QuantMethod, empty_parameter
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding, Rotation
from minivllm.layers.stored import Shard
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import ENDS, MLP, MLP_WEIGHTS, Decoder, make_lm_head
from minivllm.models.deepseek_config import DeepseekSpec, Routing, read_config
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement

__all__ = ["DeepseekModel", "read_config"]

NORM_EPS = 1e-6  # of the norms inside of attention, whatever the config says of the others
ATTENTION_WEIGHTS = {
    "input_layernorm": ("attention_norm", ""),
    "self_attn.q_a_layernorm": ("attention.q_norm", ""),
    "self_attn.kv_a_proj_with_mqa": ("attention.down", "kv"),
    "self_attn.kv_a_layernorm": ("attention.kv_norm", ""),
    "self_attn.kv_b_proj": ("attention.expand", "0."),
    "self_attn.o_proj": ("attention.o", ""),
    "post_attention_layernorm": ("mlp_norm", ""),
}
SHARED_WEIGHTS = {
    "mlp.shared_experts.gate_proj": ("mlp.shared.gate_up", "gate"),
    "mlp.shared_experts.up_proj": ("mlp.shared.gate_up", "up"),
    "mlp.shared_experts.down_proj": ("mlp.shared.down", ""),
}


def weight_map(spec: DeepseekSpec) -> WeightMap:
    """Of this model: of the matrices of experts there are as many as it has."""
    found = ATTENTION_WEIGHTS | MLP_WEIGHTS | SHARED_WEIGHTS | {"mlp.gate": ("mlp.routed.router", "")}
    if spec.query_rank:
        found |= {"self_attn.q_a_proj": ("attention.down", "q"), "self_attn.q_b_proj": ("attention.q", "")}
    else:
        found |= {"self_attn.q_proj": ("attention.q", "")}
    for e in range(spec.experts.num_experts if spec.experts else 0):
        names = {part: f"mlp.experts.{e}.{part}_proj" for part in ("gate", "up", "down")}
        found |= {names[part]: ("mlp.routed.experts.gate_up", f"{e}.{part}") for part in ("gate", "up")}
        found[names["down"]] = ("mlp.routed.experts.down", f"{e}.")
    return WeightMap(ENDS, found)


def attention_layers(spec: DeepseekSpec, at: Placement) -> list[AttentionSpec]:
    """Those of this rank, with its heads. What is kept of a token is of all heads, so every rank keeps it."""
    heads = at.part(spec.num_heads).size
    layer = AttentionSpec(heads, heads, spec.head_size, spec.scale, latent=spec.latent)
    return [layer] * at.layers(spec.num_layers).size


class NeighbourRotation(Rotation):
    """Of pairs that lie side by side."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, heads, size] -> rotated, like x."""
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return torch.addcmul(x * self.cos, swapped, self.sin)


class NeighbourRotary(RotaryEmbedding):
    def forward(self, positions: Tensor) -> Rotation:
        """positions [T] int64, each below max_position."""
        cos, sin = self.cos[positions], self.sin[positions]  # [T, size / 2]
        both = torch.stack((cos, cos), -1).flatten(1), torch.stack((-sin, sin), -1).flatten(1)
        return NeighbourRotation(*(x.unsqueeze(1) for x in both))


class Expansion(MatrixStack):
    """What makes K and V of each head of a latent vector: one matrix, which no layer multiplies as a whole, so it is
    kept dense as experts' are, with the model's dtype."""

    def __init__(self, spec: DeepseekSpec, dtype: torch.dtype, at: Placement):
        assert spec.latent is not None
        size, own = spec.nope_size + spec.value_size, at.part(spec.num_heads)
        super().__init__(1, spec.latent.rank, {"": own.size * size}, dtype)
        self.num_heads = own.size
        if at.tp > 1:
            self.shards = {"0.": Shard("outputs", *own.times(size))}

    def by_head(self) -> Tensor:
        """[heads, nope_size + value_size, rank]"""
        return self.weight.view(self.num_heads, -1, self.n_in)


class LatentAttention(nn.Module):
    """index: among the layers of the whole model."""

    def __init__(self, spec: DeepseekSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        assert spec.latent is not None
        at, hidden, how = ranks.placement, spec.hidden_size, {"dtype": dtype, "method": method}
        self.index, self.latent = index - at.layers(spec.num_layers).start, spec.latent
        self.query_rank, self.nope_size, self.value_size = spec.query_rank, spec.nope_size, spec.value_size
        n_q, n_v = spec.num_heads * spec.head_size, spec.num_heads * spec.value_size
        queries = {"q": spec.query_rank} if spec.query_rank else {}
        self.down = Linear(hidden, queries | {"kv": spec.latent.size}, bias=spec.bias, **how)
        self.q_norm = RMSNorm(spec.query_rank, NORM_EPS, dtype) if spec.query_rank else None
        self.kv_norm = RMSNorm(spec.latent.rank, NORM_EPS, dtype)
        self.q = sharded.column_linear(ranks, spec.query_rank or hidden, {"": n_q}, bias=False, **how)
        self.expand = Expansion(spec, dtype, at)
        self.o = sharded.row_linear(ranks, n_v, hidden, bias=spec.bias, **how)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        down = self.down(x)  # [T, query_rank + rank + rope_size]
        queries, vector, key = down.split([self.query_rank, *self.latent], -1)
        q = self.q(x if self.q_norm is None else self.q_norm(queries))
        q = q.view(x.shape[0], -1, self.nope_size + self.latent.rope_size)  # [T, heads, head_size]
        own, turned = q.split([self.nope_size, self.latent.rope_size], -1)
        q = torch.cat((own, rotate(turned)), -1)
        latent = torch.cat((self.kv_norm(vector), rotate(key.unsqueeze(1)).squeeze(1)), -1)
        attended = attend_latent(q, latent, self.expand.by_head(), self.value_size, self.index)
        return self.o(attended.flatten(1))


class SoftmaxRouter(Router):
    """DeepSeek V2's: of the groups whose best expert has the largest share, the experts with the largest."""

    def __init__(self, n_in: int, num_experts: int, top_k: int, routing: Routing):
        super().__init__(n_in, num_experts, top_k, normalised=False)
        self.routing = routing

    def forward(self, x: Tensor) -> Routes:
        """x [T, n_in] -> Routes."""
        shares = F.linear(x.float(), self.weight).softmax(-1)  # [T, experts]
        best = shares.unflatten(-1, (self.routing.num_groups, -1)).amax(-1)
        weights, ids = shares.masked_fill(~_of_best_groups(best, shares, self.routing), 0.0).topk(self.top_k, -1)
        return Routes(ids, weights * self.routing.scale)


class SigmoidRouter(Router):
    """DeepSeek V3's: chosen by scores with their corrections, weighed by the scores alone."""

    def __init__(self, n_in: int, num_experts: int, top_k: int, normalised: bool, routing: Routing):
        super().__init__(n_in, num_experts, top_k, normalised)
        self.routing = routing
        self.e_score_correction_bias = empty_parameter(num_experts, dtype=torch.float32)  # the checkpoint's name

    def forward(self, x: Tensor) -> Routes:
        """x [T, n_in] -> Routes."""
        scores = F.linear(x.float(), self.weight).sigmoid()  # [T, experts]
        corrected = scores + self.e_score_correction_bias
        best = corrected.unflatten(-1, (self.routing.num_groups, -1)).topk(2, -1).values.sum(-1)
        closed = ~_of_best_groups(best, scores, self.routing)
        ids = corrected.masked_fill(closed, -torch.inf).topk(self.top_k, -1).indices
        weights = scores.gather(-1, ids)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routes(ids, weights * self.routing.scale)


def _of_best_groups(best: Tensor, like: Tensor, routing: Routing) -> Tensor:
    """[T, experts] bool. best [T, groups]: how good each is."""
    taken = best.topk(routing.groups_taken, -1).indices
    is_taken = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, taken, True)
    return is_taken.repeat_interleave(like.shape[-1] // routing.num_groups, -1)


def make_router(spec: DeepseekSpec) -> Router:
    of = spec.experts
    assert of is not None
    sizes = spec.hidden_size, of.num_experts, of.experts_per_token
    if spec.routing.scores == "softmax":
        return SoftmaxRouter(*sizes, spec.routing)
    return SigmoidRouter(*sizes, of.normalised, spec.routing)


def make_mlp(spec: DeepseekSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks) -> nn.Module:
    of, hidden = spec.experts, spec.hidden_size
    if of is None or not of.sparse[index]:
        return MLP(spec, dtype, method, ranks, activation="silu", bias=spec.mlp_bias)
    routed = sharded.sparse_mlp(ranks, make_router(spec), hidden, of.intermediate_size, of.num_experts, dtype)
    wide = replace(spec, intermediate_size=spec.shared_size)
    return MixtureMLP(routed, MLP(wide, dtype, method, ranks, activation="silu", bias=spec.mlp_bias))


class DecoderLayer(nn.Module):
    """index: among the layers of the whole model."""

    norms = ("attention_norm", "mlp_norm", None, None)  # of LayerDescription

    def __init__(self, spec: DeepseekSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.attention = LatentAttention(spec, index, dtype, method, ranks)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.mlp = make_mlp(spec, index, dtype, method, ranks)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))


class LayersBehind:
    """Names of the tensors of the layers behind the last one, which guess further tokens (V3's MTP)."""

    def __init__(self, spec: DeepseekSpec):
        self.starts = tuple(f"model.layers.{spec.num_layers + i}." for i in range(spec.num_behind))

    def __contains__(self, name: str) -> bool:
        return name.startswith(self.starts)


class DeepseekModel(Decoder):
    def __init__(self, spec: DeepseekSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        super().__init__(spec, dtype, device, ranks, weight_map(spec), attention_layers(spec, ranks.placement))
        assert spec.latent is not None
        method, make_rotary = self.linear_method, NeighbourRotary if spec.interleaved else RotaryEmbedding
        self.unused = LayersBehind(spec)
        with device:
            self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.hidden_size, dtype)
            self.rotary = make_rotary(spec.rope, spec.latent.rope_size, spec.max_position, dtype)
            self.layers = self.make_layers(lambda i: DecoderLayer(spec, i, dtype, method, ranks))
            self.norm = sharded.last_of_stage(ranks, RMSNorm(spec.hidden_size, spec.rms_eps, dtype))
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method, ranks)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        return self.embedding(token_ids, out)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotate = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotate)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.lm_head(hidden)

    @property
    def capture_unsupported_reason(self) -> str | None:
        """Why no capture may hold a whole forward, or None."""
        return next((why for experts in experts_of(self) if (why := experts.products.capture_unsupported_reason)), None)
