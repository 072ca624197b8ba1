"""What processes of our own leave behind, when they or their parents end in the middle of something: nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minivllm import child

MAKES_FOLDERS = """
import threading
from minivllm import child
from minivllm.terminal import interrupts_end_at_once

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
def test_an_interrupt_leaves_no_folder_whichever_thread_was_making_one(short_folder, _):
    making = subprocess.Popen(
        [sys.executable, "-c", MAKES_FOLDERS], env=os.environ | {"TMPDIR": str(short_folder)}, stdout=subprocess.PIPE
    )
    assert making.stdout.readline() == b"making\n"
    while not any(short_folder.iterdir()):
        pass
    making.send_signal(signal.SIGINT)
    making.stdout.close()
    assert making.wait(30) == 130
    assert list(short_folder.iterdir()) == []


def test_a_file_by_which_tempfile_tries_a_folder_is_gone_before_an_interrupt_ends_all(short_folder, monkeypatch):
    monkeypatch.setattr(child.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(short_folder))
    monkeypatch.setattr(child, "_making", threading.RLock())
    unlink, trying, ending = os.unlink, threading.Event(), threading.Event()

    def slow_unlink(path, **options):
        trying.set()
        ending.wait(10)
        unlink(path, **options)

    monkeypatch.setattr(child.tempfile._os, "unlink", slow_unlink)
    making = threading.Thread(target=child.make_folder, daemon=True)
    making.start()
    assert trying.wait(10) and len(list(short_folder.iterdir())) == 1
    removing = threading.Thread(target=child.remove_unclaimed, daemon=True)  # as the interrupt does, in the main thread
    removing.start()
    removing.join(0.2)
    assert removing.is_alive(), "the process would end, and the file stay"
    ending.set()
    removing.join(10)
    assert not removing.is_alive() and list(short_folder.iterdir()) == []


def test_a_folder_is_its_users_alone_and_whoever_claims_it_removes_it(short_folder, monkeypatch):
    monkeypatch.setattr(child.tempfile, "tempdir", str(short_folder))
    monkeypatch.setattr(child, "_making", threading.RLock())  # which this test keeps
    mine, given = child.make_folder(), child.make_folder()
    assert Path(mine).stat().st_mode & 0o777 == 0o700
    child.claimed(given)
    child.remove_unclaimed()
    assert [str(path) for path in short_folder.iterdir()] == [given]


def test_a_folder_that_is_being_removed_goes_to_no_child(short_folder, monkeypatch):
    """It would be told to work in a folder that is gone, and say so in a traceback."""
    monkeypatch.setattr(child.tempfile, "tempdir", str(short_folder))
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


def test_a_long_tmpdir_has_no_place_for_sockets(tmp_path, monkeypatch):
    deep = tmp_path / ("a folder with a long name " * 4)
    deep.mkdir()
    monkeypatch.setattr(child.tempfile, "tempdir", str(deep))
    monkeypatch.setattr(child, "_making", threading.RLock())
    folder = Path(child.make_folder())
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / ("m" * child._LONGEST_NAME)))
    finally:
        child.remove_unclaimed()
    assert not folder.exists() and list(deep.iterdir()) == []


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
