"""UniExecutor: one worker in this process and this thread; submit() returns a finished future, or one of a step whose
tokens are on their way from the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from minivllm.plan import Landing, StepOutput, StepPlan


class Started(Future[StepOutput]):
    """Whoever asks for the result waits for the tokens, in the thread that asks."""

    def __init__(self, landing: Landing):
        super().__init__()
        self._landing = landing

    def done(self) -> bool:
        return super().done() or self._landing.is_here()

    def result(self, timeout: float | None = None) -> StepOutput:
        if not super().done():
            self.set_result(self._landing.land())
        return super().result()


class UniExecutor:
    def __init__(self, make_worker: Callable[[], Any]):
        self.worker = make_worker()

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        try:
            out = self.worker.execute(plan)
            if isinstance(out, Landing):
                return Started(out)
            future.set_result(out)
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        self.worker = None  # drops weights and KV
