"""What `make test` leaves out, an area has; and of each area it is known what it looks at."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from areas import ALL, AREAS, EVERYWHERE, GATE, GATE_ALONE, SOURCES, area_of, changed, looks_at, may_hold

ROOT = Path(__file__).parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def ids(file: str) -> list[str]:
    """Of a file's tests, without their parameters."""
    defs = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse((ROOT / file).read_text()).body
    inside = [(f"{c.name}::", f) for c in body if isinstance(c, ast.ClassDef) for f in c.body]
    functions = [*(("", f) for f in body), *inside]
    return [f"{file}::{of}{f.name}" for of, f in functions if isinstance(f, defs) and f.name.startswith("test_")]


def test_every_name_of_an_area_begins_a_test_that_is_there():
    for name in chain(*AREAS.values()):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists()
        assert not test or re.search(rf"^(async )?def {test}", (ROOT / path).read_text(), re.MULTILINE)


def test_each_test_is_run_by_the_gate_or_by_one_area_and_by_no_other():
    tests = [(file, nodeid, alone) for file in FILES for nodeid in ids(file) for alone in (False, True)]
    assert len(tests) > 5000
    for file, nodeid, alone in tests:
        # As tests/conftest.py does: a folder or file that may hold none is not read.
        places = (*(f"{folder.as_posix()}/" for folder in Path(file).parents[:-1]), file)
        runs = [a for a in (GATE, *AREAS) if all(may_hold(p, a) for p in places) and area_of(nodeid, alone) == a]
        assert len(runs) == 1, (nodeid, runs)


def test_only_what_is_about_time_changes_its_area():
    assert area_of("tests/fire/test_kill.py::test_it") == "fire"
    assert area_of("tests/fire/test_kill.py::test_it", alone=True) == "timing"
    assert area_of("tests/kv/test_pool.py::test_it") == GATE


# ---------------------------------------------------------------------------------------- sources


def test_of_every_file_it_is_said_who_looks_at_it():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    files = listed.stdout.decode().split()
    if not files:
        pytest.skip("no repository here")
    for file in files:
        assert file.startswith(GATE_ALONE) or any(looks_at(area, file) for area in ALL), file
    for name in {*chain(*SOURCES.values()), *EVERYWHERE, *GATE_ALONE}:
        assert any(file.startswith(name) for file in files), f"{name} is nowhere"


def imported(path: Path) -> set[str]:
    """What a file imports of this repository, as paths from its root."""
    found = names_in(ast.walk(ast.parse(path.read_text())))
    paths = [name.replace(".", "/") for name in found]
    there = [ROOT / f"{of}{path}{end}" for path in paths for of in ("", "tests/") for end in (".py", "/__init__.py")]
    return {
        path.resolve().relative_to(ROOT).as_posix() for path in there if path.is_file()
    }  # minivllm/kernels is a link


@pytest.mark.parametrize("area", AREAS)
def test_an_area_looks_at_what_its_tests_import(area):
    own = [path for path in (ROOT / "tests").rglob("*.py") if area_of(path.relative_to(ROOT).as_posix()) == area]
    assert own or area == "timing"
    for path in own:
        for source in imported(path):
            assert looks_at(area, source), f"{path.name} imports {source}"


def test_a_change_is_looked_at_by_the_areas_that_name_it():
    assert changed(["tests/sanitize/mask.cpp"]) == {"sanitize": "tests/sanitize/mask.cpp"}
    assert changed(["docs/gpu.md", "LICENSE"]) == {"site": "docs/gpu.md"}
    assert changed(["tests/fire/test_kill.py"]) == {"fire": "tests/fire/test_kill.py"}
    assert changed(["tests/kv/test_pool.py", ".gitignore"]) == {}
    assert list(changed(["pyproject.toml"])) == [*ALL]


def test_no_bench_that_tests_import_has_the_name_of_one_of_their_packages():
    """Both are found by their bare names, in one process: the first that is imported would be taken for the other."""
    benches, tests = {file.stem: file for file in (ROOT / "bench").glob("*.py")}, ROOT / "tests"
    ours = {file: names_in(ast.parse(file.read_text()).body) for file in tests.rglob("*.py")}
    packages = {name.partition(".")[0] for names in ours.values() for name in names if "." in name}
    packages = {name for name in packages if (tests / name).is_dir()}
    assert "serve" in packages  # or nothing is looked at

    coming = {name for file, names in ours.items() if file.parent.name == "bench" for name in names}
    seen: set[str] = set()
    while coming := (coming & benches.keys()) - seen:
        seen |= coming
        coming = set[str]().union(*(names_in(ast.parse(benches[name].read_text()).body) for name in coming))
        assert not coming & packages


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Of what is imported: modules, and what may be one."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
