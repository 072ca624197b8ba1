"""A piece as Inductor's own artifact: what `standalone_compile` makes, in one file. The form for GPUs.

The file holds a Python wrapper that allocates and launches, its Triton kernels as text, and their binaries. Building
takes what Triton takes, a C compiler; a shared library for a GPU would take g++ and CUDA's headers too. Loading takes
some seconds for importing Inductor; text is written out and imported, binaries come along, and nothing is compiled. (On
a CPU the kernels are C++, and the process that loads compiles them again: there it is for tests.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.compile.program import Piece

if TYPE_CHECKING:
    from minivllm.compile.split import PieceGraph

COMPILERS = ("cc", "gcc", "clang")  # Triton takes any of them

# The number of tokens that kernels are shaped for; they are right for every other. It is the longest step that is
# captured by default, and large enough that no reduction is split over the device for want of rows.
EXPECTED_TOKENS = 512

OPTIONS = {
    # Nothing is timed on the device. The builder may work beside an engine that serves, whose load would choose; and a
    # process that loads would time again, while requests wait. One configuration is left of each kernel.
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_pointwise": False,
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,  # captures are the runner's (runner.graphs)
    "freezing": False,  # weights are inputs, so that equal layers share code
    "size_asserts": False,  # of each argument in each call; and a packed weight of a CPU has no strides to assert
    "compile_threads": 1,  # no pool of processes
}


class Artifact:
    name = "artifact"
    made = "Inductor's artifacts"
    file = "piece.bin"

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type != "cpu" and find_spec("triton") is None:
            return "triton is not installed, which compiles for GPUs"
        if not any(map(shutil.which, filter(None, (os.environ.get("CC"), *COMPILERS)))):
            return f"no C compiler ({', '.join(COMPILERS)}) is installed, with which Triton builds its launchers"
        return None

    def build(self, piece: PieceGraph, fake_mode: Any, folder: Path, num_threads: int) -> None:
        import torch._inductor

        (results,) = next(node for node in piece.module.graph.nodes if node.op == "output").args
        for node in results:
            node.meta["example_value"] = node.meta["val"]  # "from_graph" takes the mode, and so the symbol, from there
        for size in (size for given in piece.inputs for size in given.shape if isinstance(size, torch.SymInt)):
            # Without a hint Inductor sees no data that two kernels share, and fuses nothing.
            fake_mode.shape_env.var_to_hint_override[size.node.expr] = EXPECTED_TOKENS
        options = {"config_patches": OPTIONS | {"cpp.threads": num_threads, "cpp_cache_precompile_headers": False}}
        with torch.no_grad():
            artifact = torch._inductor.standalone_compile(
                piece.module, list(piece.inputs), dynamic_shapes="from_graph", options=options
            )
        artifact.save(path=str(folder / self.file), format="binary")

    def load(self, path: Path) -> Piece:
        from torch._inductor import CompiledArtifact, config

        folder = tempfile.TemporaryDirectory(prefix="minivllm-piece-")
        with _unpacked_to(folder.name), config.patch(cpp_cache_precompile_headers=False):
            artifact = CompiledArtifact.load(path=str(path), format="binary")

        def run(args: list[Tensor]) -> Any:
            return artifact(*args)

        weakref.finalize(run, folder.cleanup)  # sources stay for tracebacks
        return run


@contextlib.contextmanager
def _unpacked_to(folder: str) -> Iterator[None]:
    """Inductor's and Triton's caches are in `folder`, for a while, and not where all programs of a user have theirs:
    what lies there under the right name would be run in place of what was checked."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    before = os.environ.pop("TRITON_CACHE_DIR", None)
    try:
        with temporary_cache_dir(folder):
            yield
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)  # Inductor sets it: our own kernels would be kept in `folder`
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
