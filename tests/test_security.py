"""SECURITY.md's table: every test that it names is there, and every repair names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
ROWS = re.findall(r"^\| (\w+): (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1][:40]}")
def test_what_holds_a_finding_exists(row):
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])
    assert named and ", ".join(f"`{path}::{name}`" for path, name in named) == row[3]
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body), f"{path}::{name}"


def test_every_row_of_the_table_is_read():
    table = PAGE.partition("## What was found")[2]
    assert len(ROWS) == len(re.findall(r"^\| ", table, re.MULTILINE)) - 1 >= 10


def test_the_files_and_targets_that_the_page_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in set(re.findall(r"`(deploy/[\w.]+)`", PAGE)):
        assert (ROOT / path).is_file()
    for target in set(re.findall(r"`make ([\w-]+)`", PAGE)):
        assert f"\n{target}:" in makefile
