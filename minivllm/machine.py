"""What a recorded number was measured on: for the trace's header and every result of bench/. Never imports torch."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minivllm import __version__

CGROUP = Path("/sys/fs/cgroup")
PACKAGES = ("torch", "transformers", "numpy", "msgspec")


def num_cores() -> int:
    """CPU cores that this process may use, which a container or taskset can make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """CPU time that this process's control group may use, in cores (`docker run --cpus 1.5`); None: no limit."""
    for quota, period in (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            parts = (CGROUP / quota).read_text().split()  # version 2: "150000 100000" or "max 100000"
            parts += (CGROUP / period).read_text().split() if period else []
            used, of = map(int, parts)
        except (OSError, ValueError):
            continue
        return used / of if used > 0 and of > 0 else None
    return None


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    machine = {"system": platform.system(), "arch": platform.machine(), "cpu": cpu_name(), "num_cores": num_cores()}
    torch = sys.modules.get("torch")  # whoever runs on a GPU has imported it
    if torch is not None and torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def versions() -> dict[str, str]:
    return {"minivllm": __version__, "python": platform.python_version()} | installed(PACKAGES)


def installed(packages: Iterable[str]) -> dict[str, str]:
    """{package: its version}, of those that are."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms that only a recorded run has to pay

    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
