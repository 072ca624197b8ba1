"""AdapterTable: which adapters are loaded, under which name, and who uses them. The control plane's half of LoRA.

    load(name, path) -> in the table, in the workers' host memory -> unload(name): the name is gone at once,
    acquire(name) at a request's arrival, release(key) at its end    the weights with the last request that uses them

A loaded adapter has a key, `name#generation`, and no key is ever used twice. Requests carry it instead of the name, and
it enters the prefix cache's keys: an adapter that is loaded again under its old name never meets the KV of the old one.

Host memory holds `max_adapters`. One more is refused, except that an adapter which came with a request (LoRARequest)
goes for a new one when nobody uses it, the least recently used first: its next request brings its path again.

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


@dataclass(slots=True)
class Adapter:
    name: str
    key: str
    path: str
    rank: int  # the largest of its matrices
    int_id: int | None = None  # of the LoRARequest that it came with; None: loaded by a call of its own
    num_users: int = 0  # live requests
    last_use: int = 0  # counts acquire() calls


class AdapterTable:
    def __init__(self, call: Callable[..., list[Any]], max_adapters: int):
        """call: of the executor. The workers' load_adapter(key, path) -> rank, and drop_adapter(key)."""
        self.loaded: Mapping[str, Adapter] = {}  # by name, oldest first
        self._by_key: dict[str, Adapter] = {}  # also those without a name that a request still uses
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
        """The key of a new request's adapter, "" for none. Raises UnknownAdapter."""
        if not name:
            return ""
        adapter = find(self.loaded, name)
        adapter.num_users += 1
        self._num_uses += 1
        adapter.last_use = self._num_uses
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
        victims = self._victims()
        key = f"{name}#{next(self._generations)}"
        adapter = Adapter(name, key, path, self._call("load_adapter", key, path)[0], int_id)
        for victim in victims:  # only now: files that cannot be loaded cost nobody a place
            self.unload(victim.name)
        self._by_key[key] = adapter
        self.loaded = {**self.loaded, name: adapter}
        return adapter

    def _victims(self) -> list[Adapter]:
        """Who goes for one adapter more."""
        if len(self._by_key) < self._max_adapters:
            return []
        idle = [a for a in self.loaded.values() if a.int_id is not None and not a.num_users]
        if not idle:
            raise AdapterError(
                f"{len(self._by_key)} LoRA adapters are in memory, and lora.max_cpu_loras admits no more: unload one"
            )
        return [min(idle, key=lambda a: a.last_use)]

    def _drop_if_unused(self, adapter: Adapter) -> None:
        if not adapter.num_users and self.loaded.get(adapter.name) is not adapter:
            del self._by_key[adapter.key]
            self._call("drop_adapter", adapter.key)

    def check(self) -> None:
        for adapter in self._by_key.values():
            assert adapter.num_users > 0 or self.loaded.get(adapter.name) is adapter, f"{adapter.key} has no use"
        assert all(self._by_key.get(a.key) is a for a in self.loaded.values())
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
