"""The head seam: what is made of a step's hidden states. Steps 5 to 8 of ModelRunner.execute.

A model that generates samples tokens (head_sampling.py). Nothing else of the runner knows which head it has.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minivllm.batch import InputBatch
from minivllm.plan import AsyncOutput, StepOutput, StepPlan


class Head(Protocol):
    lookahead: int  # KV slots that it writes behind a request's tokens

    def __call__(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> StepOutput | AsyncOutput[StepOutput]:
        """hidden [padded T, hidden]: of the batch, in the order of its token rows. What it gives may still be on its
        way to the host."""
        ...
