"""Worker: one device's runner, and what else a control plane asks of it by name. `engine/build/worker.py` builds it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minivllm.batch import BatchKey
from minivllm.config import Decisions
from minivllm.facts import WorkerFacts
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.runner.calibrate import preemption_costs
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward import AnnouncedForward
from minivllm.runner.runner import ModelRunner

Execute = Callable[[StepPlan], StepOutput | AsyncOutput[StepOutput]]


class Worker:
    """decisions: every choice made for the user, with its reason. known: set by whoever builds it, as the last step."""

    known: WorkerFacts

    def __init__(
        self,
        runner: ModelRunner,
        dummies: DummyBatches,
        decisions: Decisions,
        around: Callable[[Execute], Execute] = lambda execute: execute,
    ):
        """around: what stands between plans and the runner."""
        self.runner = runner
        self._execute = around(runner.execute)
        self.dummies = dummies
        self.decisions = decisions

    def facts(self) -> WorkerFacts:
        return self.known

    def execute(self, plan: StepPlan) -> StepOutput | AsyncOutput[StepOutput]:
        return self._execute(plan)

    def tell_forwards(self, tell: Callable[[], None]) -> None:
        """tell: called in each step that computes, once the device is at work and the host is not."""
        runner, blocks = self.runner, self.known.info["device"] == "cpu"
        runner.forward = AnnouncedForward(runner.forward, tell, blocks)

    @torch.inference_mode()
    def run_dummy(self, key: BatchKey) -> None:
        """A whole forward of that shape, which no request sees."""
        self.runner.run_model(self.dummies.make(*key))

    def measure_costs(self) -> dict[str, float]:
        """What a preemption costs here: seconds_per_token to recompute, seconds_per_block to move one way."""
        costs, reason = preemption_costs(self.runner, self.dummies)
        self.decisions.note("kv.preemption", "auto", reason)
        return costs

    def hold_item(self, digest: str, content: bytes) -> None:
        """What an item holds, of which plans will say the digest."""
        self.runner.model_state.contents[digest] = content

    def drop_item(self, digest: str) -> None:
        del self.runner.model_state.contents[digest]

    def load_adapter(self, key: str, path: str) -> int:
        """The adapter's rank. Raises AdapterError."""
        return self.runner.adapters.load(key, path)

    def drop_adapter(self, key: str) -> None:
        self.runner.adapters.drop(key)
