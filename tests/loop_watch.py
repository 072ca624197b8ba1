"""How much an event loop does in one turn, counted and not timed: a turn of so many lines of Python, or with one long
call into C, stands still on any machine.

A turn's lines are counted by a trace function (each round of a loop is a line). What a line may hide, a call into C
that takes longer the more it is given, is watched by name: decoding and encoding JSON, and the tokenizer.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from asyncio.base_events import BaseEventLoop
from contextlib import contextmanager

import msgspec

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.serve import bodies

MAX_LINES = 100_000  # of Python in a turn: some 10 ms
MAX_SIZE = 2**17  # characters, bytes or tokens that one call in the loop is given, or gives


class LoopWatch:
    def __init__(self):
        self.faults: list[str] = []
        self.most_lines = 0

    def check(self):
        faults, self.faults, self.most_lines = self.faults, [], 0
        assert not faults, faults


class _AtWork(threading.local):
    """Of a thread. One may have been in a turn of its own when the watch began."""

    lines = 0
    where: str | None = None


@contextmanager
def watched_loops():
    """Of all threads of this process that run one."""
    watch, at_work, one_at_a_time = LoopWatch(), _AtWork(), threading.Lock()
    real_turn, real_run = BaseEventLoop._run_once, asyncio.Handle._run

    def turn(loop):
        """All callbacks that are due, before any socket is looked at again."""
        at_work.lines, at_work.where = 0, None
        real_turn(loop)
        watch.most_lines = max(watch.most_lines, at_work.lines)
        if at_work.where:
            watch.faults.append(at_work.where)

    def set_trace(function):
        """In this thread. CPython raises RuntimeError where two threads install one at once."""
        with one_at_a_time:
            sys.settrace(function)

    def run(handle):
        def trace(frame, event, arg):
            at_work.lines += 1
            if at_work.lines == MAX_LINES:
                code = frame.f_code
                at_work.where = f"over {MAX_LINES} lines in a turn, at {code.co_filename}: {code.co_name}"
            return trace

        set_trace(trace)
        try:
            real_run(handle)
        finally:
            set_trace(None)

    def sized(name, real, size_of):
        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            size = size_of(args, result)
            if size > MAX_SIZE and asyncio._get_running_loop() is not None:
                watch.faults.append(f"{name} of {size} in the loop")
            return result

        return call

    places = (
        (BaseEventLoop, "_run_once", turn),
        (asyncio.Handle, "_run", run),
        (bodies, "parse", sized("parse", bodies.parse, lambda args, _: len(args[0]))),
        (msgspec.json, "encode", sized("json.encode", msgspec.json.encode, lambda _, made: len(made))),
        (msgspec.json, "decode", sized("json.decode", msgspec.json.decode, lambda args, _: len(args[0]))),
        (TextTokenizer, "encode", sized("encode", TextTokenizer.encode, lambda args, _: len(args[1]))),
        (TextTokenizer, "decode", sized("decode", TextTokenizer.decode, lambda args, _: len(args[1]))),
    )
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, new in places:
        setattr(owner, name, new)
    try:
        yield watch
    finally:
        for owner, name, old in kept:
            setattr(owner, name, old)
