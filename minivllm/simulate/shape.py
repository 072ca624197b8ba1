"""Shape: all that the cost of a model depends on, from its config.json alone.

Wider than what the engine can load (minivllm/models): a simulated model needs no layer, so any decoder of attention and
MLPs will do whose config names its sizes as Hugging Face does, OPT's names included. What would change the cost and is
not modelled is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.errors import ConfigError, ModelError
from minivllm.simulate.states import FULL, LINEAR, WINDOW, States, layer_kinds, read_states

# What a config calls a size, in the order in which the names are looked for.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions"),
}
_NOT_MODELLED = {
    "index_topk": "sparse attention",
    "state_size": "a recurrent state",
    "ssm_state_size": "a recurrent state",
    "is_encoder_decoder": "an encoder",
}
_TWO_MATRICES = ("opt", "gpt2", "gpt_neox", "bloom", "falcon", "phi", "starcoder2")  # an MLP's; elsewhere three (GLU)


@dataclass(frozen=True, slots=True)
class Experts:
    number: int  # that a device holds
    per_token: int
    intermediate_size: int  # of one
    shared_size: int  # of what every token goes through beside them; 0: nothing
    num_layers: int  # that have them, and no MLP of their own
    num_ranks: int = 1  # devices that hold others of the same layers: they are spread over them, and not cut

    @property
    def total(self) -> int:
        return self.number * self.num_ranks

    def over(self, count: int, spreads: bool) -> Experts:
        """What every token goes through is cut in either case."""
        cut = replace(self, shared_size=self.shared_size // count)
        if spreads:
            return replace(cut, number=self.number // count, num_ranks=count)
        return replace(cut, intermediate_size=self.intermediate_size // count)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): of K and V the cache has one vector a token, of all heads, which
    each device keeps whole."""

    query_rank: int  # 0: queries are projected at once
    rank: int
    rope_size: int  # of a key's part that has the position, which heads share
    nope_size: int  # of a head's part that has none
    value_size: int  # of a head

    @property
    def size(self) -> int:
        """Numbers of a token in the cache of a layer."""
        return self.rank + self.rope_size

    @property
    def expanded(self) -> int:
        """Numbers of a head's K without the position, and of its V: what the vector is made into."""
        return self.nope_size + self.value_size

    def parameters(self, hidden: int, heads: int) -> int:
        queries = heads * (self.nope_size + self.rope_size)
        projected = hidden * self.query_rank + self.query_rank * queries if self.query_rank else hidden * queries
        return projected + hidden * self.size + heads * (self.rank * self.expanded + self.value_size * hidden)


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    mlp_matrices: int
    tied: bool
    windows: Mapping[int | None, int]  # sliding window (None: sees all) -> how many layers of attention
    experts: Experts | None
    latent: Latent | None = None  # None: heads have K and V of their own
    states: States | None = None  # of the layers that are no attention; None: all are
    gates: bool = False  # whether a head's query has a gate of its size beside it
    embeds: bool = True  # whether it begins with the embedding: all but a pipeline's later stages do
    sums_norms: bool = False  # whether a norm is over all heads of Q, and of K: devices that share them sum its squares
    num_contexts: int = 1  # devices that have K and V of the same heads, each those of as many tokens
    heads: bool = True  # whether it ends with the LM head: all but its earlier ones do

    @property
    def attention_parameters(self) -> int:
        """Of a layer."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        heads = 2 * (self.num_heads + self.num_kv_heads) + self.gates * self.num_heads
        return self.hidden_size * self.head_size * heads

    @property
    def num_attention_layers(self) -> int:
        return sum(self.windows.values())

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Numbers of a head's query that meets what is cached, and of what comes out."""
        if self.latent is not None:
            return self.latent.size, self.latent.rank
        return self.head_size, self.head_size

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def linear_parameters(self) -> int:
        """Of all layers but for the experts. Norms and biases, below a hundredth, are left out."""
        mixers = self.num_attention_layers * self.attention_parameters
        if (states := self.states) is not None:
            mixers += states.num_layers * states.parameters(self.hidden_size)
        mlps = self.num_dense_layers * self.intermediate_size
        if (of := self.experts) is not None:
            mlps += of.num_layers * of.shared_size
        return mixers + mlps * self.mlp_matrices * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        if (of := self.experts) is None:
            return 0
        return of.num_layers * of.number * self.mlp_matrices * self.hidden_size * of.intermediate_size

    @property
    def other_parameters(self) -> int:
        """Embedding, LM head and what chooses experts. Learnt positions are left out."""
        routers = self.experts.num_layers * self.experts.total * self.hidden_size if self.experts else 0
        num_matrices = 1 if self.tied and (self.embeds or self.heads) else self.embeds + self.heads
        return self.vocab_size * self.hidden_size * num_matrices + routers

    @property
    def num_parameters(self) -> int:
        return self.linear_parameters + self.expert_parameters + self.other_parameters

    def over(self, count: int, spreads_experts: bool = False, num_contexts: int = 1) -> Shape:
        """What each of so many devices holds: heads and the inside of every MLP in equal parts, the rest whole
        (Shoeybi et al., 2019). Heads of K and V that are fewer than the devices are kept more than once; of those that
        would be alike, so many can each have the K and V of some tokens (num_contexts: vLLM's decode context
        parallelism). Experts are cut as MLPs are, or (spreads_experts) each device has some of them whole."""
        if spreads_experts and self.experts is None:
            raise ConfigError("executor.device: +ep spreads experts, and the model has none")
        for what, size in self._divided(spreads_experts).items():
            if size % count:
                raise ConfigError(f"executor.device: {count} devices cannot have equal parts of {size} {what}")
        if self.num_kv_heads % count and count % self.num_kv_heads:
            raise ConfigError(f"executor.device: {count} devices cannot share {self.num_kv_heads} heads of K and V")
        self._check_contexts(count, num_contexts)
        return replace(
            self,
            num_heads=self.num_heads // count,
            num_kv_heads=-(-self.num_kv_heads // count),
            intermediate_size=self.intermediate_size // count,
            vocab_size=-(-self.vocab_size // count),
            experts=self.experts and self.experts.over(count, spreads_experts),
            num_contexts=num_contexts,
            states=self.states and self.states.over(count),
        )

    def rank(self, count: int) -> Shape:
        """What each of so many data-parallel ranks holds: all of the model, but of its experts a part, each whole."""
        if (of := self.experts) is None:
            raise ConfigError("executor.device: +dp spreads experts, and the model has none: replicas serve it as well")
        if of.number % count:
            raise ConfigError(f"executor.device: {count} devices cannot have equal parts of {of.number} experts")
        return replace(self, experts=replace(of.over(count, spreads=True), shared_size=of.shared_size))

    def _check_contexts(self, count: int, num_contexts: int) -> None:
        alike = count if self.latent is not None else max(1, count // self.num_kv_heads)  # devices of one head
        if alike % num_contexts:
            found = f"{alike} of {count} devices have" if alike > 1 else f"no two of {count} devices have"
            raise ConfigError(f"executor.device: +dcp{num_contexts}, but {found} the same K and V of this model")
        if num_contexts > 1 and not self._is_uniform:
            raise ConfigError("executor.device: +dcp is not simulated with sliding windows or recurrent states")

    def stages(self, count: int, split: Sequence[int] = ()) -> list[Shape]:
        """What each stage of a pipeline holds. split: how many layers. Those with experts are spread evenly over the
        stages, wherever they stand in the model. A tied embedding is kept at both ends."""
        total = self.num_layers
        sizes = split or [total // count + (stage < total % count) for stage in range(count)]
        if sum(sizes) != total or min(sizes) < 1:
            layers = ", ".join(map(str, sizes))
            raise ConfigError(f"executor.device: stages of {layers} layers do not make the model's {total}")
        if not self._is_uniform:
            raise ConfigError(
                "executor.device: stages of a model with sliding windows or recurrent states are not simulated"
            )
        ends = [sum(sizes[: stage + 1]) for stage in range(count)]
        return [self._between(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @property
    def _is_uniform(self) -> bool:
        """All layers keep K and V, of all tokens."""
        return set(self.windows) == {None} and self.states is None

    def _between(self, start: int, stop: int) -> Shape:
        of = self.experts
        if of is not None:
            first, last = (of.num_layers * layer // self.num_layers for layer in (start, stop))
            of = replace(of, num_layers=last - first)
        size, embeds, heads = stop - start, start == 0, stop == self.num_layers
        return replace(self, num_layers=size, windows={None: size}, experts=of, embeds=embeds, heads=heads)

    def _divided(self, spreads_experts: bool) -> dict[str, int]:
        sizes = {"attention heads": self.num_heads}
        if self.num_dense_layers:
            sizes["inner features of an MLP"] = self.intermediate_size
        if self.experts and spreads_experts:
            sizes["experts"] = self.experts.number
        elif self.experts:
            sizes["inner features of an expert"] = self.experts.intermediate_size
        return sizes

    def kv_bytes_per_token(self, bytes_per_number: float, bytes_per_scale: float = 0) -> float:
        """Of a device, in the mean. bytes_per_scale: of what a head of a token has beside its numbers."""
        if self.latent is not None:
            per_layer = self.latent.size * bytes_per_number + bytes_per_scale
        else:
            per_layer = 2 * self.num_kv_heads * (self.head_size * bytes_per_number + bytes_per_scale)
        return self.num_attention_layers * per_layer / self.num_contexts


def read_shape(config: Mapping[str, Any], where: str = "config.json") -> Shape:
    """Of a decoder; of a model that reads pictures too, its text part. Raises ModelError."""
    config = config.get("text_config") or config
    for field, what in _NOT_MODELLED.items():
        if config.get(field):
            raise ModelError(f"{where}: the cost of {what} ({field}) is not modelled yet")
    sizes: dict[str, Any] = {
        name: _need(config, names, where) for name, names in _NAMES.items() if name != "intermediate_size"
    }
    heads, hidden = sizes["num_heads"], sizes["hidden_size"]
    states = read_states(config, sizes["num_layers"], where)
    latent = _latent(config, where)
    return Shape(
        **sizes,
        num_kv_heads=heads if latent else config.get("num_key_value_heads") or heads,
        head_size=latent.nope_size + latent.rope_size if latent else config.get("head_dim") or hidden // heads,
        intermediate_size=_inner(config, hidden, where),
        mlp_matrices=2 if config.get("model_type") in _TWO_MATRICES else 3,
        tied=bool(config.get("tie_word_embeddings", config.get("model_type") in ("opt", "gpt2"))),
        windows=_windows(config, sizes["num_layers"], where),
        experts=_experts(config, sizes["num_layers"], where),
        latent=latent,
        states=states,
        gates=states is not None and states.each.rule == "gated_delta",
        sums_norms=config.get("qk_norm_type") == "per_layer",  # MiniMax M2's
    )


def _need(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    raise ModelError(f"{where}: no field {' or '.join(names)}, a positive integer")


def _inner(config: Mapping[str, Any], hidden: int, where: str) -> int:
    """Granite 4 has it by another name, and the experts' by this one."""
    names = ("shared_intermediate_size", *_NAMES["intermediate_size"])
    return _need(config, names, where) if any(config.get(name) for name in names) else 4 * hidden


def _latent(config: Mapping[str, Any], where: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return Latent(config.get("q_lora_rank") or 0, *(_need(config, (name,), where) for name in names))


def _windows(config: Mapping[str, Any], num_layers: int, where: str) -> dict[int | None, int]:
    kinds = layer_kinds(config, num_layers) or [FULL[0]] * num_layers
    if others := sorted(set(kinds) - {*FULL, *LINEAR, WINDOW}):
        raise ModelError(f"{where}: the cost of {others[0]} (layer_types) is not modelled yet")
    num_layers = sum(kind not in LINEAR for kind in kinds)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and not config.get("layer_types") and config.get("model_type") == "mistral":
        return {window: num_layers}
    num_windows = kinds.count(WINDOW) if window else 0
    return {size: count for size, count in ((None, num_layers - num_windows), (window, num_windows)) if count}


def _experts(config: Mapping[str, Any], num_layers: int, where: str) -> Experts | None:
    number = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not number:
        return None
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    size = config.get("moe_intermediate_size") or _need(config, _NAMES["intermediate_size"], where)
    first = config.get("first_k_dense_replace") or 0
    shared = config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size")
    shared = shared or (config.get("n_shared_experts") or 0) * size
    return Experts(
        number=number,
        per_token=_need(config, ("num_experts_per_tok",), where),
        intermediate_size=size,
        shared_size=shared,
        num_layers=sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )
