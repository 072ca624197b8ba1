"""How large the KV pool gets. Every choice comes with its reason."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from minivllm import machine
from minivllm.config import Decision, EngineConfig, budget_of
from minivllm.errors import ConfigError
from minivllm.kv_groups import KVGroups

if TYPE_CHECKING:  # torch is imported where it is needed: a simulated worker sizes its pool without it
    import torch
    from torch import Tensor

# A pool on the CPU shares memory with everything else on a laptop, and a prefix cache fills whatever it is given.
CPU_POOL_CAP = 4 << 30
FRACTIONS = {"cpu": 0.5, "cuda": 0.9}  # of what is free: a GPU has nobody else's work (vLLM: gpu_memory_utilization)

PAGE = 4096  # bytes, of memory

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True)
class Sizes:
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


class Slots(NamedTuple):
    """Places for what an encoder makes of a request's item, and the bytes of all of them."""

    count: int
    num_bytes: int


class KVSpec(Protocol):
    """What a block of KV costs: attention.base.KVSpec, or a simulated model's."""

    @property
    def bytes_per_block(self) -> int: ...


class Place(Protocol):
    """Whose memory it is: a torch.device, or a simulated one."""

    @property
    def type(self) -> str: ...


def parse_size(text: str) -> int:
    """Bytes: "2GiB", "1.5 GB", "4096". Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] == "I":
        raise ConfigError(f'kv.memory: "{text}" is no size; write bytes or a unit, such as 2GiB or 500MB')
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def free_memory(device: Place) -> int:
    """Bytes that may be allocated now. On the CPU the control group's limit counts too (containers)."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return min(_machine_free(), _cgroup_free())


def _machine_free() -> int:
    """What Linux says can be had without swapping; elsewhere what psutil finds, which is slow to import."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        import psutil

        return psutil.virtual_memory().available


def _cgroup_free() -> float:
    root = machine.CGROUP
    try:
        limit, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text()
        return float("inf") if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return float("inf")  # no control groups of version 2 here


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, prefault: bool = False) -> Tensor:
    """A KV tensor. Zeros, not empty memory: a masked score of garbage may be NaN, and NaN survives a mask.

    torch.zeros writes every page at once; on the CPU pages come from calloc instead, so that the pool costs start-up
    time and memory only as far as it is used. The first use of a page then waits for it, which takes long in a virtual
    machine whose host has to find it first; prefault: at once after all.

    It begins with a page. Where calloc would begin, 16 bytes into one, each vector of K and V lies in two lines of the
    cache, and decodes take a tenth longer (bench/LOG.md). Its pages are huge where Linux has such: numpy asks for them.
    """
    import torch

    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pages = np.zeros(size + PAGE, np.uint8)
    begin = -pages.ctypes.data % PAGE
    pool = torch.from_numpy(pages[begin : begin + size]).view(dtype).view(shape)
    return pool.zero_() if prefault else pool


def host_cache(cache: Tensor, block_axis: int, num_blocks: int) -> Tensor:
    """Room on the host for so many blocks of a device's KV tensor; a GPU's can be read and written by kernels there."""
    import torch

    shape = list(cache.shape)
    shape[block_axis] = num_blocks
    if cache.device.type == "cuda" and num_blocks:
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=True)
    return zeros(tuple(shape), cache.dtype, torch.device("cpu"))


def size_memory(
    config: EngineConfig,
    spec: KVSpec,
    groups: KVGroups,
    device: Place,
    model_limit: int,
    forwards: int,
    free: int | None = None,
) -> tuple[Sizes, list[Decision]]:
    """The pools and the longest request that they allow. forwards: bytes that they and their captures take. free: bytes
    that this engine may allocate; None: what the device says, shared by engine.replicas."""
    kv, longest = config.kv, config.model.max_model_len or model_limit
    most_new = budget_of(config, longest)
    most_of_one = groups.most_blocks(longest, kv.block_size, most_new)
    num_blocks, pool = size_pool(config, spec, device, longest, forwards, most_of_one, free)
    if len(groups.groups) > 1 or groups.windows[0] is not None:
        pool = pool._replace(reason=f"{pool.reason}; {groups}")
    capacity = groups.capacity(num_blocks, kv.block_size, most_new)
    max_model_len, length = choose_max_model_len(config, model_limit, capacity)
    # Nothing is swapped where preemption always recomputes.
    num_host_blocks = 0 if kv.preemption == "recompute" else parse_size(kv.swap_memory) // spec.bytes_per_block
    return Sizes(num_blocks, num_host_blocks, max_model_len), [pool, length]


def size_pool(
    config: EngineConfig,
    spec: KVSpec,
    device: Place,
    max_model_len: int,
    forwards: int = 0,
    most_of_one: int | None = None,
    free: int | None = None,
) -> tuple[int, Decision]:
    """Blocks of the pool. max_model_len: the most that one request can use, in tokens; most_of_one: in blocks, if that
    does not follow. forwards, free: as above."""
    kv = config.kv
    per_block = spec.bytes_per_block
    useful = config.scheduler.max_num_seqs * (most_of_one or -(-max_model_len // kv.block_size))
    if kv.num_blocks is not None:
        return kv.num_blocks, _decision(kv.num_blocks, per_block, "as configured (kv.num_blocks)")
    if kv.memory is not None:
        num_blocks, reason = parse_size(kv.memory) // per_block, f"as configured (kv.memory={kv.memory})"
    else:
        free = free_memory(device) // config.engine.replicas if free is None else free
        fraction = FRACTIONS[device.type] if kv.memory_fraction is None else kv.memory_fraction
        size, reason = fraction * free, f"{fraction:.0%} of {format_size(free)} free"
        if forwards > free - size:
            size, reason = max(0, free - forwards), f"{format_size(free)} free, forwards take {format_size(forwards)}"
        if device.type == "cpu" and size > CPU_POOL_CAP:
            size, reason = CPU_POOL_CAP, "the most taken on a CPU unless kv.memory is set"
        num_blocks = int(size) // per_block
    if num_blocks > useful:
        num_blocks, reason = useful, f"all that {config.scheduler.max_num_seqs} requests of {max_model_len} tokens use"
    if num_blocks < 1:
        raise ConfigError(
            f"no room for the KV cache: a block of {kv.block_size} tokens takes {format_size(per_block)} ({reason}). "
            "Set kv.memory, or free memory"
        )
    return num_blocks, _decision(num_blocks, per_block, reason)


def size_slots(
    config: EngineConfig,
    spec: KVSpec,
    groups: KVGroups,
    device: Place,
    max_model_len: int,
    forwards: int,
    slot_bytes: int,
    free: int | None = None,
) -> Slots:
    """Of a model with an encoder: one for each request, or as many as there is memory for beside the blocks of as many
    requests of max_model_len tokens; beside a configured pool, in the same share of the rest. Others as above."""
    kv = config.kv
    free = free_memory(device) // config.engine.replicas if free is None else free
    fraction = FRACTIONS[device.type] if kv.memory_fraction is None else kv.memory_fraction
    rows, most_new = config.scheduler.max_num_seqs, budget_of(config, max_model_len)
    of_request = spec.bytes_per_block * groups.most_blocks(max_model_len, kv.block_size, most_new)
    if kv.num_blocks is not None:
        room, each = fraction * (free - forwards - kv.num_blocks * spec.bytes_per_block), slot_bytes
    elif kv.memory is not None:
        room, each = fraction * (free - forwards - min(parse_size(kv.memory), rows * of_request)), slot_bytes
    else:
        room, each = min(fraction * free, free - forwards), slot_bytes + of_request
    count = min(rows, int(room // each))
    if count < 1:
        raise ConfigError(
            f"no room for an encoder's output: K and V that are made of it take {format_size(slot_bytes)}, and "
            f"{format_size(free)} are free. Free memory, or lower kv.memory or kv.num_blocks"
        )
    return Slots(count, count * slot_bytes)


def _decision(num_blocks: int, per_block: int, reason: str) -> Decision:
    return Decision("kv.num_blocks", num_blocks, f"{format_size(num_blocks * per_block)}: {reason}")


def choose_max_model_len(config: EngineConfig, model_limit: int, capacity: int) -> tuple[int, Decision]:
    """Longest prompt + output. The last token of all needs no KV slot, hence the + 1."""
    asked = config.model.max_model_len
    if asked is None:
        if capacity + 1 < model_limit:
            reason = f"what the KV pool holds; the model allows {model_limit}"
            return capacity + 1, Decision("model.max_model_len", capacity + 1, reason)
        return model_limit, Decision("model.max_model_len", model_limit, "the model's own limit")
    if asked > model_limit:
        raise ConfigError(f"model.max_model_len={asked}, but the model was made for at most {model_limit} tokens")
    if asked > capacity + 1:
        raise ConfigError(
            f"model.max_model_len={asked}, but the KV pool holds {capacity} tokens. "
            "Raise kv.num_blocks or kv.memory, or lower model.max_model_len"
        )
    return asked, Decision("model.max_model_len", asked, "as configured")
