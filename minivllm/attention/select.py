"""Which backend computes attention, and why. `auto` takes the first of the device's preferences that can run here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minivllm.attention.base import AttentionBackend, AttentionSpec
from minivllm.errors import ConfigError
from minivllm.registry import Registry

# Best first, each with what speaks for it. What is not listed runs only when it is named.
PREFERENCES: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (("sdpa", "batched matrix products over gathered blocks"), ("reference", "the slow oracle")),
    "cuda": (("sdpa", "batched matrix products over gathered blocks"), ("reference", "the slow oracle")),
}


class Choice(NamedTuple):
    name: str
    reason: str


def choose(
    name: str, device: torch.device, layers: list[AttentionSpec], registry: Registry[AttentionBackend]
) -> tuple[type[AttentionBackend], Choice]:
    """The backend called `name`, or the best one for "auto". Raises ConfigError if it cannot run on `device`."""
    if name != "auto":
        backend, obstacle = _look(name, device, registry)
        if backend is None:
            raise ConfigError(f"runner.attention={name} cannot run here: {obstacle}. Use runner.attention=auto.")
        return backend, Choice(name, "asked for")
    passed_over = []
    for candidate, merit in PREFERENCES.get(device.type, ()):
        if candidate not in registry.names():
            continue
        backend, obstacle = _look(candidate, device, registry)
        if backend is not None:
            return backend, Choice(candidate, _reason(merit, layers, passed_over, _slower(candidate, device, registry)))
        passed_over.append(f"{candidate} off: {obstacle}")
    why = "; ".join(passed_over) or f"none is made for {device.type}"
    raise ConfigError(f"no attention backend can run on {device}: {why}. Choose another model.device.")


def _look(name: str, device: torch.device, registry: Registry) -> tuple[type[AttentionBackend] | None, str | None]:
    """The backend, or None and what stands in its way."""
    try:
        backend = registry.get(name)
    except ImportError as e:
        return None, f"{e} (install what is missing)"
    obstacle = backend.unavailable(device)
    return (None, obstacle) if obstacle else (backend, None)


def _slower(chosen: str, device: torch.device, registry: Registry) -> list[str]:
    names = [name for name, _ in PREFERENCES[device.type] if name in registry.names()]
    return names[names.index(chosen) + 1 :]


def _reason(merit: str, layers: list[AttentionSpec], passed_over: list[str], slower: list[str]) -> str:
    parts = [merit]
    if any(layer.soft_cap is not None for layer in layers):
        parts.append("soft-capped scores in plain torch, without a fused kernel")
    if slower:
        parts.append(f"preferred to {', '.join(slower)}")
    return "; ".join(parts + passed_over)
