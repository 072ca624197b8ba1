"""The executor seam: where forwards run. One worker here, several in other processes or on other machines elsewhere."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from minivllm.plan import StepOutput, StepPlan


class Executor(Protocol):
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; one result each."""
        ...

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Run a step. Plans are executed in the order of their submission."""
        ...

    def shutdown(self) -> None:
        """Free the workers' memory. Returns once all that was submitted has ended."""
        ...
