"""tests/KNOWN.md has what fails for no good reason, and nothing that is not there; what is run again has a process or a
socket."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import again
import summary

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `(tests/\S+?\.py)::(\w+)[^`]*` \| (\d{4}-\d\d-\d\d)[^|]* \| [^|]+ \|$", re.MULTILINE)
KNOWN = (ROOT / "tests" / "KNOWN.md").read_text()
ROWS = [line for line in KNOWN.splitlines() if line.startswith("|")][2:]


def test_there_are_at_most_ten_rows_each_of_a_test_that_is_there():
    rows = ROW.findall(KNOWN)
    assert len(rows) == len(ROWS) <= 10, "a row is | `tests/file.py::test` | date | suspected cause |"
    for file, name, _ in rows:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_each_test_that_is_marked_xfail_has_a_row():
    marked = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "xfail" not in text or path == Path(__file__):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "mark.xfail" in ast.unparse(node):
                marked.add((path.relative_to(ROOT).as_posix(), node.name))
    assert marked <= {(file, name) for file, name, _ in ROW.findall(KNOWN)}


def test_a_row_is_read_as_it_is_written():
    assert ROW.findall("| `tests/serve/test_a.py::test_b[c-d]` | 2026-11-25 | two threads |") == [
        ("tests/serve/test_a.py", "test_b", "2026-11-25")
    ]
    assert not ROW.findall("| tests/serve/test_a.py | soon | |")


def test_a_test_that_was_run_again_and_has_no_row_is_told():
    again_and_again = ["tests/serve/test_a.py::test_b[c]", "tests/kv/test_c.py::test_d", "tests/kv/test_c.py::test_d"]
    assert summary.told_again(again_and_again, "| `tests/kv/test_c.py::test_d` |") == [
        "tests/serve/test_a.py::test_b[c]: wants a row in tests/KNOWN.md",
        "tests/kv/test_c.py::test_d",
    ]


# ---------------------------------------------------------------------------------------- what may be run again

TESTS = """
import subprocess, sys
from pathlib import Path

def fails_once(name):
    path = Path(__file__).with_name(name)
    seen = path.exists()
    path.touch()
    assert seen

def test_with_a_process():
    subprocess.run([sys.executable, "-c", ""])
    fails_once("a")

def test_without():
    fails_once("b")
"""


def test_what_started_a_process_is_run_again_and_what_did_not_is_not(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = process\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "again", "-p", "no:cacheprovider", "-rAR", "test_it.py"]
    env["PYTHONPATH"] = str(ROOT / "tests")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    found = re.findall(r"^(RERUN|PASSED|FAILED) test_it.py::(\w+)", done.stdout, re.MULTILINE)
    assert sorted({*found}) == [
        ("FAILED", "test_without"),
        ("PASSED", "test_with_a_process"),
        ("RERUN", "test_with_a_process"),
    ], done.stdout


def test_a_socket_counts_once_it_connects():
    assert not again.touched()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert not again.touched()
        with socket.socket() as client:
            client.connect(listening.getsockname())
        assert again.touched()
