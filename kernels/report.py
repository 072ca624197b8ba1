"""Which families of kernels can be built and run on this machine, why not the others, and each kernel's row.

The engine never needs one of them: each kernel has a torch reference that gives the same numbers, so a machine without
triton, a GPU or a C++ compiler imports, tests and serves. The report is about what kernels
stand on, and about the CPU's, which are compiled at first use.

The folder is `kernels/` in the repository and `minivllm.kernels` for Python. It has no __init__.py, see setup.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from minivllm.kernels.table import KERNELS

TUNED = Path(__file__).parent / "tuned"
COMPILERS = ("c++", "g++", "clang++")


class Family(NamedTuple):
    name: str
    usable: bool
    reason: str  # what was found, or what is missing and how to get it


def triton_family() -> Family:
    if find_spec("triton") is None:
        return Family("triton", False, 'triton is not installed: pip install "minivllm[gpu]" (Linux only)')
    import torch

    if not torch.cuda.is_available():
        return Family("triton", False, "no CUDA device that this torch can use")
    return Family("triton", True, f"{torch.cuda.get_device_name()}, torch {torch.__version__}")


def cpp_family() -> Family:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return Family("cpp", False, f"no C++ compiler on the PATH (looked for {', '.join(COMPILERS)})")
    return Family("cpp", True, compiler)


def cpu_family() -> Family:
    """Compiles the kernels if they are not there yet."""
    from minivllm.kernels.cpu import build

    why = build.unsupported_reason()
    if why is not None:
        return Family("cpu", False, why)
    folder = build.path("attention").parent
    return Family("cpu", True, f"attention, linear and lora for {build.isa()}, {folder}")


FAMILIES: tuple[Callable[[], Family], ...] = (triton_family, cpp_family, cpu_family)


def report() -> list[Family]:
    """One row a family. Imports torch only where triton is installed."""
    return [probe() for probe in FAMILIES]


def kernel_lines(families: list[Family]) -> list[str]:
    """One line a kernel: whether it can run here, what asks for it, what it is tested against."""
    usable = {family.name: family.usable for family in families}
    rows = [("kernel", "family", "", "asked for by", "reference")]
    for kernel in KERNELS:
        state = "on" if usable[kernel.family] else "off"
        rows.append((kernel.name, kernel.family, state, kernel.used_by or "nobody yet", kernel.reference))
    return ["{:30} {:8} {:4} {:35} {}".format(*row) for row in rows]


def tuned_line() -> str:
    """Which cards have tiles of their own (kernels/triton/tuned.py)."""
    cards = sorted(path.stem for path in TUNED.glob("*.json"))
    return f"attention's tiles are tuned for: {', '.join(cards) or 'no card yet'} (bench/gpu/run.py --part tune)"


if __name__ == "__main__":
    families = report()
    for name, usable, reason in families:
        print(f"{name:8} {'on' if usable else 'off':4} {reason}")
    print("", *kernel_lines(families), "", tuned_line(), sep="\n")
