"""From the configuration to a proposer and a rule of acceptance: the entries of these two axes.

A proposer is made in two steps: what loads files and says what memory it takes comes before the KV pool is sized (a
Recipe), what builds on the worker's parts comes after.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionSpec, kv_spec
from minivllm.attention.groups import backends_of
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.loading import LoadedModel, load_model
from minivllm.plan import Join
from minivllm.sampling.pick import Draws
from minivllm.sampling.rejection import Rejection
from minivllm.sampling.verify import PickFor
from minivllm.sampling.verify import match as pick_by_match
from minivllm.spec_decode.base import NoProposer, OwnLayers, Proposer, Recipe, Target
from minivllm.spec_decode.draft_model import DraftModelProposer, first_layers
from minivllm.spec_decode.eagle import EagleProposer, load_eagle, random_eagle
from minivllm.spec_decode.lookup import Lookup, LookupProposer
from minivllm.spec_decode.medusa import MedusaProposer, load_heads, random_heads
from minivllm.spec_decode.ngram import NGram
from minivllm.spec_decode.suffix import EarlierBySalt, SuffixLookup

MakeProposer = Callable[[EngineConfig, LoadedModel, torch.dtype, torch.device], Recipe]
MakeAcceptance = Callable[[Proposer, Draws], PickFor]


def none(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    return Recipe(lambda target: NoProposer())


def ngram(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    low, high = config.spec_decode.ngram_min, config.spec_decode.ngram_max
    return _lookup(config, lambda join: NGram(join.token_ids, low, high))


def suffix(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    earlier = EarlierBySalt(config.spec_decode.suffix_tokens)
    return _lookup(
        config, lambda join: SuffixLookup(join.token_ids, join.num_prompt_tokens, earlier.of(join.cache_salt))
    )


def _lookup(config: EngineConfig, make: Callable[[Join], Lookup]) -> Recipe:
    return Recipe(lambda target: LookupProposer(make, config.spec_decode.k, target.throttle))


def draft(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    path = config.spec_decode.model
    if path is None:
        raise ConfigError("spec_decode.method=draft needs spec_decode.model: a smaller model with the same vocabulary")
    drafter = load_model(path, dtype, device, seed=config.model.seed, dtype_asked=config.model.dtype != "auto")
    if drafter.spec.vocab_size != loaded.spec.vocab_size:
        raise ConfigError(
            f"spec_decode.model={path} has {drafter.spec.vocab_size} tokens, the model {loaded.spec.vocab_size}: "
            "a draft model must have the same vocabulary"
        )
    own = _own_layers(drafter.model.attention_layers, config.kv.block_size, dtype)

    def make(target: Target) -> Proposer:
        if drafter.spec.max_position < target.max_model_len:
            raise ConfigError(
                f"spec_decode.model={path} was made for {drafter.spec.max_position} tokens, fewer than "
                f"model.max_model_len={target.max_model_len}"
            )
        attention, caches = _cache_for(target, own, device)
        return DraftModelProposer(target, drafter.model, attention, caches, own_kv=True)

    return Recipe(make, own)


def self_draft(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    num_layers = config.spec_decode.layers
    if num_layers >= loaded.spec.num_layers:
        raise ConfigError(f"spec_decode.layers={num_layers}: must be fewer than the model's {loaded.spec.num_layers}")
    if loaded.spec.num_source:
        raise ConfigError(
            "spec_decode.method=self_draft runs a model's first layers by themselves, and this model's read an "
            "encoder's output as well. Use spec_decode.method=ngram, or none"
        )

    def make(target: Target) -> Proposer:
        early = first_layers(target.model, num_layers)
        caches = target.kv_caches[:num_layers]
        return DraftModelProposer(target, early, target.attention, caches, own_kv=False, adapters=target.adapters)

    return Recipe(make)


def medusa(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    path, spec = config.spec_decode.model, loaded.spec
    if path is None:
        raise ConfigError("spec_decode.method=medusa needs spec_decode.model: a folder with heads in safetensors")
    sizes = (spec.hidden_size, spec.vocab_size, dtype, device)
    if path.startswith("dummy:"):
        heads = random_heads(config.spec_decode.k, *sizes, config.model.seed)
    else:
        heads = load_heads(Path(path).expanduser(), *sizes)
    return Recipe(lambda target: MedusaProposer(target, heads))


def eagle(config: EngineConfig, loaded: LoadedModel, dtype: torch.dtype, device: torch.device) -> Recipe:
    path = config.spec_decode.model
    if path is None:
        raise ConfigError("spec_decode.method=eagle needs spec_decode.model: a folder with an EAGLE head")
    if path.startswith("dummy:"):
        head = random_eagle(loaded.spec, dtype, device, config.model.seed)
    else:
        head = load_eagle(Path(path).expanduser(), loaded.spec, loaded.model.embed, dtype, device)
    own = _own_layers(head.attention_layers, config.kv.block_size, dtype)

    def make(target: Target) -> Proposer:
        attention, caches = _cache_for(target, own, device)
        return EagleProposer(target, head, attention, caches)

    return Recipe(make, own)


def _own_layers(layers: list[AttentionSpec], block_size: int, dtype: torch.dtype) -> OwnLayers:
    return OwnLayers(layers, kv_spec(layers, block_size, dtype))


def _cache_for(target: Target, own: OwnLayers, device: torch.device) -> tuple[AttentionBackend, list[Tensor]]:
    """The kind of backend of the target's group 0, and a KV tensor for each layer."""
    num_blocks = target.num_blocks + 1  # the spare one
    attention = type(backends_of(target.attention)[0])(*own, num_blocks, device)
    return attention, [target.make_cache(attention.kv_shape(num_blocks), own.spec.dtype) for _ in own.layers]


def match(proposer: Proposer, draws: Draws) -> PickFor:
    return pick_by_match


def rejection(proposer: Proposer, draws: Draws) -> PickFor:
    return Rejection(proposer.draft_probs, draws)
