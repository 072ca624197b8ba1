"""The tests of chapter 13's exercise. Their clock is a made-up one: it jumps to whatever is waited for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from exercise import offer


class JumpingSelector(selectors.DefaultSelector):
    """Nothing outside can happen, so a wait for an event is over at once, and the clock has moved on by its length."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.seconds += timeout or 0.0
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.seconds


def run(make_ask: Callable[[JumpingLoop], Any], wanted: list[float]) -> list[Any]:
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(offer(make_ask(loop), wanted))
    finally:
        loop.close()


def near(values: list[float], expected: list[float]) -> bool:
    return len(values) == len(expected) and all(abs(a - b) < 0.01 for a, b in zip(values, expected, strict=True))


def takes(seconds: float) -> Callable[[JumpingLoop], Any]:
    """A server that needs so long for each request, however many there are."""
    return lambda loop: lambda i: asyncio.sleep(seconds)


def one_at_a_time(seconds: float) -> Callable[[JumpingLoop], Any]:
    """A server with a queue."""

    def make(loop: JumpingLoop) -> Any:
        lock = asyncio.Lock()

        async def ask(i: int) -> None:
            async with lock:
                await asyncio.sleep(seconds)

        return ask

    return make


def test_requests_do_not_wait_for_each_other():
    answers = run(takes(1.0), [0.0, 0.25, 0.5])
    assert near([answer.latency for answer in answers], [1.0, 1.0, 1.0])
    assert near([answer.late for answer in answers], [0.0, 0.0, 0.0])
    assert not any(answer.failed for answer in answers)


def test_waiting_in_the_servers_queue_counts():
    answers = run(one_at_a_time(1.0), [0.0, 0.25, 0.5, 4.0])
    assert near([answer.latency for answer in answers], [1.0, 1.75, 2.5, 1.0])


def test_requests_go_out_when_their_time_has_come():
    sent: list[float] = []

    def make(loop: JumpingLoop) -> Any:
        async def ask(i: int) -> None:
            sent.append(loop.time())

        return ask

    run(make, [0.5, 0.75, 2.0])
    assert near(sent, [0.5, 0.75, 2.0])


def test_a_client_that_was_busy_says_so_and_counts_it():
    def make(loop: JumpingLoop) -> Any:
        async def ask(i: int) -> None:
            if i == 0:
                loop.clock.seconds += 2.0  # the client itself computes, and cannot send
            await asyncio.sleep(0.5)

        return ask

    answers = run(make, [0.0, 0.25])
    assert near([answer.late for answer in answers], [0.0, 1.75])
    assert near([answer.latency for answer in answers], [2.5, 2.25])


def test_a_failure_is_its_own_requests():
    def make(loop: JumpingLoop) -> Any:
        async def ask(i: int) -> None:
            await asyncio.sleep(0.5)
            if i == 1:
                raise ConnectionError("no answer")

        return ask

    answers = run(make, [0.0, 0.25, 0.5])
    assert [answer.failed for answer in answers] == [False, True, False]
    assert near([answer.latency for answer in answers], [0.5, 0.5, 0.5])
