"""BackgroundExecutor: another executor in a thread of its own, so that a step runs while the next one is planned.

It is to the step loop what a device's stream is: work is queued, done in order, and a future says when. A row or a
block that a later plan gives to somebody else is therefore never written before the step that still reads it is done.
The thread builds the worker too: how many threads a forward takes is a setting of the thread that asks for it.

Unlike a stream's, its work stops behind a step that failed: what was queued meanwhile is not run.

Forwards leave Python's lock while they compute, and on a GPU while they wait for it; the step loop has it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minivllm.executor.base import Executor
from minivllm.plan import StepOutput, StepPlan


class StepLost(Exception):
    """The step was not run, because one that it was planned behind has failed."""


class FailStop:
    """Runs plans in their order, and none that was planned while one that fails was in flight."""

    def __init__(self, execute: Callable[[StepPlan], StepOutput]):
        self._execute = execute
        self._failed = -1  # the last step that failed or was not run

    def __call__(self, plan: StepPlan) -> StepOutput:
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
        self._run = FailStop(lambda plan: inner.submit(plan).result())

    def call(self, method: str, *args: Any) -> list[Any]:
        """Behind all steps that were submitted before."""
        return self._thread.submit(self.inner.call, method, *args).result()

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        return self._thread.submit(self._run, plan)

    def shutdown(self) -> None:
        """Returns once all that was submitted has ended."""
        if self.inner is not None:
            self._thread.submit(self.inner.shutdown).result()
            self._thread.shutdown()
            self.inner = None
