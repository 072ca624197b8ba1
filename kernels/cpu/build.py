"""Compiles the CPU kernels at first use and keeps the result: one shared library a machine, compiler and source.

They have a plain C interface and no torch header, so that compiling takes seconds and one library serves every torch.
OpenMP comes in at run time, as the address of torch's own GOMP_parallel: a second runtime would bring a second set of
threads, and the two would spin against each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from minivllm.errors import ModelError
from minivllm.kernels.report import COMPILERS

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast", "-w")
# The first that the compiler takes: x86 and new ARM compilers, older ARM compilers, anything.
TARGETS = (("-march=native",), ("-mcpu=native",), ())
MAX_SECONDS = 300


class Unbuildable(Exception):
    """Why there is no library: a sentence for the start-up table."""


@functools.cache
def library(name: str = "attention") -> ctypes.CDLL:
    """<name>.cpp, loaded; compiled before if this is the first use on this machine. Raises Unbuildable."""
    try:
        return ctypes.CDLL(str(path(name)))
    except OSError as e:
        raise Unbuildable(f"the compiled kernels do not load: {e}") from e


@functools.cache
def obstacle(name: str = "attention") -> str | None:
    """Why library(name) fails, or None. Compiles, and keeps a failure: nothing is tried twice in a process."""
    try:
        library(name)
    except Unbuildable as e:
        return str(e)
    return None


def isa() -> str:
    """The instructions that the library was compiled for. Raises Unbuildable."""
    name = library().minivllm_isa
    name.restype = ctypes.c_char_p
    return name().decode()


def path(name: str) -> Path:
    """The shared library, compiled if need be."""
    from minivllm.loading.cache import Cache, default_cache_dir

    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise Unbuildable(f"no C++ compiler on the PATH (looked for {', '.join(COMPILERS)})")
    cache = Cache(default_cache_dir() / "kernels")
    try:
        folder = cache.entry(f"cpu-{name}-{key(compiler, name)}", lambda folder: compile_into(folder, compiler, name))
    except ModelError as e:
        raise Unbuildable(str(e)) from e
    return folder / f"{name}.so"


def key(compiler: str, name: str) -> str:
    """Names what the library depends on: source, flags, this compiler's file and this kind of processor."""
    found = Path(compiler).resolve()
    stat = found.stat()
    parts = [str(found), str(stat.st_size), str(stat.st_mtime_ns), *FLAGS, platform.machine(), processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """What -march=native is resolved from: on Linux the first core's features."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = iter(file.readline, "\n")  # up to the first blank line: the first core
            return " ".join(x for x in lines if x.startswith(("flags", "Features", "model name", "CPU part")))
    except OSError:
        return platform.processor()


def compile_into(folder: Path, compiler: str, name: str) -> None:
    begin = time.perf_counter()
    print(f"compiling the CPU's {name} kernels with {compiler} (once) ...", end=" ", file=sys.stderr, flush=True)
    for target in TARGETS:
        command = [compiler, *FLAGS, *target, str(SOURCES / f"{name}.cpp"), "-o", str(folder / f"{name}.so")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise _failed(compiler, str(e)) from e
        if done.returncode == 0:
            print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            return
        if target and not _is_unknown(done.stderr):  # slower code: not without a word
            print(f"not for this CPU ({_first_error(done.stderr)}) ...", end=" ", file=sys.stderr, flush=True)
    raise _failed(compiler, done.stderr)


def _failed(compiler: str, output: str) -> Unbuildable:
    print("failed", file=sys.stderr, flush=True)
    return Unbuildable(f"{compiler} cannot compile the kernels: {_first_error(output)}")


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines() or ["no message"]
    return lines[0][:200]


def _is_unknown(output: str) -> bool:
    """Whether the compiler only said that it does not know the target's option."""
    return any(word in output for word in ("unrecognized", "unknown", "unsupported", "bad value"))


@functools.cache
def torch_parallel() -> ctypes.c_void_p:
    """GOMP_parallel of the OpenMP runtime that torch is linked with; null where it has none."""
    import torch

    folder = Path(torch.__path__[0]) / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            handle = ctypes.CDLL(str(folder / name), mode=os.RTLD_LAZY)
            return ctypes.cast(getattr(handle, "GOMP_parallel", None), ctypes.c_void_p)
    return ctypes.c_void_p()
