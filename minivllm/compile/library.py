"""A piece as a shared library: Inductor's ahead-of-time form, which needs no Python and no compiler to be loaded.

The form for CPUs. The other one, the artifact of `standalone_compile`, holds C++ as text there, so that every process
that loads it imports Inductor and runs the C++ compiler again; what `aot_compile` makes loads like any library, and was
the faster at one token (bench/LOG.md). Building takes longer, but it is done once, in a process of its own.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minivllm.compile.program import Piece

if TYPE_CHECKING:
    from minivllm.compile.split import PieceGraph


class Library:
    name = "library"
    made = "shared libraries"
    file = "piece.so"

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"shared libraries are built for CPUs, not for {device.type}"
        compiler = "clang++" if platform.system() == "Darwin" else "g++"
        return None if shutil.which(compiler) else f"no C++ compiler ({compiler}) is installed"

    def build(self, piece: PieceGraph, fake_mode: object, folder: Path, num_threads: int) -> None:
        import torch._inductor

        options = {
            "aot_inductor.output_path": str(folder / self.file),
            "aot_inductor.precompile_headers": False,  # they take longer than the three pieces that would use them
            "cpp.threads": num_threads,
            "compile_threads": 1,
        }
        with torch.no_grad(), fake_mode:
            torch._inductor.aot_compile(piece.module, tuple(piece.inputs), options=options)
        for path in folder.iterdir():  # sources and objects
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != self.file:
                path.unlink()

    def load(self, path: Path) -> Piece:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
