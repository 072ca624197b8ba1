"""UniExecutor: one worker in this process and this thread; submit() returns a finished future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from minivllm.plan import StepOutput, StepPlan


class UniExecutor:
    def __init__(self, make_worker: Callable[[], Any]):
        self.worker = make_worker()

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        try:
            future.set_result(self.worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        self.worker = None  # drops weights and KV
