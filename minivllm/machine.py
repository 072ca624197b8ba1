"""What a recorded number was measured on: for the trace's header and every result of bench/. Never imports torch."""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minivllm import __version__

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
# By what Linux calls them, the widest first: what a CPU multiplies with.
UNITS = {
    **{"amx_tile": "AMX", "avx512f": "AVX-512", "avx_vnni": "AVX-VNNI", "avx2": "AVX2"},
    **{"i8mm": "i8mm", "asimddp": "dot product"},
}
DISK_FULL = tuple(os.strerror(error) for error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
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
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_maker() -> str:
    """What an x86 CPU says of its maker ("GenuineIntel", "AuthenticAMD"), as Linux gives it; "" elsewhere."""
    return _cpuinfo("vendor_id")


def cpu_flags() -> set[str]:
    """The extensions that Linux says the CPU has; empty elsewhere."""
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _cpuinfo(name: str) -> str:
    """The first value of that name; "" where there is none."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def full_disk(said: str) -> str | None:
    """The first line of what a compiler has said that tells of a full disk."""
    return next((line for line in said.splitlines() if any(error in line for error in DISK_FULL)), None)


def describe() -> dict[str, Any]:
    machine = {"system": platform.system(), "arch": platform.machine(), "cpu": cpu_name(), "num_cores": num_cores()}
    flags = cpu_flags()
    if (unit := next((UNITS[flag] for flag in UNITS if flag in flags), None)) is not None:
        machine["unit"] = unit
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
