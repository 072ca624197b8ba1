"""The executor seam: where forwards run. One worker here, several in other processes or on other machines elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from minivllm.plan import AsyncOutput, StepOutput, StepPlan


class Executor(Protocol):
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; one result each."""
        ...

    def tell(self, method: str, *args: Any) -> None:
        """Have every worker call it, behind the plans that were submitted before. Nobody waits for that."""
        ...

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        """Run a step. Plans are executed in the order of their submission. What the step raises, this call raises or
        the output's result()."""
        ...

    def shutdown(self) -> None:
        """Free the workers' memory. Returns once all that was submitted has ended."""
        ...
