"""Which backend computes attention, and why. `auto` takes the first of the device's preferences that can run here; of
those that must prove themselves, the first whose answer on the device was the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from minivllm.attention.base import AttentionBackend, AttentionSpec
from minivllm.attention.codes import CODES
from minivllm.errors import ConfigError
from minivllm.registry import Registry

# Best first, each with what speaks for it. What is not listed runs only when it is named, as do pairs.
PREFERENCES: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (
        ("cpu", "C++ kernels that read the blocks where they lie"),
        ("sdpa", "batched matrix products over gathered blocks"),
        ("reference", "the slow oracle"),
    ),
    "cuda": (
        ("triton", "kernels that read the blocks where they lie"),
        ("sdpa", "batched matrix products over gathered blocks"),
        ("reference", "the slow oracle"),
    ),
}
PROVEN = frozenset({"triton"})  # out of a compiler that makes other code for each card: nobody's default unseen
# Backends that no card has run (`bench/gpu/run.py --part correctness`), and that nothing proves at start.
BY_NAME: dict[str, tuple[str, ...]] = {"cuda": ("flash", "flashinfer", "flex")}

Proves = Callable[[type[AttentionBackend]], tuple[bool, str]]  # and why, or why not


def nobody_proves(backend: type[AttentionBackend]) -> tuple[bool, str]:
    return False, "nothing has proven it on this device"


class Choice(NamedTuple):
    name: str
    reason: str


def choose(
    name: str,
    device: torch.device,
    layers: list[AttentionSpec],
    registry: Registry[AttentionBackend],
    kv_dtype: torch.dtype | None = None,
    proves: Proves = nobody_proves,
) -> tuple[type[AttentionBackend], Choice]:
    """The backend called `name`, or the best one for "auto". Raises ConfigError if it cannot run on `device`.

    kv_dtype: of the cache; None or any floating-point dtype suits every backend. proves: asked for "auto" alone, of a
    candidate that must prove itself, when nothing better can run.
    """
    if name != "auto":
        backend, obstacle = _look(name, device, registry, kv_dtype)
        if backend is None:
            raise ConfigError(f"runner.attention={name} cannot run here: {obstacle}. Use runner.attention=auto.")
        return backend, Choice(name, _asked(*registry.parts(name)))
    passed_over = []
    for candidate, merit in PREFERENCES.get(device.type, ()):
        if candidate not in registry.names():
            continue
        backend, obstacle = _look(candidate, device, registry, kv_dtype)
        if backend is not None and candidate in PROVEN:
            holds, why = proves(backend)
            backend, obstacle, merit = (backend, None, f"{merit}; {why}") if holds else (None, why, merit)
        if backend is not None:
            if candidate == "sdpa" and any(layer.soft_cap is not None for layer in layers):
                merit = f"{merit}; soft-capped scores in plain torch, without a fused kernel"
            return backend, Choice(candidate, _reason(merit, passed_over, candidate, device, registry))
        passed_over.append(f"{candidate} off: {obstacle}")
    why = "; ".join(passed_over) or f"none is made for {device.type}"
    way_out = "kv.dtype=auto" if kv_dtype in CODES else "another model.device"
    raise ConfigError(f"no attention backend can run on {device}: {why}. Choose {way_out}.")


def _look(
    name: str, device: torch.device, registry: Registry, kv_dtype: torch.dtype | None
) -> tuple[type[AttentionBackend] | None, str | None]:
    """The backend, or None and what stands in its way."""
    try:
        backend = registry.get(name)
    except ImportError as e:
        return None, f"{e} (install what is missing)"
    if kv_dtype in CODES - backend.kv_codes:
        return None, f"it cannot read a KV cache in {str(kv_dtype).removeprefix('torch.')}"
    obstacle = backend.unavailable(device)
    return (None, obstacle) if obstacle else (backend, None)


def _asked(first: str, second: str | None = None) -> str:
    return "asked for" + (f": {first} for requests with one query, {second} for all others" if second else "")


def _reason(merit: str, passed_over: list[str], chosen: str, device: torch.device, registry: Registry) -> str:
    names = [name for name, _ in PREFERENCES[device.type] if name in registry.names()]
    slower = names[names.index(chosen) + 1 :]
    untried = [name for name in BY_NAME.get(device.type, ()) if name in registry.names()]
    parts = [merit]
    if slower:
        parts.append(f"preferred to {', '.join(slower)}")
    if untried:
        parts.append(f"{', '.join(untried)} only by name: no card has run them yet")
    return "; ".join(parts + passed_over)
