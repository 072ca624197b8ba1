"""Rule: a cache entry is whole or absent, and two builders do the work once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from minivllm.errors import ModelError
from minivllm.loading import cache as module
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


# ------------------------------------------------------------------------------------------------------ what is run


@pytest.fixture
def sealed(tmp_path):
    """sealed(): the file of an entry, from a cache of which `built` counts what was built."""
    cache = Cache(tmp_path / "root")

    def get() -> Path:
        return cache.sealed_entry("x", "a", lambda folder: (get.built.append(folder), write_one(folder)))

    get.built, get.cache = [], cache
    return get


def test_a_sealed_entry_is_built_once(sealed):
    assert sealed() == sealed() == sealed.cache.sealed("x", "a") and len(sealed.built) == 1
    assert sealed().read_text() == "whole"


def changed(path: Path, monkeypatch) -> None:
    path.write_text("other")


def without_digest(path: Path, monkeypatch) -> None:
    path.with_name(module.DIGEST).unlink()


def open_to_others(path: Path, monkeypatch) -> None:
    path.chmod(0o666)


def in_an_open_folder(path: Path, monkeypatch) -> None:
    path.parent.chmod(0o777)


def a_link(path: Path, monkeypatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def of_another_name(path: Path, monkeypatch) -> None:
    """Whole, and ours, but another library."""
    cache = Cache(path.parent.parent)
    cache.sealed_entry("y", "a", lambda folder: (folder / "a").write_text("another"))
    cache.discard("x")
    (cache.root / "y").rename(path.parent)


def somebody_elses(path: Path, monkeypatch) -> None:
    found = path.stat()
    mine = (found.st_ino, found.st_mtime_ns)  # a number is free again once its file is gone
    monkeypatch.setattr(
        module, "_owner", lambda stat: 4711 if (stat.st_ino, stat.st_mtime_ns) == mine else os.geteuid()
    )


@pytest.mark.parametrize(
    "how", [changed, without_digest, open_to_others, in_an_open_folder, a_link, of_another_name, somebody_elses]
)
def test_what_may_be_somebody_elses_is_never_used_but_built_again(sealed, monkeypatch, caplog, how):
    how(sealed(), monkeypatch)
    assert sealed.cache.sealed("x", "a") is None
    assert sealed().read_text() == "whole" and len(sealed.built) == 2
    assert "is not used, and built again" in caplog.text
    assert sealed() and len(sealed.built) == 2


def test_the_folder_of_a_cache_is_closed_to_others(sealed, caplog):
    sealed()
    sealed.cache.root.chmod(0o777)
    assert sealed() and len(sealed.built) == 1
    assert sealed.cache.root.stat().st_mode & 0o777 == 0o755 and "others could write" in caplog.text


def test_nothing_is_run_from_somebody_elses_cache(sealed, monkeypatch):
    root = sealed().parent.parent.stat().st_ino
    monkeypatch.setattr(module, "_owner", lambda stat: 4711 if stat.st_ino == root else os.geteuid())
    assert sealed.cache.sealed("x", "a") is None
    with pytest.raises(ModelError, match="belongs to user 4711.*XDG_CACHE_HOME"):
        sealed()
    assert len(sealed.built) == 1
