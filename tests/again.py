"""Which tests may be run again when they fail: those in which a process was started or a socket connected, twice. What
another program or the kernel does meanwhile is not in a test's hands, and nothing else may excuse a failure.

Nobody has to say so: the interpreter tells (PEP 578). The mark `process` is for tests whose process a fixture of the
whole module started, like those in a browser. A test that was run again is named at the end, and wants a row in
tests/KNOWN.md.
"""

from __future__ import annotations

import socket
import sys

import pytest

RERUNS = 2
EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "socket.connect", "subprocess.Popen"}

_touched = False
_listens = False


def _note(event: str, _: tuple) -> None:
    global _touched
    if event in EVENTS:
        _touched = True


def touched() -> bool:
    """Whether the test that runs has started a process, or connected a socket, so far."""
    return _touched


def pytest_configure(config):
    global _listens
    if not _listens:  # what is added cannot be removed
        sys.addaudithook(_note)
        _listens = True


def pytest_sessionstart(session):
    """pytest-rerunfailures tells the process that began this one of each test, in two small messages: the second waited
    40 ms for the first one's receipt."""
    if hasattr(session.config, "workerinput") and (db := getattr(session.config, "failures_db", None)):
        db.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(config, items):
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        condition = item.get_closest_marker("process") is not None or touched
        item.add_marker(pytest.mark.flaky(reruns=RERUNS, condition=condition))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    global _touched
    _touched = False
    return (yield)
