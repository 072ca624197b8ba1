"""Work for tests/test_sandbox.py: a task is one of these words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator


def prepare(setup: bytes) -> Callable[[bytes], bytes | Iterator[bytes]]:
    if setup == b"broken":
        raise RuntimeError("cannot be prepared")

    def parts() -> Iterator[bytes]:
        for number in range(1000):
            yield bytes(100_000) + b"%d" % number

    def work(task: bytes) -> bytes | Iterator[bytes]:
        if task == b"parts":
            return parts()
        if task == b"for ever":
            while True:
                pass
        if task == b"for ever, in C":  # one call, in which nobody else gets the interpreter
            return b"%d" % (9 ** (9**9))
        if task == b"memory":
            return bytes(1 << 40)
        if task == b"memory, slowly":
            kept = []
            while True:
                kept.append(bytes(1 << 20))
        if task == b"crash":
            os.abort()
        if task == b"raise":
            raise ValueError("a defect")
        if task == b"print":
            print("not an answer")
            os.write(1, b"nor this")
            sys.stdout.flush()
        return b"%s %s by %d" % (setup, task, os.getpid())

    return work
