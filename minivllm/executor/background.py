"""BackgroundExecutor: another executor in a thread of its own, so that a step runs while the next one is planned.

It is to the step loop what a device's stream is: work is queued, done in order, and its output says when. A row or a
block that a later plan gives to somebody else is therefore never written before the step that still reads it is done.
The thread builds the worker too: how many threads a forward takes is a setting of the thread that asks for it.

Unlike a stream's, its work stops behind a step that failed: what was queued meanwhile is not run.

The output of a step that a device has been given may not be here when the next plan comes (runner/async_sampling.py).
The thread then starts the next one first: it waits for a device only while it has nothing to give it.

Forwards leave Python's lock while they compute, and on a GPU while they wait for it; the step loop has it meanwhile.
What comes between two forwards (verify, guess, the next inputs) is Python too, and there the step loop, given a step's
output, would take the lock and keep the device waiting. So where the next plan is here already, an output is handed out
when that plan's forward begins (`hold_until_forwards`):

    this thread  | forward n | verify, guess n; inputs n + 1 | forward n + 1              |
    step loop                                                | take n in, plan n + 2 |
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minivllm.executor.base import Executor
from minivllm.plan import AsyncOutput, StepOutput, StepPlan

POLL_SECONDS = 20e-6

logger = logging.getLogger("minivllm")


class StepLost(Exception):
    """The step was not run, because one that it was planned behind has failed."""


class FailStop:
    """Runs plans in their order, and none that was planned while one that fails was in flight."""

    def __init__(self, execute: Callable[[StepPlan], Any]):
        """execute: what it gives is given on."""
        self._execute = execute
        self._failed = -1  # the last step that failed or was not run

    def __call__(self, plan: StepPlan) -> Any:
        failed, self._failed = self._failed, plan.step
        if plan.step - plan.num_in_flight <= failed:
            raise StepLost(f"step {failed} has failed")
        out = self._execute(plan)
        self._failed = failed
        return out


class BackgroundExecutor:
    def __init__(self, make: Callable[[], Executor]):
        """Raises what `make` raises."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minivllm-worker")
        inner = self._thread.submit(make).result()
        self.inner: Executor | None = inner
        self._start = FailStop(inner.submit)
        self._in_flight: deque[tuple[AsyncOutput[StepOutput], Future[StepOutput]]] = deque()  # (step, who waits for it)
        self._held: list[tuple[Future[StepOutput], AsyncOutput[StepOutput]]] = []  # ended, and nobody knows yet
        self._holds = False
        self._num_queued = 0  # plans that have not been started
        self._lock = threading.Lock()

    def hold_until_forwards(self) -> None:
        """For workers that say when the device is at work (`tell_forwards`)."""
        self.call("tell_forwards", self._hand_out)
        self._holds = True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Behind all steps that were submitted before."""
        assert self.inner is not None, "shut down"
        return self._thread.submit(self.inner.call, method, *args).result()

    def tell(self, method: str, *args: Any) -> None:
        assert self.inner is not None, "shut down"
        self._thread.submit(self._tell, self.inner, method, *args)

    def _tell(self, inner: Executor, method: str, *args: Any) -> None:
        try:
            inner.tell(method, *args)
        except Exception:  # a step that needs what it should have done says so to its requests
            logger.exception("a worker could not do %s", method)

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        future: Future[StepOutput] = Future()
        self._count(1)
        self._thread.submit(self._run, plan, future)
        return AsyncOutput(future.done, future.result)

    def _run(self, plan: StepPlan, future: Future[StepOutput]) -> None:
        self._count(-1)
        try:
            self._in_flight.append((self._start(plan), future))
        except Exception as error:
            self._held.append((future, AsyncOutput.failed(error)))
        self._hand_out()  # where the step had no forward
        self._finish()

    def _hand_out(self) -> None:
        """Whoever waits for the steps that have ended has them from now on."""
        for future, output in self._held:
            try:
                future.set_result(output.result())
            except Exception as error:
                future.set_exception(error)
        self._held.clear()

    def _finish(self) -> None:
        """In their order, until there is a plan to start: whoever starts it comes back here."""
        while self._in_flight and self._finishes(*self._in_flight[0]):
            self._in_flight.popleft()
            if not (self._holds and self._num_queued):  # before it waits for another one
                self._hand_out()

    def _finishes(self, step: AsyncOutput[StepOutput], future: Future[StepOutput]) -> bool:
        """False: there is a plan to start. A device that has failed may say so when it is asked whether it is done."""
        try:
            while not step.is_ready():
                if self._num_queued:
                    return False
                time.sleep(POLL_SECONDS)
            self._held.append((future, AsyncOutput.ready(step.result())))
        except Exception as error:
            self._held.append((future, AsyncOutput.failed(error)))
        return True

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_queued += change

    def shutdown(self) -> None:
        """Returns once all that was submitted has ended."""
        if self.inner is not None:
            self._thread.submit(self.inner.shutdown).result()
            self._thread.shutdown()
            self.inner = None
