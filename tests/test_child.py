"""What processes of our own leave behind, when they or their parents end in the middle of something: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minivllm import child

MAKES_FOLDERS = """
import threading
from minivllm import child
from minivllm.cli import interrupts_end_at_once

def make():
    while True:
        child.make_folder()

with interrupts_end_at_once():
    for _ in range(3):
        threading.Thread(target=make, daemon=True).start()
    print("making", flush=True)
    make()
"""


@pytest.mark.parametrize("_", range(4))
def test_an_interrupt_leaves_no_folder_whichever_thread_was_making_one(tmp_path, _):
    making = subprocess.Popen(
        [sys.executable, "-c", MAKES_FOLDERS], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE
    )
    assert making.stdout.readline() == b"making\n"
    while not any(tmp_path.iterdir()):
        pass
    making.send_signal(signal.SIGINT)
    making.stdout.close()
    assert making.wait(30) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_its_users_alone_and_whoever_claims_it_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(child.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(child, "_making", threading.RLock())  # which this test keeps
    mine, given = child.make_folder(), child.make_folder()
    assert Path(mine).stat().st_mode & 0o777 == 0o700
    child.claimed(given)
    child.remove_unclaimed()
    assert [str(path) for path in tmp_path.iterdir()] == [given]


def test_a_folder_that_is_being_removed_goes_to_no_child(tmp_path, monkeypatch):
    """It would be told to work in a folder that is gone, and say so in a traceback."""
    monkeypatch.setattr(child.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(child, "_making", threading.RLock())
    folder = child.make_folder()
    child.remove_unclaimed()
    giving = threading.Thread(target=child.claimed, args=(folder,), daemon=True)
    giving.start()
    giving.join(0.3)
    assert giving.is_alive(), "its task would be sent next"
    child._making.release()  # as never happens: the process ends
    giving.join(10)
    assert not giving.is_alive()


def test_a_folder_that_is_written_into_while_it_is_removed_goes_too(tmp_path, monkeypatch):
    """As a core that opens its sockets while its parent ends."""
    folder, rmtree, late = tmp_path / "of a core", child.shutil.rmtree, ["replies", "requests"]
    folder.mkdir()

    def written_into(path, ignore_errors):
        if late:
            (path / late.pop()).touch()
            return
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(child.shutil, "rmtree", written_into)
    child.remove_folder(folder)
    assert not folder.exists() and not late
