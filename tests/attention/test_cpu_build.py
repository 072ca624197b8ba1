"""The kernels are compiled once; where they cannot be, the reason is a sentence and nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minivllm.kernels.cpu import build

FAKE = """#!/bin/sh
echo run >> {log}
for last; do :; done
{action}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(action) puts a compiler on the PATH that does that ($last: the output file); returns its log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(action: str) -> Path:
        path, log = tmp_path / "c++", tmp_path / "log"
        path.write_text(FAKE.format(log=log, action=action))
        path.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name: str(path) if name == "c++" else None)
        return log

    return make


def entries(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "cache" / "minivllm" / "kernels").iterdir() if p.is_dir()]


def test_they_are_compiled_once_and_say_so(compiler, tmp_path, capsys):
    log = compiler('echo library > "$last"')
    first, second = build.path("attention"), build.path("attention")
    assert first == second and first.read_text() == "library\n"
    assert log.read_text() == "run\n" and len(entries(tmp_path)) == 1
    assert capsys.readouterr().err.count("compiling") == 1


def test_another_source_is_another_library(compiler, tmp_path, monkeypatch):
    compiler('echo library > "$last"')
    first = build.path("attention")
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    (sources / "simd.h").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.path("attention") != first


@pytest.mark.parametrize(("maker", "told"), [("GenuineIntel", True), ("AuthenticAMD", False), ("", False)])
def test_the_maker_of_the_cpu_is_told_and_makes_another_library(compiler, tmp_path, monkeypatch, maker, told):
    compiler('echo "$*" > "$last"')
    monkeypatch.setattr(build.machine, "cpu_maker", lambda: "another")
    other = build.path("attention")
    monkeypatch.setattr(build.machine, "cpu_maker", lambda: maker)
    path = build.path("attention")
    assert ("-DMINIVLLM_INTEL" in path.read_text().split()) == told == (path != other)


def test_older_flags_are_tried(compiler):
    log = compiler('case "$*" in *-march=native*) exit 1;; esac; echo library > "$last"')
    assert build.path("attention").is_file()
    assert log.read_text() == "run\nrun\n"


def test_a_full_disk_is_called_that_and_no_other_flags_are_tried(compiler, tmp_path, capsys):
    log = compiler('echo "/tmp/ccX.s: fatal error: error writing to /tmp/ccX.s: No space left on device" >&2; exit 1')
    with pytest.raises(build.Unbuildable, match="a disk is full.*No space left on device"):
        build.path("attention")
    assert log.read_text() == "run\n" and entries(tmp_path) == []
    assert "not for this CPU" not in capsys.readouterr().err


def test_a_library_that_is_not_what_was_compiled_is_not_loaded(compiler):
    log = compiler('echo library > "$last"')
    build.path("attention").write_text("somebody's")
    assert build.path("attention").read_text() == "library\n" and log.read_text() == "run\nrun\n"


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(compiler, tmp_path):
    compiler('echo "simd.h:1: error: no such vector" >&2; exit 1')
    with pytest.raises(build.Unbuildable, match="cannot compile the kernels: simd.h:1: error: no such vector"):
        build.path("attention")
    assert entries(tmp_path) == []


def test_no_compiler_is_a_reason(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.Unbuildable, match="no C\\+\\+ compiler on the PATH"):
        build.path("attention")


def test_a_library_that_does_not_load_is_a_reason(compiler):
    compiler('echo "no library" > "$last"')
    with pytest.raises(build.Unbuildable, match="do not load"):
        build.library.__wrapped__()
