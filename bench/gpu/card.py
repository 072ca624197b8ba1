"""The device of bench/gpu: what it is, at which clocks it runs, what it can do at most, and how long a call takes."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.machine import installed

NOT_MEASURED = "not measured"
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu", "driver_version")
PACKAGES = ("triton", "flash-attn", "flash-attn-3", "flashinfer-python", "vllm", "nano-vllm")
FLUSHED = 512 << 20  # bytes that are written between two calls: several times any card's L2


class Times(NamedTuple):
    """Seconds of one call."""

    median: float
    low: float
    high: float
    how: str  # "replayed" as a graph, or "called"


class Ceilings(NamedTuple):
    """What the card does at most, measured in the same run."""

    gb_per_s: float  # copied, read and written bytes counted
    tflops: float  # of a large product of matrices in 16 bits

    def seconds(self, num_bytes: float, flops: float = 0) -> float:
        """No version takes less: the larger of the two times."""
        return max(num_bytes / (self.gb_per_s * 1e9), flops / (self.tflops * 1e12))


def card(device: torch.device) -> dict[str, Any] | str:
    """Name, clocks as they are now, and versions of what only a GPU needs."""
    if device.type == "cpu":
        return "none: a CPU stands in for it"
    properties = torch.cuda.get_device_properties(device)
    known = {"name": properties.name, "sms": properties.multi_processor_count, "bytes": properties.total_memory}
    return known | {"cuda": torch.version.cuda, "versions": installed(PACKAGES)} | clocks()


def clocks() -> dict[str, str]:
    """As nvidia-smi has them now; {} without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(CLOCKS, found, strict=True)) if done.returncode == 0 and len(found) == len(CLOCKS) else {}


def replayed(call: Callable[[], Any], num_replays: int = 20, captured: bool = True) -> Times:
    """Under graph replay, since a launch from the host can take longer than the kernel; by plain calls where a call
    cannot be captured. Each call finds a cold cache: what is larger than the L2 was written before it."""
    with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails leaves its own stream behind
        return _replayed(call, num_replays, captured)


def _replayed(call: Callable[[], Any], num_replays: int, captured: bool) -> Times:
    for _ in range(2):  # compiled, and every buffer there
        call()
    torch.cuda.synchronize()
    again, how = call, "called"
    if captured:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            again, how = graph.replay, "replayed"
        except RuntimeError:  # it waits for the device, or copies from memory that is not pinned
            torch.cuda.synchronize()
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(num_replays)]
    for begin, end in events:
        flushed.zero_()  # keeps the device busy while the host asks for what follows
        begin.record()
        again()
        end.record()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return Times(statistics.median(seconds), min(seconds), max(seconds), how)


def ceilings(device: torch.device) -> Ceilings | None:
    """None without a card. Of random numbers: zeros multiply faster."""
    if device.type == "cpu":
        return None
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    gb_per_s = 2 * source.numel() / replayed(lambda: target.copy_(source)).median / 1e9
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    tflops = 2 * size**3 / replayed(lambda: torch.mm(a, b, out=out)).median / 1e12
    return Ceilings(round(gb_per_s, 1), round(tflops, 1))


def measured(
    call: Callable[[], Any], num_bytes: float, flops: float, best: Ceilings | None, captured: bool = True
) -> dict[str, Any]:
    """A row's figures. fraction: the time that the card would need at least, over the time that it took."""
    if best is None:  # the interpreter's times say nothing about a GPU
        return dict.fromkeys(("us", "gb_per_s", "tflops", "fraction"), NOT_MEASURED)
    times = replayed(call, captured=captured)
    seconds = times.median
    return {
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(num_bytes / seconds / 1e9, 1),
        "tflops": round(flops / seconds / 1e12, 1),
        "fraction": round(best.seconds(num_bytes, flops) / seconds, 3),
        "spread": {"min": round(times.low * 1e6, 2), "max": round(times.high * 1e6, 2)},
        "how": times.how,
    }


def error_of(got: Tensor, wanted: Tensor) -> float:
    """The largest, relative to 1 + |wanted|; what kept its poison (NaN) errs without bound."""
    got, wanted = got.double(), wanted.to(got.device).double()
    return ((got - wanted).abs() / (1 + wanted.abs())).nan_to_num(nan=torch.inf).max().item()
