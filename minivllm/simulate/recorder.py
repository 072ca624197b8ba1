"""StepRecorder: an observer of a real engine core that keeps what each step was and took, for regression.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.cost import Step
from minivllm.simulate.regression import Sample


class StepRecorder:
    """Of a core with one step in flight: then a step's time is that between planning and its output, and all else
    between two steps is the host's."""

    def __init__(self, block_size: int, clock: Callable[[], float] = time.perf_counter):
        self.samples: list[Sample] = []
        self.host: list[tuple[int, float]] = []  # of steps that followed another at once: requests in it, seconds
        self._block_size = block_size
        self._clock = clock
        self._last: float | None = None  # end of the step before; None: nothing ran since

    def rested(self) -> None:
        """The core waited for requests: what passed since the last step is nobody's."""
        self._last = None

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_add(self, req: Any, step: int) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def close(self) -> None: ...

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: Sequence[Any], times: Mapping[str, float]) -> None:
        now, seconds = self._clock(), times["execute"] / 1e3
        if plan.num_tokens:
            self.samples.append(sample_of(plan, out, self._block_size, seconds))
            if self._last is not None:
                self.host.append((len(plan.num_tokens), max(0.0, now - self._last - seconds)))
        self._last = now


def sample_of(plan: StepPlan, out: StepOutput, block_size: int, seconds: float) -> Sample:
    count = len(plan.num_tokens)
    num_new = np.fromiter(plan.num_tokens.values(), np.int64, count)
    start = np.fromiter(plan.start.values(), np.int64, count)
    moved = len(plan.swap_out) + len(plan.swap_in)
    step = Step(num_new, start, len(out.tokens))
    return Sample(step, seconds, block_size * moved, block_size * len(plan.copies))
