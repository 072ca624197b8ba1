"""A process that takes itself to have an H100, without one: enough for Inductor and Triton to compile for it.

    python tests/fake_card.py build FOLDER   # dummy:tiny's pieces, as a builder on such a machine makes them
    python tests/fake_card.py load FOLDER    # as an engine there finds them, with nothing that could compile

Prints what came of it as JSON. What is replaced is what asks the driver, and what puts a kernel on the device; tracing,
code generation, Triton and its assembler are the real ones. Nothing is ever launched.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

CUDA = torch.device("cuda", 0)
CARD = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    gcnArchName="NVIDIA H100 80GB HBM3",  # torch for CPUs asks for it, as it has no version of CUDA
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)


class Driver:
    """Triton's."""

    launcher_cls = None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA


def pretend() -> None:
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": CARD,
        "get_device_capability": (9, 0),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for name in ("is_available", "current_device", "get_device_properties"):
        setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    CudaInterface.get_compute_capability = staticmethod(lambda device: 90)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    fake_tensor.init_gpu_context = lambda device: None  # of torch 2.11
    joint_graph.lazy_init = lambda device: None  # patterns of attention and padding are traced on real tensors
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # torch for CPUs
        torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.Tensor.__getitem__ = _index


_getitem = torch.Tensor.__getitem__


def _index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """torch for CPUs looks for a device's guard where a tensor is indexed, even of fakes. Its operations do not."""
    if tensor.device.type != "cuda":
        return _getitem(tensor, index)
    aten, parts = torch.ops.aten, index if isinstance(index, tuple) else (index,)
    num_left = tensor.dim() - sum(part is not None and part is not Ellipsis for part in parts)
    dim, by_dim = 0, {}
    for part in parts:
        if isinstance(part, int):
            tensor = aten.select.int(tensor, dim, part)
            continue
        if part is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(part, torch.Tensor):
            by_dim[dim] = part
        elif part is not Ellipsis and part != slice(None):
            tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        dim += num_left if part is Ellipsis else 1
    return aten.index.Tensor(tensor, [by_dim.get(d) for d in range(max(by_dim) + 1)]) if by_dim else tensor


def watch() -> list[dict[str, Any]]:
    """Kernels as they would be put on the device: {name, configurations}."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels = []

    def found(self) -> None:
        kernels.append({"name": self.fn.__name__, "configurations": len(self.compile_results)})

    CachingAutotuner._make_launchers = found
    return kernels


def job(folder: str) -> Any:
    """For dummy:tiny in bf16, its tensors on the card."""
    from minivllm.compile.forms import form_for
    from minivllm.compile.trace import _SkeletonPickler
    from minivllm.loading import load_model
    from minivllm.runner.compile_job import job_for

    persistent_id = _SkeletonPickler.persistent_id

    def on_the_card(self, value: Any) -> Any:
        key = persistent_id(self, value)
        return (*key[:-1], str(CUDA)) if isinstance(value, torch.Tensor) else key

    _SkeletonPickler.persistent_id = on_the_card
    torch.backends.mkldnn.is_available = lambda: False  # so that weights stay as they are, as on a GPU
    model = load_model("dummy:tiny", torch.bfloat16, torch.device("cpu")).model
    return job_for(model, form_for(CUDA), CUDA, Path(folder), num_threads=1, nice=0)


def build(folder: str) -> dict[str, Any]:
    from minivllm.runner import compile_job

    task, kernels = job(folder), watch()
    with contextlib.redirect_stdout(sys.stderr):
        compile_job.build(task)
    scratch = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    heads = {path.stem: path.read_bytes()[:4].hex() for path in scratch.rglob("*.cubin")}
    targets = [json.loads(path.read_text()).get("target") for path in scratch.glob("triton/*/*/triton_*.json")]
    wrappers = [text for path in scratch.glob("*/*.py") if "def call(" in (text := path.read_text())]
    return {"kernels": kernels, "binaries": heads, "targets": targets, "wrappers": wrappers}


def load(folder: str) -> dict[str, Any]:
    import triton

    from minivllm.compile.forms import form_for
    from minivllm.compile.store import Store
    from minivllm.loading.cache import Cache

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a kernel was compiled")

    kernels = watch()
    triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = refuse
    store = Store(Cache(folder), form_for(CUDA))
    pieces = store.pieces(store.program(job(folder).key))
    return {"kernels": kernels, "pieces": len(pieces)}


if __name__ == "__main__":
    pretend()
    print(json.dumps({"build": build, "load": load}[sys.argv[1]](sys.argv[2])))
