"""What decoders share, whichever family they are of: the names of their weights, attention with rotary positions, a
gated MLP, both ends, and what of all this a rank or a pipeline's stage has. A model file adds its network and its
differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import Rope, attend, attend_with_rope
from minivllm.layers import sharded
from minivllm.layers.description import Description, LayerDescription
from minivllm.layers.embedding import NoLMHead
from minivllm.layers.linear import Linear, QuantMethod, choose_method
from minivllm.layers.norm import QKNorm, WholeQKNorm
from minivllm.layers.rotary import Angles, PairedRotaryEmbedding, RotaryEmbedding, Rotation
from minivllm.models.checkpoint import Network, WeightMap
from minivllm.models.spec import ModelSpec
from minivllm.parallel.group import Ranks
from minivllm.parallel.placement import Placement

# Hugging Face's module -> (ours, which of its rows). A layer's norms but the first have their names from its model.
ENDS = {
    "model.embed_tokens": ("embedding", ""),
    "model.norm": ("norm", ""),
    "lm_head": ("lm_head", ""),
}
ATTENTION_WEIGHTS = {
    "input_layernorm": ("attention_norm", ""),
    "self_attn.q_proj": ("attention.qkv", "q"),
    "self_attn.k_proj": ("attention.qkv", "k"),
    "self_attn.v_proj": ("attention.qkv", "v"),
    "self_attn.q_norm": ("attention.qk_norm", "q"),
    "self_attn.k_norm": ("attention.qk_norm", "k"),
    "self_attn.o_proj": ("attention.o", ""),
}
MLP_WEIGHTS = {
    "mlp.gate_proj": ("mlp.gate_up", "gate"),
    "mlp.up_proj": ("mlp.gate_up", "up"),
    "mlp.down_proj": ("mlp.down", ""),
}


def of_stage(weights: WeightMap, spec: ModelSpec, at: Placement) -> WeightMap:
    """A last stage that is not the first has a head of its own where the checkpoint's is tied: the embedding's matrix
    once more."""
    if not spec.tie_embeddings or at.is_first_stage:
        return weights
    embedding = next(theirs for theirs, (ours, _) in weights.top.items() if ours == "embedding")
    return replace(weights, top={**weights.top, embedding: weights.top["lm_head"]})


def attention_layers(
    spec: ModelSpec, at: Placement, scale: float, soft_cap: float | None = None
) -> list[AttentionSpec]:
    """Those of this rank, with its heads. scale: of scores."""
    own = at.layers(spec.num_layers)
    heads, kv_heads = at.part(spec.num_heads).size, at.kv_heads(spec.num_kv_heads).size
    windows = spec.windows[own.start : own.stop]
    return [AttentionSpec(heads, kv_heads, spec.head_size, scale, window, soft_cap) for window in windows]


def make_lm_head(
    spec: ModelSpec, embedding: nn.Module, dtype: torch.dtype, method: QuantMethod, ranks: Ranks, bias: bool = False
) -> nn.Module:
    """bias: of a head that is not tied."""
    if not (spec.has_head and ranks.placement.is_last_stage):
        return NoLMHead()
    if spec.tie_embeddings and ranks.placement.is_first_stage:
        return sharded.tied_head(embedding, method)
    sizes = spec.hidden_size, spec.vocab_size
    return sharded.vocabulary_head(ranks, *sizes, bias=bias, dtype=dtype, method=method)


def rotate_then_attend(layer: Attention, qkv: Tensor, rotate: Rotation) -> Tensor:
    """From qkv [T, heads + 2 kv_heads, head_size] to what attention gives [T, heads, head_size], as it is written."""
    qk = rotate(layer.qk_norm(qkv[:, : layer.num_qk_heads]))  # [T, heads + kv_heads, head_size]
    return attend(qk[:, : layer.num_heads], qk[:, layer.num_heads :], qkv[:, layer.num_qk_heads :], layer.index)


def rotate_in_kernel(layer: Attention, qkv: Tensor, angles: Angles) -> Tensor:
    """The same, where the attention backend norms, rotates and writes K and V in one launch."""
    weight, eps = getattr(layer.qk_norm, "weight", None), getattr(layer.qk_norm, "eps", 0.0)
    return attend_with_rope(qkv, Rope(*angles, weight, eps), layer.num_heads, layer.index)


class Attention(nn.Module):
    """index: among the layers of the whole model. make_norm: of so many heads of q, and of k; None: no norm."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        dtype: torch.dtype,
        method: QuantMethod,
        ranks: Ranks,
        *,
        qkv_bias: bool,
        o_bias: bool,
        make_norm: Callable[[int, int], nn.Module] | None,
    ):
        super().__init__()
        at, size, head_size = ranks.placement, spec.hidden_size, spec.head_size
        self.index = index - at.layers(spec.num_layers).start
        num_kv_heads = at.kv_heads(spec.num_kv_heads).size
        self.head_size, self.num_heads = head_size, at.part(spec.num_heads).size
        self.num_qk_heads = self.num_heads + num_kv_heads
        heads = spec.num_heads, spec.num_kv_heads, head_size
        self.qkv = sharded.qkv_linear(ranks, size, *heads, bias=qkv_bias, dtype=dtype, method=method)
        n_q = spec.num_heads * head_size
        self.o = sharded.row_linear(ranks, n_q, size, bias=o_bias, dtype=dtype, method=method)
        self.mix = rotate_then_attend  # or rotate_in_kernel
        self.qk_norm = nn.Identity() if make_norm is None else make_norm(self.num_heads, num_kv_heads)

    def forward(self, x: Tensor, rotate: Rotation | Angles) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)  # [T, heads + 2 kv_heads, head_size]
        return self.o(self.mix(self, qkv, rotate).flatten(1))


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}


class MLP(nn.Module):
    """A gated one (Shazeer 2020): SwiGLU or GeGLU, by its activation, one of ACTIVATIONS."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, method: QuantMethod, ranks: Ranks, *, activation: str, bias: bool
    ):
        super().__init__()
        size, hidden = spec.intermediate_size, spec.hidden_size
        self.size = ranks.placement.part(size).size
        self.activation, self.activate = activation, ACTIVATIONS[activation]
        parts = {"gate": size, "up": size}
        self.gate_up = sharded.column_linear(ranks, hidden, parts, bias=bias, dtype=dtype, method=method)
        self.down = sharded.row_linear(ranks, size, hidden, bias=bias, dtype=dtype, method=method)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)  # [T, 2 intermediate]
        return self.down(self.activate(gate_up[:, : self.size]).mul_(gate_up[:, self.size :]))


class Decoder(Network):
    """Of a pipeline's stages the first embeds, the last has the norm and the head.

    ranks: which part of the model this is. weights: of the whole. attention: the layers' of this rank."""

    embedding_scale = 1.0

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        weights: WeightMap,
        attention: list[AttentionSpec],
    ):
        super().__init__()
        at = ranks.placement
        at.check(spec)
        self.spec, self.dtype, self.placement = spec, dtype, at
        self.attention_layers = attention
        self.weights = of_stage(weights, spec, at)
        self.linear_method, self.linear_reason = choose_method(device, dtype)
        if spec.classifier is not None:
            self.weights = replace(self.weights, top={**self.weights.top, "score": ("score", "")})
            sizes = {"": len(spec.classifier.labels)}
            with device:
                self.score = Linear(spec.hidden_size, sizes, bias=False, dtype=dtype, method=self.linear_method)
        self.first_layer = at.layers(spec.num_layers).start

    def rotary_of(self, layer: nn.Module) -> nn.Module | None:
        """None: it rotates nothing."""
        return self.rotary

    def describe(self) -> Description | str:
        """What the layers do around their products; or which of them no such data says, and why. Once it is
        finished."""
        said = [_unsaid(layer, self.rotary_of(layer)) for layer in self.layers]
        if reasons := Counter(why for why in said if why is not None):
            return "; ".join(f"{count} of {len(said)} layers have {why}" for why, count in reasons.items())
        common, *others = {_common(layer) for layer in self.layers}
        turned = {
            getattr(of, "interleaved", False) for layer in self.layers if (of := self.rotary_of(layer)) is not None
        }
        if others or len(turned) > 1 or not is_rms_norm(self.norm) or self.norm.eps != common[0]:
            return "layers, or the last norm, differ in more than weights and rotations"
        layers = [_describe(layer, self.rotary_of(layer)) for layer in self.layers]
        eps, rounds, is_whole, *rest = common
        norms = self.norm.multiplier, eps, rounds, is_whole
        return Description(layers, *norms, turned == {True}, *rest, self.embedding_scale)

    def classify(self, last: Tensor) -> Tensor:
        """The hidden states of last tokens [B, hidden] -> logits [B, labels]. Only of a model with such a head."""
        return self.score(last)

    def make_layers(self, make: Callable[[int], nn.Module]) -> nn.ModuleList:
        """Those of this stage, by their indices among all."""
        own = self.placement.layers(self.spec.num_layers)
        return nn.ModuleList(make(i) for i in range(own.start, own.stop))


# ------------------------------------------------------------------------------------- a layer as data (description.py)


def _unsaid(layer: nn.Module, rotary: nn.Module) -> str | None:
    """What of a layer LayerDescription cannot say, or None. A layer of its order has `norms`: where its first four are,
    None for what it lacks. They stand in the class that has the order, or a subclass would pass for what it is not."""
    ordered_by = next((kind for kind in type(layer).__mro__ if "forward" in vars(kind)), nn.Module)
    if "norms" not in vars(ordered_by):
        return f"an order of their own ({type(layer).__name__})"
    if type(layer.attention) is not Attention:
        return f"attention of their own ({type(layer.attention).__name__})"
    if type(layer.mlp) is not MLP:
        return f"no gated MLP but experts or others ({type(layer.mlp).__name__})"
    if layer.attention.mix not in (rotate_then_attend, rotate_in_kernel):
        return f"attention of their own ({layer.attention.mix.__name__})"
    if why := _unsaid_rotation(rotary):
        return why
    if not isinstance(layer.attention.qk_norm, QKNorm | WholeQKNorm | nn.Identity):
        return f"a norm of q and k of their own ({type(layer.attention.qk_norm).__name__})"
    norms = [norm for norm in _norms(layer) if norm is not None]
    if not all(map(is_rms_norm, norms)):
        return "a norm that is none by the root of the mean square"
    norms += [] if isinstance(layer.attention.qk_norm, nn.Identity) else [layer.attention.qk_norm]
    return None if len({norm.eps for norm in norms}) == 1 else "norms that differ in their epsilon"


def _unsaid_rotation(rotary: nn.Module | None) -> str | None:
    if rotary is None or type(rotary) in (RotaryEmbedding, PairedRotaryEmbedding):
        return None
    return f"rotations of their own ({type(rotary).__name__})"


def is_rms_norm(norm: nn.Module) -> bool:
    """Its `multiplier` is what x / rms(x) is multiplied by."""
    return hasattr(norm, "multiplier")


def _norms(layer: nn.Module) -> list[nn.Module | None]:
    return [None if name is None else getattr(layer, name) for name in layer.norms]


def _common(layer: nn.Module) -> tuple[float, bool, bool, str, float]:
    """eps, qk_rounds, qk_whole, activation and residual_scale of Description."""
    eps = next(norm.eps for norm in _norms(layer) if norm is not None)
    qk_norm, scale = layer.attention.qk_norm, getattr(layer, "residual_scale", 1.0)
    is_whole = isinstance(qk_norm, WholeQKNorm)
    return eps, getattr(qk_norm, "rounds", False), is_whole, layer.mlp.activation, scale


def _describe(layer: nn.Module, rotary: RotaryEmbedding | None) -> LayerDescription:
    norms = (getattr(norm, "multiplier", None) for norm in (*_norms(layer), layer.attention.qk_norm))
    return LayerDescription(*norms, getattr(rotary, "cos", None), getattr(rotary, "sin", None))
