"""The KV manager of a configuration: the entries of `kv.allocation`, and what each is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minivllm import features
from minivllm.config import Decisions, EngineConfig, budget_of
from minivllm.errors import ConfigError
from minivllm.kv.base import KVManager, PrefixIndex
from minivllm.kv.contiguous import ContiguousKVManager, Reservation, reserve_max, reserve_oracle, reserve_pow2
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_groups import GroupPrefix
from minivllm.kv.store import BlockStore, StoredKV
from minivllm.kv_groups import ONE_GROUP, STATE, KVGroups, LayerKind, group_layers, one_group


@dataclass(frozen=True, slots=True)
class KVSizes:
    """What the entries of features.ALLOCATIONS are called with, beside the configuration."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    costs: Mapping[str, float] | None = None
    groups: KVGroups = ONE_GROUP


def build_kv(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    num_host_blocks: int = 0,
    costs: Mapping[str, float] | None = None,
    groups: KVGroups = ONE_GROUP,
) -> KVManager:
    """costs: seconds_per_token and seconds_per_block, as measured; what kv.preemption=auto weighs."""
    sizes = KVSizes(num_blocks, max_model_len, num_host_blocks, costs, groups)
    return features.ALLOCATIONS.get(config.kv.allocation)(config, sizes)


def choose_groups(
    config: EngineConfig, kinds: Sequence[LayerKind], shares_blocks: bool, decisions: Decisions
) -> KVGroups:
    """By their kinds, where a request's blocks may come and go one by one. shares_blocks: another model keeps all of
    its K and V under the block ids of group 0."""
    if STATE in kinds and config.spec_decode.method != "none":
        raise ConfigError(
            f"spec_decode.method={config.spec_decode.method} takes back tokens that were guessed wrong, and a "
            "recurrent state, which this model's layers keep, cannot go back. Use spec_decode.method=none"
        )
    why = None
    if config.kv.allocation != "paged":
        why = f"kv.allocation={config.kv.allocation} gives a request one run"
    elif shares_blocks and all(kind.window is not None for kind in kinds):
        why = "a draft model keeps its K and V under the same block ids"
    if why is None or all(kind.window is None for kind in kinds):
        return group_layers(kinds)
    if STATE in kinds:
        raise ConfigError(f"this model's layers keep recurrent states, in blocks of groups of their own, and {why}")
    decisions.note("kv.allocation", config.kv.allocation, f"layers with windows keep all tokens: {why}")
    return one_group(kinds)


def build_handing_over(kind: type[PagedKVManager], config: EngineConfig, *sizes: Any) -> KVManager:
    """As build_kv, of an engine that gives or takes requests with their K and V. kind: one of kv/handover.py."""
    if config.kv.allocation != "paged":
        raise ConfigError(
            f"kv.allocation={config.kv.allocation} cannot hand requests over: room for what comes is taken block by "
            "block, which kv.allocation=paged does"
        )
    return build_paged(config, KVSizes(*sizes), kind)


def build_stored(store: BlockStore, kind: type[StoredKV], config: EngineConfig, *sizes: Any) -> KVManager:
    """As build_kv, with a store beyond the device. Raises ConfigError for what has no keys that a store could use."""
    needed = {"kv.allocation": "paged", "kv.prefix": "hash", "kv.preemption": "recompute"}
    for field, value in needed.items():
        if config.get(field) != value:
            raise ConfigError(f"{field}={config.get(field)}: K and V in host memory need {field}={value}")
    own = replace(KVSizes(*sizes), num_host_blocks=0)  # which are of preemption=swap
    if own.groups.windows != (None,):
        raise ConfigError("K and V of layers with sliding windows are not kept in host memory")
    return build_paged(config, own, partial(kind, store=store))


def build_paged(
    config: EngineConfig, sizes: KVSizes, kind: Callable[..., PagedKVManager] = PagedKVManager
) -> PagedKVManager:
    policy = features.PREEMPTIONS.get(config.kv.preemption)(**(sizes.costs or {}))
    places = sizes.num_blocks, config.kv.block_size, _make_index(config, sizes), sizes.num_host_blocks
    most_new_tokens = budget_of(config, sizes.max_model_len)
    return kind(*places, policy, config.kv.fork == "share", sizes.groups, most_new_tokens)


def _make_index(config: EngineConfig, sizes: KVSizes) -> PrefixIndex:
    make, key_hash = features.PREFIX_INDEXES.get(config.kv.prefix), features.KEY_HASHES.get(config.kv.hash)
    windows = sizes.groups.windows
    indexes = [make(key_hash=key_hash, seed=config.kv.hash_seed) for _ in windows]
    if windows == (None,):
        return indexes[0]
    return GroupPrefix(indexes, windows, config.kv.block_size, absent=sizes.num_blocks)


def _contiguous(config: EngineConfig, sizes: KVSizes, reservation: Reservation) -> ContiguousKVManager:
    kv = ContiguousKVManager(sizes.num_blocks, config.kv.block_size, reservation, sizes.max_model_len)
    kv.max_model_len = min(sizes.max_model_len, kv.capacity + 1)
    return kv


def build_max(config: EngineConfig, sizes: KVSizes) -> ContiguousKVManager:
    return _contiguous(config, sizes, reserve_max)


def build_pow2(config: EngineConfig, sizes: KVSizes) -> ContiguousKVManager:
    return _contiguous(config, sizes, reserve_pow2)


def build_oracle(config: EngineConfig, sizes: KVSizes) -> ContiguousKVManager:
    return _contiguous(config, sizes, reserve_oracle)
