"""Programs and pieces on disk, each an entry of a cache that is built once and never seen half done.

    program-<key>/program.json  key: the model's description, the source, versions, the machine and its flags
    piece-<hash>/<form's file>  hash: the piece's text, versions, the machine and its flags

Each entry is sealed (loading/cache.py): a library that was damaged would crash the process that loads it, an artifact
is unpickled, and both are code. So whose they are and their digests are checked first.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minivllm.compile.opaque import is_traceable
from minivllm.compile.program import Piece, Program
from minivllm.machine import installed

if TYPE_CHECKING:
    from minivllm.compile.forms import Form
    from minivllm.loading.cache import Cache

PROGRAM = "program.json"


class Store:
    def __init__(self, cache: Cache, form: Form):
        self.cache = cache
        self.form = form

    def program(self, key: str) -> Program | None:
        """None: not there, or damaged. Likewise `piece`."""
        path = self.cache.sealed(f"program-{key}", PROGRAM)
        return Program.from_json(path.read_text()) if path else None

    def piece(self, digest: str) -> Piece | None:
        path = self.cache.sealed(f"piece-{digest}", self.form.file)
        return self.form.load(path) if path else None

    def pieces(self, program: Program) -> dict[str, Piece] | None:
        found = {digest: self.piece(digest) for digest in program.pieces}
        return None if None in found.values() else found

    def ensure_program(self, key: str, program: Program) -> None:
        self._ensure(f"program-{key}", PROGRAM, lambda folder: (folder / PROGRAM).write_text(program.to_json()))

    def ensure_piece(self, digest: str, build: Callable[[Path], Any]) -> bool:
        """True: `build(folder)` was called, to write the form's file there."""
        return self._ensure(f"piece-{digest}", self.form.file, build)

    def _ensure(self, name: str, file: str, build: Callable[[Path], Any]) -> bool:
        built = False

        def write(folder: Path) -> None:
            nonlocal built
            build(folder)
            built = True

        self.cache.sealed_entry(name, file, write)
        return built


def environment(form: Form, device: torch.device, num_threads: int) -> str:
    """What machine code depends on beside its graph."""
    sources = (Path(inspect.getfile(type(form))), Path(__file__).with_name("inductor.py"))  # hold the options
    parts = (
        torch.__version__,
        platform.python_version(),
        platform.machine(),
        form.name,
        *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources),
    )
    return "\n".join([*parts, *(_processor(num_threads) if device.type == "cpu" else _card(device))])


def _processor(num_threads: int) -> Iterable[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0] if lines else "")
    return torch.backends.cpu.get_cpu_capability(), flags, f"{num_threads} threads"


def _card(device: torch.device) -> Iterable[str]:
    """Binaries are of one capability; how kernels are cut depends on the number of multiprocessors, of which a slice of
    a card (MIG) has fewer."""
    card = torch.cuda.get_device_properties(device)
    what = f"{card.name} {card.major}.{card.minor}, {card.multi_processor_count} multiprocessors"
    return f"CUDA {torch.version.cuda}", str(installed(["triton"])), what


def program_key(model: nn.Module, environment: str) -> str:
    """Two models with one key have the same program: the same source, shapes and constants, on the same machine."""
    packages = {".".join(type(module).__module__.split(".")[:2]) for module in model.modules()} | {"minivllm.compile"}
    text = "\n".join([environment, _source(sorted(packages)), *describe(model)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe(model: nn.Module) -> Iterable[str]:
    """Modules and what each of them holds: tensors by shape, numbers by value, other objects by type and content."""
    for path, module in model.named_modules():
        yield f"{path}: {type(module).__qualname__}"
        held = {**module._parameters, **module._buffers, **module.__dict__}
        for name, value in held.items():
            if not name.startswith("_") and name != "training":
                yield f"  {name} = {_show(value)}"


def _show(value: Any, depth: int = 3) -> str:
    if not is_traceable(value):
        return "opaque"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device} {'packed' if value.is_mkldnn else value.stride()}"
    if isinstance(value, (int, float, str, bool, type(None), slice, torch.dtype, torch.device)):
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_show(v, depth - 1) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_show(v, depth - 1)}" for k, v in value.items()) + "}"
    fields = getattr(value, "__dict__", None) or {n: getattr(value, n, None) for n in getattr(value, "__slots__", ())}
    return f"{type(value).__qualname__}({_show(fields, depth - 1)})"


def _source(packages: Iterable[str]) -> str:
    """A digest of the packages' Python files."""
    from importlib.util import find_spec

    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
        for path in files or ([Path(spec.origin)] if spec and spec.origin else []):
            digest.update(path.read_bytes())
    return digest.hexdigest()
