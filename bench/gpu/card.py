"""The device of bench/gpu: what it is, at which clocks it runs, how fast it copies, and how long a call takes on it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import torch

NOT_MEASURED = "not measured"
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu", "driver_version")


def card(device: torch.device) -> dict[str, Any] | str:
    if device.type == "cpu":
        return "none: a CPU stands in for it"
    properties = torch.cuda.get_device_properties(device)
    known = {"name": properties.name, "sms": properties.multi_processor_count, "bytes": properties.total_memory}
    return known | {"cuda": torch.version.cuda} | _clocks()


def _clocks() -> dict[str, str]:
    """As nvidia-smi has them now; {} without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(CLOCKS, found, strict=True)) if done.returncode == 0 and len(found) == len(CLOCKS) else {}


def replayed(call: Callable[[], Any], num_replays: int = 20, num_rounds: int = 5) -> float:
    """Seconds a call on the device, best round: under graph replay, since a launch from the host can take longer than
    the kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    rounds = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_replays):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / num_replays)
    return min(rounds)


def copy_bandwidth(device: torch.device) -> float | str:
    """GB/s, read and write counted."""
    if device.type == "cpu":
        return NOT_MEASURED
    source = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round(2 * source.numel() / replayed(lambda: target.copy_(source)) / 1e9, 1)
