"""Every shipped kernel compiles for every generation of GPUs, and into what it was written for.

No GPU is needed: the wheel of triton carries the assembler. Looked at are the resources of the binary and the
instructions in it.
"""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: minivllm[gpu], Linux only")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from minivllm.kernels.triton import shipped as shipped_module  # noqa: E402
from minivllm.kernels.triton.interpreted import INTERPRETED  # noqa: E402
from minivllm.kernels.triton.shipped import Shipped, shipped  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set: nothing is compiled in this process")

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, table of compute capabilities).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
LARGE = {80: r"\bmma\.sync", 90: r"\bwgmma\.mma_async", 100: r"\btcgen05\.mma"}
SMALL = r"\bmma\.sync"
WIDE = r"\bcp\.async\.cg\.shared\.global\S* .*, (0x10|16)\b|\bld\.global\S*\.(v4\.(b32|u32|f32)|v2\.(b64|u64))"
ALL = {} if INTERPRETED else {s.name: s for s in shipped()}


class Binary(NamedTuple):
    cubin: bytes
    ptx: str
    shared: int  # bytes


def compiled(s: Shipped, arch: int) -> Binary:
    signature = {arg: s.types.get(arg, "constexpr") for arg in s.kernel.arg_names}
    source = ASTSource(s.kernel, signature, dict(s.constants), s.attributes())
    options = {"num_warps": s.num_warps, "num_stages": s.num_stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Binary(kernel.asm["cubin"], kernel.asm["ptx"], kernel.metadata.shared)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}


def faults(s: Shipped, arch: int, binary: Binary, folder: Path) -> list[str]:
    """What is not as it should be."""
    used, ptx = resources(binary.cubin, folder), binary.ptx
    matrix = {"": None, "small": SMALL, "large": LARGE[arch]}[s.matrix]
    wrong = {
        f"spills: {used}": used["STACK"] or used["LOCAL"],
        f"{binary.shared} bytes of shared memory": binary.shared > SHARED[arch],
        f"no {matrix}": matrix and not re.search(matrix, ptx),
        "no 16-byte loads": s.wide_loads and not re.search(WIDE, ptx),
    }
    return [fault for fault, is_there in wrong.items() if is_there]


@pytest.mark.parametrize("name, arch", [(name, arch) for name, s in ALL.items() for arch in s.archs])
def test_a_shipped_kernel_fits_and_uses_the_machine(name, arch, tmp_path):
    assert faults(ALL[name], arch, compiled(ALL[name], arch), tmp_path) == []


def test_every_kernel_is_shipped():
    """What nobody compiles here nobody would miss."""
    names = {path.stem for path in Path(shipped_module.__file__).parent.glob("*.py")}
    modules = [import_module(f"minivllm.kernels.triton.{name}") for name in names]
    written = {x.fn.__name__ for m in modules for x in vars(m).values() if isinstance(x, triton.runtime.JITFunction)}
    kernels = {name for name in written if name.endswith("_kernel")}
    assert {s.kernel.fn.__name__ for s in ALL.values()} == kernels and len(kernels) > 20


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")
def test_the_gate_sees_spills_narrow_loads_and_small_matrix_instructions(tmp_path):
    """Four warps are too few for the accumulator of the prefill tile; sixteen rows never become wgmma."""
    prefill = ALL["prefill, llama-8b"]
    unknown = prefill._replace(unaligned=tuple(prefill.types))
    bad = {
        "spills": prefill._replace(num_warps=4, constants=prefill.constants | {"BLOCK_M": 256}),
        "no \\bwgmma": prefill._replace(num_warps=4, constants=prefill.constants | {"BLOCK_M": 16}),
        "no 16-byte loads": unknown,
    }
    for fault, s in bad.items():
        found = faults(s, 90, compiled(s, 90), tmp_path)
        assert any(text.startswith(fault) for text in found), (fault, found)
