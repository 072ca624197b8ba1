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

from minivllm import machine
from minivllm.errors import ModelError
from minivllm.kernels.report import COMPILERS

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast", "-w")
# The first that the compiler takes: x86 and new ARM compilers, older ARM compilers, anything.
TARGETS = (("-march=native",), ("-mcpu=native",), ())
MAX_SECONDS = 300
# What no instruction set tells of a processor, by what Linux calls its maker.
MAKERS = {"GenuineIntel": ("-DMINIVLLM_INTEL",)}


class Unbuildable(Exception):
    """Why there is no library: a sentence for the start-up table."""


@functools.cache
def library(name: str = "attention", kind: str = "") -> ctypes.CDLL:
    """<name>.cpp, loaded; compiled before if this is the first use on this machine. kind: of those sources of which
    each kind is a library of its own, what MINIVLLM_KIND is defined as. Raises Unbuildable."""
    try:
        return ctypes.CDLL(str(path(name, kind)))
    except OSError as e:
        raise Unbuildable(f"the compiled kernels do not load: {e}") from e


@functools.cache
def unsupported_reason(name: str = "attention") -> str | None:
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


def path(name: str, kind: str = "") -> Path:
    """The shared library, compiled if need be."""
    from minivllm.loading.cache import Cache, default_cache_dir

    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise Unbuildable(f"no C++ compiler on the PATH (looked for {', '.join(COMPILERS)})")
    cache = Cache(default_cache_dir() / "kernels")
    entry = "-".join(filter(None, ("cpu", name, kind, key(compiler, name))))
    try:
        return cache.sealed_entry(entry, f"{name}.so", lambda folder: compile_into(folder, compiler, name, kind))
    except ModelError as e:
        raise Unbuildable(str(e)) from e


def key(compiler: str, name: str) -> str:
    """Names what the library depends on: source, flags, this compiler's file and this kind of processor."""
    found = Path(compiler).resolve()
    stat = found.stat()
    parts = [str(found), str(stat.st_size), str(stat.st_mtime_ns), *flags(), platform.machine(), processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in [SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def flags() -> tuple[str, ...]:
    return FLAGS + MAKERS.get(machine.cpu_maker(), ())


def processor() -> str:
    """What -march=native is resolved from: on Linux the first core's features."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = iter(file.readline, "\n")  # up to the first blank line: the first core
            return " ".join(x for x in lines if x.startswith(("flags", "Features", "model name", "CPU part")))
    except OSError:
        return platform.processor()


def compile_into(folder: Path, compiler: str, name: str, kind: str = "") -> None:
    begin = time.perf_counter()
    what, defined = (f"{name} {kind}", [f"-DMINIVLLM_KIND={kind}"]) if kind else (name, [])
    print(f"compiling the CPU's {what} kernels with {compiler} (once) ...", end=" ", file=sys.stderr, flush=True)
    english = os.environ | {"LC_ALL": "C"}  # what a compiler says is read
    files = [str(SOURCES / f"{name}.cpp"), "-o", str(folder / f"{name}.so")]
    for target in TARGETS:
        command = [compiler, *flags(), *defined, *target, *files]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, env=english)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise _failed(compiler, str(e)) from e
        if done.returncode == 0:
            print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            return
        if (why := machine.full_disk(done.stderr)) is not None:  # with other options it would be no less full
            print("failed", file=sys.stderr, flush=True)
            raise Unbuildable(f"a disk is full, so that {compiler} cannot compile the kernels: {why}")
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


def matrix_struct(*numbers: str) -> type[ctypes.Structure]:
    """What a library is told of a matrix: where its weight and its bias are, and whole numbers."""
    fields = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), *((name, ctypes.c_int64) for name in numbers))
    return type("Matrix", (ctypes.Structure,), {"_fields_": fields})


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
