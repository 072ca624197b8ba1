"""Rule: a cache entry is whole or absent, and two builders do the work once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from minivllm.errors import ModelError
from minivllm.loading.cache import Cache, default_cache_dir, file_key


def write_one(folder: Path) -> None:
    (folder / "a").write_text("whole")


def entries(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir())


def test_an_entry_is_built_once(tmp_path):
    built = []
    cache = Cache(tmp_path)
    for _ in range(2):
        folder = cache.entry("x", lambda f: (built.append(f), write_one(f)))
    assert (folder / "a").read_text() == "whole"
    assert len(built) == 1


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_one(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Cache(tmp_path).entry("x", fail)
    assert entries(tmp_path) == []


def _killed_in_the_middle(root: Path) -> None:
    def build(folder: Path) -> None:
        write_one(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    Cache(root).entry("x", build)


def test_what_a_killed_builder_left_is_never_used_and_is_cleared(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_killed_in_the_middle, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [name.endswith(".tmp") for name in entries(tmp_path)] == [True]
    folder = Cache(tmp_path).entry("x", write_one)
    assert (folder / "a").read_text() == "whole"
    assert entries(tmp_path) == ["x"]


def _slow_build(root: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.2)
        write_one(folder)

    assert (Cache(root).entry("x", build) / "a").read_text() == "whole"


def test_concurrent_first_starts_build_once_and_all_see_the_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    starts = [context.Process(target=_slow_build, args=(tmp_path / "cache", log)) for _ in range(4)]
    for process in starts:
        process.start()
    for process in starts:
        process.join()
    assert [p.exitcode for p in starts] == [0] * 4
    assert log.read_text() == "built\n"


def test_a_changed_file_has_another_key(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"one")
    first = file_key(file)
    assert file_key(file) == first
    file.write_bytes(b"three")
    assert file_key(file) != first


def test_a_cache_that_cannot_be_written_says_where_and_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written.*XDG_CACHE_HOME"):
        Cache(tmp_path / "file" / "cache").entry("x", write_one)


def test_the_platforms_convention_places_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "minivllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "minivllm"
