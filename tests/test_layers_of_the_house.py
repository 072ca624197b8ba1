"""The house stands: imports point down, the control plane is light, and the seams stay small."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from minivllm import features
from minivllm.registry import Registry

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minivllm"

# From the ground up: a module may import its own storey and those above it in this list. "" is minivllm/__init__.py,
# whose exports are imported on first use.
STOREYS: tuple[tuple[str, ...], ...] = (
    ("", "errors", "registry"),
    ("machine", "features", "logs", "files", "file_keys"),
    ("matrix",),
    ("config",),
    ("structured",),
    ("patterns",),
    ("waiting", "wanted", "child", "orphan"),
    ("sandbox",),
    ("request",),
    ("plan", "batch", "facts", "kv_groups"),
    ("trace", "trace_recent"),
    ("kv",),
    ("scheduler",),
    ("upload", "parallel"),
    ("compile", "attention", "kernels", "layers", "quantization"),
    ("models",),
    ("loading",),
    ("sampling", "lora"),
    ("spec_decode",),
    ("pooling",),
    ("runner",),
    ("simulate",),
    ("executor",),
    ("engine",),
    ("terminal",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
STOREY = {name: number for number, names in enumerate(STOREYS) for name in names}

# (importer, imported): why it may point up. Each is inside a function.
UPWARDS = {
    ("minivllm.trace", "minivllm.engine.build"): "replay without an executor builds the recorded engine",
    ("minivllm.kernels.cpu.build", "minivllm.loading.cache"): "compiled kernels are kept where converted models are",
}

CONTROL_PLANE = (
    *("minivllm.config", "minivllm.features", "minivllm.request", "minivllm.plan", "minivllm.trace"),
    *("minivllm.kv.manager", "minivllm.kv.prefix", "minivllm.kv.prefix_hash", "minivllm.kv.none"),
    *("minivllm.scheduler.policy", "minivllm.scheduler.unified", "minivllm.engine.core"),
    *("minivllm.lora.table", "minivllm.lora.scheduling"),
    *("minivllm.pooling.task", "minivllm.pooling.text", "minivllm.pooling.options"),
)
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "starlette", "pydantic")
MAX_IMPORTED = 150  # modules: 107 on the day that this was written, of which 43 are ours, in 0.09 s
MAX_METHODS = 5


class Import(NamedTuple):
    importer: str
    imported: str
    line: int


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources() -> list[Path]:
    kernels = [PACKAGE / "kernels" / p.relative_to(ROOT / "kernels") for p in (ROOT / "kernels").rglob("*.py")]
    return sorted({p for p in PACKAGE.rglob("*.py")} | set(kernels))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not is_type_checking(node):
            yield node
            yield from run_time_nodes(node)


def imports(path: Path) -> Iterator[Import]:
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module_name(path), alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute in this project"
            for alias in node.names:  # `from minivllm import features` imports minivllm.features
                is_module = node.module == "minivllm" and alias.name in STOREY
                yield Import(module_name(path), f"minivllm.{alias.name}" if is_module else node.module, node.lineno)


def file_imports(path: Path, modules: set[str]) -> set[str]:
    """The files of `modules` that a file names when it is imported, or to a type checker."""
    tree = ast.parse(path.read_text())
    nodes = [*tree.body, *(inner for node in tree.body if is_type_checking(node) for inner in node.body)]
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):  # a name of a package may be a file in it
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names.values()}
    return found & modules - {module_name(path)}


def circles(imports_of: dict[str, set[str]]) -> list[list[str]]:
    """What is left of each when those that import nothing of it, or that nothing of it imports, are taken away."""
    left = dict(imports_of)
    while True:
        named = set().union(*left.values())
        kept = {name: found & left.keys() for name, found in left.items() if found & left.keys() and name in named}
        if kept == left:
            return [[name, *sorted(found)] for name, found in sorted(kept.items())]
        left = kept


def storey(module: str) -> int:
    name = module.removeprefix("minivllm").lstrip(".").partition(".")[0]
    assert name in STOREY, f"{module}: give this part a storey in {Path(__file__).name}"
    return STOREY[name]


@functools.cache
def all_imports() -> list[Import]:
    return [i for path in sources() for i in imports(path)]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_import_points_down_the_house():
    upwards = [
        f"{i.importer}:{i.line} imports {i.imported}"
        for i in all_imports()
        if i.imported.partition(".")[0] == "minivllm"
        and storey(i.imported) > storey(i.importer)
        and (i.importer, i.imported) not in UPWARDS
    ]
    assert not upwards, "\n".join(upwards)


def test_no_files_import_each_other_in_a_circle():
    """Imports for types too: a circle of types is one part in two files, or a type in the wrong one. Not the package's
    own exports, which are imported on first use."""
    files = {module_name(path): path for path in sources()}
    del files["minivllm"]
    found = circles({name: file_imports(path, files.keys()) for name, path in files.items()})
    assert not found, "\n".join(f"{name} imports {', '.join(imported)}" for name, *imported in found)


def test_every_exception_to_the_layers_is_still_needed():
    assert {(i.importer, i.imported) for i in all_imports()} >= set(UPWARDS)


@pytest.mark.parametrize("part", ["scheduler", "kv"])
def test_the_control_plane_never_names_torch(part):
    guilty = [i for i in all_imports() if i.imported.split(".")[0] == "torch" and i.importer.split(".")[1] == part]
    assert not guilty


def test_only_the_composition_root_names_the_registries_of_the_feature_table():
    registries = {name for name, value in vars(features).items() if isinstance(value, Registry)}
    readers = [
        f"{module_name(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in registries and ast.unparse(node.value) == "features")
        or (isinstance(node, ast.ImportFrom) and registries & {alias.name for alias in node.names})
    ]
    modules = {reader.partition(":")[0] for reader in readers}
    assert modules and all(module.startswith("minivllm.engine.build.") for module in modules), modules


def test_importing_the_control_plane_loads_nothing_heavy():
    code = f"import sys, {', '.join(CONTROL_PLANE)}; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == ""


def test_a_server_beside_its_core_loads_no_torch():
    """Its core's process has it; a second one would cost a hundred megabytes, and seconds of a start."""
    modules = "minivllm.engine.async_llm, minivllm.engine.process_link, minivllm.serve.app, minivllm.serve.pooling"
    assert python(f"import sys, {modules}; print('torch' if 'torch' in sys.modules else '')") == ""


def test_importing_the_control_plane_loads_few_modules():
    """Which is what its time is made of; a busy machine's clock says nothing."""
    code = f"import sys; before = len(sys.modules); import {', '.join(CONTROL_PLANE)}; print(len(sys.modules) - before)"
    assert int(python(code)) < MAX_IMPORTED


def test_no_protocol_has_over_five_methods():
    """A data attribute is nothing that an implementation has to write, so it does not count."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b).startswith("Protocol") for b in node.bases):
                methods = [n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
                assert len(methods) <= MAX_METHODS, f"{path.name}: {node.name} has {methods}"
