"""One distribution that installs, imports and serves anywhere; `kernels/` is `minivllm.kernels` and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Imports every module of the package, on a machine without triton and without a C++ compiler.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import minivllm, minivllm.kernels
for package in (minivllm, minivllm.kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
from minivllm.kernels.report import report
print({row.name: (row.usable, row.reason) for row in report()})
"""

WHERE = (
    "import minivllm.kernels.report as r; from importlib.util import find_spec as f; print(r.__file__, f('kernels'))"
)


def python(code: str, cwd: Path = ROOT, options: tuple[str, ...] = (), **env: str) -> str:
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BARE = ("-S",)  # without this environment's packages, of which minivllm may be one


@pytest.fixture(scope="module", params=["with the link", "without the link"])
def checkout(request, tmp_path_factory) -> Path:
    """What a build sees: a clone, or an archive unpacked where there are no symbolic links."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("minivllm", "kernels"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if request.param == "without the link":
        (folder / "minivllm" / "kernels").unlink()
        (folder / "minivllm" / "kernels").write_text("../kernels")  # as git leaves it there
    return folder


def build(checkout: Path, hook: str, out: Path) -> Path:
    """Run a PEP 517 or 660 hook, and unpack the wheel that it makes."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(out)!r}))"
    wheel = out / python(code, checkout).splitlines()[-1]
    zipfile.ZipFile(wheel).extractall(out / "installed")
    return out / "installed"


def test_a_wheel_holds_every_module_and_no_top_level_kernels(checkout, tmp_path):
    installed = build(checkout, "build_wheel", tmp_path)
    assert {p.name for p in installed.iterdir() if not p.name.endswith(".dist-info")} == {"minivllm"}
    sources = {p.relative_to(checkout) for p in (checkout / "minivllm").rglob("*.py")}
    sources |= {"minivllm" / p.relative_to(checkout) for p in (checkout / "kernels").rglob("*.py")}
    assert {p.relative_to(installed) for p in installed.rglob("*.py")} == sources
    cpp = {p.relative_to(checkout) for p in (checkout / "kernels").rglob("*") if p.suffix in (".cpp", ".h")}
    assert cpp and all((installed / "minivllm" / p).is_file() for p in cpp)
    page = {p.relative_to(checkout) for p in (checkout / "minivllm" / "serve" / "page" / "static").iterdir()}
    assert page and all((installed / p).is_file() for p in page)
    assert (installed / "minivllm" / "py.typed").is_file(), "type checkers read the annotations of typed packages only"
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "minivllm = minivllm.cli:run" in points.read_text()
    where, kernels = python(WHERE, tmp_path, BARE, PYTHONPATH=str(installed)).split()
    assert Path(where).is_relative_to(installed) and kernels == "None"


def test_an_editable_install_finds_minivllm_kernels_and_no_top_level_kernels(tmp_path):
    """Also for every other program of that environment: the repository's root must not be on its path."""
    installed = build(copy_of_the_root(tmp_path), "build_editable", tmp_path)
    code = f"import site; site.addsitedir({str(installed)!r})\n{WHERE}"
    where, kernels = python(code, tmp_path, BARE, PYTHONPATH="").split()
    assert Path(where).is_relative_to(tmp_path / "clone") and kernels == "None"


def copy_of_the_root(tmp_path: Path) -> Path:
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "build"))
    return clone


def test_in_a_checkout_the_package_is_imported_without_an_install():
    assert Path(python("import minivllm.kernels.report as r; print(r.__file__)")).resolve().is_relative_to(ROOT)


def test_transformers_is_not_fooled_by_the_folder_kernels():
    code = "import transformers; from transformers.utils import is_kernels_available as f; print(f())"
    try:
        installed = version("kernels")
    except PackageNotFoundError:
        installed = None
    assert python(code) == str(installed is not None)


def test_hugging_faces_kernels_package_is_not_hidden_by_the_folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("get_kernel = 'theirs'\n")
    assert python("from kernels import get_kernel; print(get_kernel)", PYTHONPATH=str(tmp_path)) == "theirs"
    assert python("import minivllm.kernels.report, kernels; print(kernels.get_kernel)", PYTHONPATH=str(tmp_path))


def test_every_module_imports_without_triton_and_a_compiler_and_says_why_they_are_off(tmp_path):
    rows = eval(python(IMPORT_ALL, PATH=str(tmp_path)))
    assert rows["triton"][0] is False and "not installed" in rows["triton"][1]
    for name in ("cpp", "cpu"):
        assert rows[name][0] is False and "no C++ compiler" in rows[name][1]


def test_no_list_of_requirements_names_a_package_twice():
    extras = PYPROJECT["project"]["optional-dependencies"]
    for name, required in {"": PYPROJECT["project"]["dependencies"], **extras}.items():
        packages = [Requirement(r).name.lower() for r in required]
        assert len(packages) == len(set(packages)), f"{name}: {sorted(packages)}"


def test_torch_is_a_range_from_2_11_to_2_13():
    torch = next(r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == "torch")
    admitted = [v for v in ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.14.0") if v in torch.specifier]
    assert admitted == ["2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu"]


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Linux", "riscv64", False),
        ("Darwin", "arm64", True),
        ("Darwin", "x86_64", True),
        ("Windows", "AMD64", True),
        ("Windows", "ARM64", False),
    ],
)
def test_a_plain_install_holds_json_that_nests_where_that_needs_no_compiler(system, machine, wanted):
    """As PyPI has wheels of llguidance; elsewhere it would be built with Rust."""
    required = [r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == "llguidance"]
    there = {"platform_system": system, "platform_machine": machine}
    assert [r.marker.evaluate(there) for r in required] == [wanted]


# Of packages whose name is not what is imported.
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "opentelemetry": "opentelemetry-sdk",
    "python_multipart": "python-multipart",
    "zmq": "pyzmq",
}


OPTIONAL = ("gpu", "structured", "otel", "grpc", "plots")


def test_every_import_of_the_package_is_a_declared_dependency():
    import ast

    declared = {Requirement(r).name.lower() for r in PYPROJECT["project"]["dependencies"]}
    extras = PYPROJECT["project"]["optional-dependencies"]
    optional = {Requirement(r).name.lower() for extra in OPTIONAL for r in extras[extra]}
    found = set()
    for path in [*(ROOT / "minivllm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    foreign = found - set(sys.stdlib_module_names) - {"minivllm"}
    foreign = {DISTRIBUTIONS.get(name, name) for name in foreign}
    assert foreign <= declared | optional, f"add to pyproject.toml: {sorted(foreign - declared - optional)}"


def fake_python(folder: Path, body: str) -> Path:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 1", "minivllm needs Python 3.11 or newer"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "apt install python3-venv"),
    ],
)
def test_make_says_what_is_missing(tmp_path, body, message):
    command = ["make", "setup", f"PYTHON={fake_python(tmp_path, body)}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0 and message in done.stdout + done.stderr
    assert not (tmp_path / "venv").exists()
