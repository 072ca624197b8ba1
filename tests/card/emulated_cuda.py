"""A CUDA device for machines without one: whole engines run on it, and what a real one would refuse raises here.

A tensor on it says `cuda:0` and keeps its numbers in a CPU tensor; torch's operations are sent there. So it shows, with
the numbers that a CPU computes,

    what is on the wrong side    an operation on tensors of both sides, numpy() of a tensor on the device
    who waits for the device     `Card.waits`: the calls that a host would wait in
    what a graph may not hold    waiting, copies from the host; and that a replay computes what a call would: what is
                                 done between capture_begin and capture_end is done again, on the same tensors

It knows nothing of time, of streams that overtake each other (tests/runner/test_async_engine.py has one), of memory
that is given out again, or of what a compiler makes of a kernel. Triton kernels run where TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from minivllm.compile import graphs
from minivllm.compile.opaque import find, is_opaque, name_of
from minivllm.executor import background

CUDA = torch.device("cuda", 0)
NAME, NUM_SMS, CAPABILITY, MEMORY = "Emulated", 4, (9, 0), 1 << 30

# Nothing switches devices here, but torch wants somebody who could.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
"""

# What it computes, or the shape of it, depends on numbers that the host must read.
WAITING = {
    *("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"),
    *("aten::nonzero", "aten::argwhere", "aten::masked_select", "aten::bincount"),
    *("aten::unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"),
}
MOVING = {"aten::to", "aten::_to_copy", "aten::copy_", "aten::cpu"}


class OnDevice(Tensor):
    """A tensor of the device. `inner`: its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        assert type(inner) is Tensor and inner.device.type == "cpu"
        shape, strides, offset = inner.size(), inner.stride(), inner.storage_offset()
        with torch.inference_mode(False):  # else it could not be a view of one that was made outside
            outer = Tensor._make_wrapper_subclass(cls, shape, strides, offset, dtype=inner.dtype, device=CUDA)
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return Card.current.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def tolist(self) -> list:
        return self.cpu().tolist()

    def pin_memory(self) -> Any:
        raise RuntimeError("only tensors of the CPU can be pinned")

    def record_stream(self, stream: Any) -> None:
        """Memory is not given out again here."""

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"


class Card(TorchDispatchMode):
    """The device. Threads that make tensors on it by its name must have entered it."""

    current: Card

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.num_launches = 0  # operations and kernels
        self.num_replays = 0  # of graphs
        self.capture: list[Callable[[], None]] | None = None
        self._pinned: dict[int, Any] = {}  # by address: memory

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.run(func, args, kwargs or {})

    # --- what the host does

    def wait(self, why: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/minivllm/" in f.filename and f.filename != __file__]
        where = f"{Path(frames[-1].filename).name}: {frames[-1].line}" if frames else "a test"
        assert self.capture is None, f"{why}: the host waits within a capture ({where})"
        self.waits.append(f"{why} ({where})")

    def pin(self, tensor: Tensor) -> Tensor:
        assert self.capture is None, "memory is pinned within a capture"
        memory = tensor.untyped_storage()
        self._pinned[memory.data_ptr()] = memory
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def launch(self, run: Callable[[], None]) -> None:
        """Of a kernel whose tensors are unwrapped."""
        self.num_launches += 1
        run()
        if self.capture is not None:
            self.capture.append(run)

    # --- torch's operations

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # a trace computes nothing
        if is_opaque(func) and any(isinstance(x, OnDevice) for x in args):
            with self:
                return find(name_of(func))(*args, **kwargs)
        name, given = func._schema.name, tree_flatten((args, kwargs))[0]
        ours = [x for x in given if isinstance(x, OnDevice)]
        wanted = {x.type for x in given if isinstance(x, torch.device)}
        if not ours and "cuda" not in wanted:
            pinned = kwargs.pop("pin_memory", False)
            out = func(*args, **kwargs)
            return self.pin(out) if pinned else out
        if name in MOVING:
            return self._move(func, args, kwargs)
        others = [x for x in given if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim()]
        assert not (ours and others), f"{func}: tensors on cuda:0 and on the CPU"
        if name in WAITING or name == "aten::where" and len(args) == 1:
            self.wait(name)
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        if any(x is not None and x.dtype == torch.bool for x in indices):
            self.wait(f"{name} by a mask")
        if name == "aten::repeat_interleave" and "Tensor" in func._overloadname and kwargs.get("output_size") is None:
            self.wait(name)
        if "cpu" in wanted:  # new_empty(device="cpu")
            return func(*_inner(args), **_inner(kwargs))
        return self._launch(func, args, kwargs, {id(x.inner): x for x in ours})

    def _launch(self, func: Any, args: tuple, kwargs: dict, ours: dict[int, OnDevice]) -> Any:
        self.num_launches += 1
        args, kwargs = _inner(args), _inner(kwargs)
        out = func(*args, **kwargs)
        if self.capture is not None:
            self.capture.append(partial(_again, func, args, kwargs, _tensors(out)))

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return ours[id(x)] if id(x) in ours else OnDevice(x)

        return tree_map(wrapped, out)

    def _move(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """To or from the device, or within it."""
        target, source = (args[0], args[1]) if func._schema.name == "aten::copy_" else (None, args[0])
        bound = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        there = isinstance(source, OnDevice)
        if target is not None:
            to_device = isinstance(target, OnDevice)
        elif isinstance(other := bound.get("other"), Tensor):
            to_device = isinstance(other, OnDevice)
        else:
            device = bound.get("device")
            to_device = there if device is None else device.type == "cuda"
        if there and to_device:
            return self._launch(func, args, kwargs, {id(x.inner): x for x in args if isinstance(x, OnDevice)})
        host = target if target is not None and there else source
        queued = bound.get("non_blocking", False) and self.is_pinned(host)
        if there and target is None or not queued:
            self.wait("a copy to the host" if there else "a copy from memory that is not pinned")
        assert self.capture is None, "a copy from or to the host within a capture"
        out = func(*_inner(args), **_inner(kwargs))
        if target is not None:
            return target
        out = out.clone() if out.data_ptr() == source.data_ptr() else out
        return OnDevice(out) if to_device else out


def _inner(tree: Any) -> Any:
    def unwrapped(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.inner if isinstance(x, OnDevice) else x

    if isinstance(tree, dict):
        tree = {name: value for name, value in tree.items() if name != "pin_memory"}
    return tree_map(unwrapped, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _again(func: Any, args: tuple, kwargs: dict, kept: list[Tensor]) -> None:
    for old, new in zip(kept, _tensors(func(*args, **kwargs)), strict=True):
        if old.data_ptr() != new.data_ptr():  # else a view, or an argument that was changed
            old.copy_(new)


# ---------------------------------------------------------------- torch.cuda


class Graph:
    """torch.cuda.CUDAGraph."""

    def capture_begin(self, pool: Any = None) -> None:
        assert Card.current.capture is None, "a capture within a capture"
        self._calls = Card.current.capture = []

    def capture_end(self) -> None:
        assert Card.current.capture is self._calls
        Card.current.capture = None

    def replay(self) -> None:
        assert Card.current.capture is None, "a replay within a capture"
        Card.current.num_replays += 1
        for call in self._calls:
            call()


class Event:
    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Stream:
    device = CUDA

    def __init__(self, device: Any = None): ...
    def wait_stream(self, other: Any) -> None: ...


class Generator(torch.Generator):
    """Random numbers of the device: the CPU's."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls, "cpu")


def _made_here(make: Callable[..., Tensor], data: Any, device: Any = None, **kwargs: Any) -> Tensor:
    return make(data, **kwargs) if device is None else make(data, **kwargs).to(device)


def _library(folder: Path) -> Path:
    """Built once for a test session, in a second."""
    path = folder / "guard.so"
    root = Path(torch.__file__).parent
    flags = f"-std=c++17 -shared -fPIC -I{root}/include -L{root}/lib"
    source = folder / "guard.cpp"
    source.write_text(GUARD)
    subprocess.run(["g++", *flags.split(), str(source), "-lc10", "-o", str(path)], check=True, timeout=250)
    return path


@pytest.fixture(scope="session")
def torch_knows_cuda(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ is installed")
    if not torch.cuda.is_available():
        ctypes.CDLL(str(_library(tmp_path_factory.mktemp("cuda"))))


@pytest.fixture
def card(torch_knows_cuda, monkeypatch):
    """The device, for one test."""
    made = Card.current = Card()
    properties = SimpleNamespace(name=NAME, multi_processor_count=NUM_SMS, total_memory=MEMORY)
    stubs = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: NAME,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: made.wait("synchronize"),
        "graph_pool_handle": lambda: (0, 0),
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "Event": Event,
        "Stream": Stream,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch, "Generator", Generator)
    for name in ("tensor", "as_tensor"):  # they hide from modes what they do
        monkeypatch.setattr(torch, name, partial(_made_here, getattr(torch, name)))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor, *_: made.is_pinned(tensor))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: made.pin(tensor.clone()))
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # of torch 2.11, where it asks a driver
    monkeypatch.setattr(graphs, "borrowed", lambda tensor: tensor)  # memory is not given out again here
    threads = partial(ThreadPoolExecutor, initializer=made.__enter__)
    monkeypatch.setattr(background, "ThreadPoolExecutor", threads)
    _unwrap_kernels(made, monkeypatch)
    with made:
        yield made


def _unwrap_kernels(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter works on what the tensors hold."""
    from minivllm.kernels.triton.interpreted import INTERPRETED

    if not INTERPRETED:
        return
    from triton.runtime.interpreter import GridExecutor

    inner = GridExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            assert isinstance(x, OnDevice) or not isinstance(x, Tensor), "a kernel gets a tensor of the CPU"
        args, kwargs = _inner(args), _inner(kwargs)
        card.launch(lambda: inner(executor, *args, **kwargs))

    monkeypatch.setattr(GridExecutor, "__call__", call)
