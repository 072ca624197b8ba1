"""Log-probabilities of prompt tokens: the consumer of SamplingParams.prompt_logprobs.

A position's logits predict the next token, so a chunk that computes positions start .. end-1 reports prompt tokens
start+1 .. end. They are made from the same hidden states as the sampled token, chunk by chunk, and may travel to the
host while the next step runs (late.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from minivllm.plan import Join, PositionLogprobs, StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.sampling.logprobs import Columns, find_logprobs, read_logprobs
from minivllm.upload import upload


class OnTheirWay(Protocol):
    """Tensors, to the host."""

    def is_here(self) -> bool: ...
    def open(self) -> list[np.ndarray]: ...


Send = Callable[[Sequence[Tensor]], OnTheirWay]


@dataclass(frozen=True, slots=True)
class Here:
    """OnTheirWay, and arrived."""

    arrays: list[np.ndarray]

    def is_here(self) -> bool:
        return True

    def open(self) -> list[np.ndarray]:
        return self.arrays


def read_at_once(tensors: Sequence[Tensor]) -> Here:
    return Here([tensor.cpu().numpy() for tensor in tensors])


class PromptLogprobs:
    def __init__(self, logits_of: Callable[[Tensor], Tensor], send: Send = read_at_once):
        self._logits_of = logits_of
        self._send = send
        self._prompts: dict[str, tuple[list[int], int]] = {}  # of the requests that asked: prompt, how many likeliest

    def join(self, join: Join) -> None:
        if join.params.prompt_logprobs is not None:
            prompt = join.token_ids[: join.num_prompt_tokens]
            self._prompts[join.req_id] = (prompt, join.params.prompt_logprobs)

    def leave(self, req_id: str) -> None:
        self._prompts.pop(req_id, None)

    def __call__(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> PromptParcel:
        parcel = PromptParcel()
        tensors: list[Tensor] = []
        for i, req_id in enumerate(batch.req_ids if self._prompts else ()):
            if req_id not in self._prompts:
                continue
            prompt, num_top = self._prompts[req_id]
            start, first = plan.start[req_id], int(batch.query_start[i])
            targets = prompt[start + 1 : start + plan.num_tokens[req_id] + 1]
            if targets:
                logits = self._logits_of(hidden[first : first + len(targets)])
                tensors += find_logprobs(logits, upload(np.array(targets), logits.device), num_top)
                parcel.asked.append((req_id, num_top))
        if tensors:
            parcel.sent = self._send(tensors)
        return parcel


@dataclass(slots=True)
class PromptParcel:
    """What one step found."""

    asked: list[tuple[str, int]] = field(default_factory=list)  # whose, and how many likeliest
    sent: OnTheirWay = field(default_factory=lambda: Here([]))  # the Columns of each

    def is_here(self) -> bool:
        return self.sent.is_here()

    def open(self) -> dict[str, list[PositionLogprobs]]:
        arrays, width = self.sent.open(), len(Columns._fields)
        found = {}
        for i, (req_id, num_top) in enumerate(self.asked):
            columns = arrays[width * i : width * (i + 1)]
            found[req_id] = read_logprobs(columns, [num_top] * len(columns[0]))
        return found
