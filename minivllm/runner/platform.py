"""What a worker computes on, and in: the device, its threads, the dtype. Each choice comes with its reason."""

from __future__ import annotations

import torch

from minivllm.errors import ConfigError
from minivllm.machine import cpu_quota, num_cores


def choose_device(name: str) -> tuple[torch.device, str]:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("model.device=cuda, but torch sees no CUDA device. Use model.device=cpu or auto")
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu"), "a CUDA device is there" if has_cuda else "no CUDA device"
    return torch.device(name), "as configured"


def choose_threads(asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return asked, "as configured"
    cores, quota = num_cores(), cpu_quota()
    if quota is not None and quota < cores:
        # A step that uses up the limit with one thread more stands still until the next period.
        return max(1, int(quota)), f"of {cores} cores: the control group's limit is the time of {quota:g}"
    return cores, "the cores that this process may use"


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name != "auto":
        return getattr(torch, name), "as configured"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return torch.bfloat16, "the GPU computes in bfloat16"
        return torch.float16, "the GPU has no bfloat16"
    if _cpu_has_bf16():
        return torch.bfloat16, "the CPU multiplies in bfloat16: half the memory traffic of float32"
    return torch.float32, "the CPU has no bfloat16 instructions, so bfloat16 would be emulated"


def _cpu_has_bf16() -> bool:
    """AVX-512 BF16 or AMX. torch has only private probes for them, so each may be missing."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
