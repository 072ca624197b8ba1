"""The C++ kernels are C++ for every kind of CPU: what this machine's own compilation leaves out is read too.

Which path is compiled is the preprocessor's choice, so a mistake in another machine's shows nowhere here.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

import pytest

from minivllm.kernels.cpu.build import FLAGS, SOURCES
from minivllm.kernels.report import COMPILERS

COMPILER = next(filter(None, map(shutil.which, COMPILERS)), None)
ARM = shutil.which("aarch64-linux-gnu-g++")
KINDS = {"block_kind": ["-DMINIVLLM_KIND=Q4_K"]}  # sources that are compiled for each kind of block
TARGETS = {
    "amx": (COMPILER, "-march=sapphirerapids"),
    "avx512": (COMPILER, "-march=skylake-avx512"),
    "avx2": (COMPILER, "-march=x86-64-v3"),
    "arm": (ARM, "-march=armv8.6-a+i8mm"),
}
OF_X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("target", TARGETS)
def test_each_source_is_read_for_each_kind_of_cpu(target, tmp_path):
    compiler, march = TARGETS[target]
    if compiler is None or (target != "arm" and not OF_X86):
        pytest.skip(f"no compiler for {target}")
    nothing = tmp_path / "nothing.cpp"
    nothing.touch()
    command = [compiler, *(f for f in FLAGS if f not in ("-O3", "-shared")), march, "-fsyntax-only"]
    english = os.environ | {"LC_ALL": "C"}
    if subprocess.run([*command, nothing], capture_output=True, env=english).returncode:
        pytest.skip(f"{compiler} does not know {march}")
    wrong = {}
    for source in sorted(SOURCES.glob("*.cpp")):
        done = subprocess.run(
            [*command, *KINDS.get(source.stem, []), source], capture_output=True, text=True, env=english
        )
        if done.returncode:
            wrong[source.name] = done.stderr[:2000]
    assert not wrong
