"""Which backend computes attention, and why. `auto` takes the first of the device's preferences that can run here; of
those that must prove themselves, the first whose answer on the device was the reference's. Layers that keep a latent
vector have a registry of their own, with the same names as far as there are backends for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from minivllm.attention.base import AttentionBackend, AttentionSpec, CrossBackend, StateBackend
from minivllm.errors import ConfigError
from minivllm.kv_groups import LayerKind
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

B = TypeVar("B", StateBackend, CrossBackend)
Proves = Callable[[type[AttentionBackend]], tuple[bool, str]]  # and why, or why not


def nobody_proves(backend: type[AttentionBackend]) -> tuple[bool, str]:
    return False, "nothing has proven it on this device"


KEEPS_HEADS = "it keeps K and V of each head, and this model's layers keep one vector a token (MLA)"


class Choice(NamedTuple):
    name: str
    reason: str


def is_latent(layers: Sequence[AttentionSpec]) -> bool:
    return any(layer.latent is not None for layer in layers)


def backend_beside(
    name: str, kind: LayerKind, layers: Sequence[AttentionSpec], registry: Registry[B]
) -> type[B] | None:
    """Of the layers of a kind that has a registry of its own, STATE or CROSS, if there are such. name: of the
    attention layers' backend."""
    if all(layer.kind != kind for layer in layers):
        return None
    return registry.get(name if name in registry.names() else "sdpa")


def check_alike(layers: Sequence[AttentionSpec], beside: Sequence[AttentionSpec]) -> None:
    """Raises ConfigError unless one backend can serve them all. beside: a draft model's."""
    if beside and is_latent(beside) != is_latent(layers):
        raise ConfigError(
            "the model and its draft model cannot share a KV cache: one keeps K and V of each head, the other one "
            "vector a token (MLA). Use spec_decode.method=ngram, or none"
        )


def choose(
    name: str,
    device: torch.device,
    layers: list[AttentionSpec],
    registry: Registry[AttentionBackend],
    kv_dtype: torch.dtype | None = None,
    proves: Proves = nobody_proves,
) -> tuple[type[AttentionBackend], Choice]:
    """The backend called `name`, or the best one for "auto". Raises ConfigError if it cannot run on `device`.

    kv_dtype: of the cache; None: the model's, which suits every backend. proves: asked for "auto" alone, of a
    candidate that must prove itself, when nothing better can run.
    """
    if name != "auto":
        backend, unsupported = _look(name, device, layers, registry, kv_dtype)
        if backend is None:
            raise ConfigError(f"runner.attention={name} cannot run here: {unsupported}. Use runner.attention=auto.")
        _check_slopes(name, backend, layers)
        return backend, Choice(name, _asked(*registry.parts(name)))
    passed_over = []
    for candidate, merit in PREFERENCES.get(device.type, ()):
        if candidate not in registry.names() and not is_latent(layers):
            continue
        backend, unsupported = _look(candidate, device, layers, registry, kv_dtype)
        if backend is not None and candidate in PROVEN:
            holds, why = proves(backend)
            backend, unsupported, merit = (backend, None, f"{merit}; {why}") if holds else (None, why, merit)
        if backend is not None:
            if candidate == "sdpa" and any(layer.soft_cap is not None for layer in layers):
                merit = f"{merit}; soft-capped scores in plain torch, without a fused kernel"
            return backend, Choice(candidate, _reason(merit, passed_over, candidate, device, registry))
        passed_over.append(f"{candidate} off: {unsupported}")
    why = "; ".join(passed_over) or f"none is made for {device.type}"
    way_out = "kv.dtype=auto" if kv_dtype is not None else "another model.device"
    raise ConfigError(f"no attention backend can run on {device}: {why}. Choose {way_out}.")


def _check_slopes(name: str, backend: type[AttentionBackend], layers: list[AttentionSpec]) -> None:
    """Those of PREFERENCES all know them."""
    if any(layer.slopes is not None for layer in layers) and not getattr(backend, "adds_slopes", False):
        raise ConfigError(
            f"runner.attention={name} cannot run this model: it adds nothing to scores by the distance of a key "
            "(ALiBi). Use runner.attention=auto."
        )


def _look(
    name: str,
    device: torch.device,
    layers: list[AttentionSpec],
    registry: Registry,
    kv_dtype: torch.dtype | None,
) -> tuple[type[AttentionBackend] | None, str | None]:
    """The backend, or None and what stands in its way."""
    if is_latent(layers) and name not in registry.names():
        return None, KEEPS_HEADS
    try:
        backend = registry.get(name)
    except ImportError as e:
        return None, f"{e} (install what is missing)"
    if kv_dtype is not None and kv_dtype not in backend.kv_dtypes:
        return None, f"it cannot keep K and V in {str(kv_dtype).removeprefix('torch.')}"
    unsupported = backend.unavailable(device)
    return (None, unsupported) if unsupported else (backend, None)


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
