"""AdapterTable: which adapters are loaded, under which name, and who uses them. The control plane's half of LoRA.

    load(name, path) -> in the table, in the workers' host memory -> unload(name): the name is gone at once,
    acquire(name) at a request's arrival, release(key) at its end    the weights with the last request that uses them

A loaded adapter has a key, `name#generation`, and no key is ever used twice. Requests carry it instead of the name, and
it enters the prefix cache's keys: an adapter that is loaded again under its old name never meets the KV of the old one.

Host memory holds `max_adapters`. For one more, that which was used least recently and that no live request has goes
(vLLM's LRUCacheLoRAModelManager). It keeps its name, and its next request loads it from its path again; one that came
with a request (LoRARequest) loses the name too, since its next request brings the path.

Not safe for threads: all calls but reading `loaded` (a mapping that is never changed, only replaced) belong to the
thread that steps the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from minivllm.errors import AdapterError, BadRequest, UnknownAdapter
from minivllm.lora.request import LoRARequest
from minivllm.registry import did_you_mean

MAX_NAME = 256
MAX_NAMES = 1024  # in memory or not


@dataclass(slots=True)
class Adapter:
    name: str
    key: str
    path: str
    rank: int  # the largest of its matrices
    int_id: int | None = None  # of the LoRARequest that it came with; None: loaded by a call of its own
    num_users: int = 0  # live requests
    last_use: int = 0  # counts loads and acquire() calls


class AdapterTable:
    def __init__(self, call: Callable[..., list[Any]], max_adapters: int):
        """call: of the executor. The workers' load_adapter(key, path) -> rank, and drop_adapter(key)."""
        self.loaded: Mapping[str, Adapter] = {}  # by name, oldest first; also those that gave their place away
        self._by_key: dict[str, Adapter] = {}  # in memory; also those without a name that a request still uses
        self._call = call
        self._max_adapters = max_adapters
        self._generations = count(1)
        self._num_uses = 0

    def load(self, name: str, path: str) -> Adapter:
        """Raises AdapterError for a name that is taken, a full table, or files that cannot be served."""
        return self._load(name, path, None)

    def unload(self, name: str) -> None:
        """No new request may name it; those that live keep it. Raises UnknownAdapter."""
        adapter = find(self.loaded, name)
        self.loaded = {other: kept for other, kept in self.loaded.items() if other != name}
        self._drop_if_unused(adapter)

    def ensure(self, asked: LoRARequest) -> str:
        """The name of a request's adapter, loaded if it is not. Raises AdapterError."""
        known = self.loaded.get(asked.lora_name)
        if known is None:
            return self._load(asked.lora_name, asked.lora_path, asked.lora_int_id).name
        if known.path != asked.lora_path or known.int_id not in (None, asked.lora_int_id):
            raise AdapterError(
                f'LoRA adapter "{known.name}" is loaded from {known.path} with id {known.int_id}, the request says '
                f"{asked.lora_path} with id {asked.lora_int_id}. Unload it first, or take another name",
                "lora_request",
            )
        return known.name

    def acquire(self, name: str) -> str:
        """The key of a new request's adapter, "" for none. Raises UnknownAdapter; AdapterError if it must be loaded
        again and cannot."""
        if not name:
            return ""
        adapter = find(self.loaded, name)
        if adapter.key not in self._by_key:
            self._bring(adapter)
        adapter.num_users += 1
        self._touch(adapter)
        return adapter.key

    def release(self, key: str) -> None:
        """A request has ended."""
        if key:
            adapter = self._by_key[key]
            adapter.num_users -= 1
            self._drop_if_unused(adapter)

    def _load(self, name: str, path: str, int_id: int | None) -> Adapter:
        if not name or len(name) > MAX_NAME:
            raise AdapterError(f"an adapter's name has 1 to {MAX_NAME} characters", "lora_name")
        if name in self.loaded:
            raise AdapterError(f'LoRA adapter "{name}" is loaded already: unload it first', "lora_name")
        owner = next((a.name for a in self.loaded.values() if int_id is not None and a.int_id == int_id), None)
        if owner is not None:
            raise AdapterError(f'lora_int_id {int_id} belongs to LoRA adapter "{owner}"', "lora_int_id")
        if len(self.loaded) >= MAX_NAMES:
            raise AdapterError(f"{MAX_NAMES} LoRA adapters have names, which is the most: unload one", "lora_name")
        adapter = Adapter(name, "", path, 0, int_id)
        self._bring(adapter)
        self.loaded = {**self.loaded, name: adapter}
        return adapter

    def _bring(self, adapter: Adapter) -> None:
        """Into memory, under a new key."""
        victims = self._victims()
        key = f"{adapter.name}#{next(self._generations)}"
        adapter.rank = self._call("load_adapter", key, adapter.path)[0]
        for victim in victims:  # only now: files that cannot be loaded cost nobody a place
            self._evict(victim)
        adapter.key = key
        self._by_key[key] = adapter
        self._touch(adapter)

    def _touch(self, adapter: Adapter) -> None:
        self._num_uses += 1
        adapter.last_use = self._num_uses

    def _evict(self, adapter: Adapter) -> None:
        if adapter.int_id is not None:
            return self.unload(adapter.name)
        del self._by_key[adapter.key]
        self._call("drop_adapter", adapter.key)

    def _victims(self) -> list[Adapter]:
        """Who goes for one adapter more."""
        if len(self._by_key) < self._max_adapters:
            return []
        idle = [adapter for adapter in self._by_key.values() if not adapter.num_users]
        if not idle:
            raise AdapterError(
                f"live requests use {len(self._by_key)} LoRA adapters, and lora.max_cpu_loras admits no more"
            )
        return [min(idle, key=lambda a: a.last_use)]

    def _drop_if_unused(self, adapter: Adapter) -> None:
        wanted = adapter.num_users or self.loaded.get(adapter.name) is adapter
        if not wanted and self._by_key.pop(adapter.key, None) is not None:
            self._call("drop_adapter", adapter.key)

    def check(self) -> None:
        for adapter in self._by_key.values():
            assert adapter.num_users > 0 or self.loaded.get(adapter.name) is adapter, f"{adapter.key} has no use"
        assert all(self._by_key.get(a.key) is a for a in self.loaded.values() if a.num_users)
        assert len(self._by_key) <= self._max_adapters


def find(loaded: Mapping[str, Adapter], name: str) -> Adapter:
    """Raises UnknownAdapter."""
    if name not in loaded:
        known = ", ".join(loaded) or "none"
        raise UnknownAdapter(
            f'no LoRA adapter "{name}" is loaded.{did_you_mean(name, list(loaded))} Loaded: {known}', "model"
        )
    return loaded[name]


class NoAdapters:
    """The table of an engine without LoRA: every call but reading it is refused, with how to turn LoRA on."""

    loaded: Mapping[str, Adapter] = {}

    def load(self, name: str, path: str) -> Adapter:
        raise lora_is_off()

    def unload(self, name: str) -> None:
        raise lora_is_off()

    def ensure(self, asked: LoRARequest) -> str:
        raise lora_is_off()


def lora_is_off() -> BadRequest:
    return BadRequest("LoRA is off: turn it on with lora.enabled=true (enable_lora, --enable-lora)", "lora_request")
