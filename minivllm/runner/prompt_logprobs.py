"""Log-probabilities of prompt tokens: the consumer of SamplingParams.prompt_logprobs.

A position's logits predict the next token, so a chunk that computes positions start .. end-1 reports prompt tokens
start+1 .. end. They are made from the same hidden states as the sampled token, chunk by chunk, and may travel to the
host while the next step runs (async_sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from minivllm.batch import InputBatch
from minivllm.plan import AsyncOutput, Join, PositionLogprobs, StepPlan
from minivllm.sampling.logprobs import Columns, find_logprobs, read_logprobs
from minivllm.upload import upload

Found = dict[str, list[PositionLogprobs]]  # by request
Send = Callable[[Sequence[Tensor]], AsyncOutput[list[np.ndarray]]]  # tensors to the host
NOTHING: AsyncOutput[Found] = AsyncOutput.ready({})


def read_at_once(tensors: Sequence[Tensor]) -> AsyncOutput[list[np.ndarray]]:
    return AsyncOutput.ready([tensor.cpu().numpy() for tensor in tensors])


class PromptLogprobs:
    def __init__(self, logits_of: Callable[[Tensor], Tensor], send: Send = read_at_once):
        self._logits_of = logits_of
        self._send = send
        self._prompts: dict[int, tuple[list[int], int]] = {}  # by row, of who asked: prompt, how many likeliest

    def join(self, row: int, join: Join) -> None:
        if join.params.prompt_logprobs is not None:
            self._prompts[row] = join.token_ids[: join.num_prompt_tokens], join.params.prompt_logprobs

    def leave(self, row: int) -> None:
        self._prompts.pop(row, None)

    def __call__(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> AsyncOutput[Found]:
        asked: list[tuple[str, int]] = []  # whose, and how many likeliest
        tensors: list[Tensor] = []  # the Columns of each
        for i, row in enumerate(batch.rows.tolist() if self._prompts else ()):
            if row not in self._prompts:
                continue
            prompt, num_top = self._prompts[row]
            req_id = batch.req_ids[i]
            start, first = plan.start[req_id], int(batch.query_start[i])
            targets = prompt[start + 1 : start + plan.num_tokens[req_id] + 1]
            if targets:
                logits = self._logits_of(hidden[first : first + len(targets)])
                tensors += find_logprobs(logits, upload(np.array(targets), logits.device), num_top)
                asked.append((req_id, num_top))
        return self._send(tensors).then(partial(_read, asked)) if asked else NOTHING


def _read(asked: Sequence[tuple[str, int]], arrays: Sequence[np.ndarray]) -> Found:
    found, width = {}, len(Columns._fields)
    for i, (req_id, num_top) in enumerate(asked):
        columns = arrays[width * i : width * (i + 1)]
        found[req_id] = read_logprobs(columns, [num_top] * len(columns[0]))
    return found
