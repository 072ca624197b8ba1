"""UniExecutor: one worker in this process and this thread. A step's output is there, or on its way from the device: who
asks for it waits, in the thread that asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.plan import AsyncOutput, StepOutput, StepPlan


class UniExecutor:
    def __init__(self, make_worker: Callable[[], Any]):
        self.worker: Any = make_worker()  # None: shut down

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def tell(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        out = self.worker.execute(plan)
        return out if isinstance(out, AsyncOutput) else AsyncOutput.ready(out)

    def shutdown(self) -> None:
        self.worker = None  # drops weights and KV
