"""Log-probabilities of prompt tokens: the consumer of SamplingParams.prompt_logprobs.

A position's logits predict the next token, so a chunk that computes positions start .. end-1 reports prompt tokens
start+1 .. end. They are made from the same hidden states as the sampled token, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.plan import Join, PositionLogprobs, StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.sampling.logprobs import position_logprobs


class PromptLogprobs:
    def __init__(self, logits_of: Callable[[Tensor], Tensor]):
        self._logits_of = logits_of
        self._prompts: dict[str, tuple[list[int], int]] = {}  # of the requests that asked: prompt, how many likeliest

    def join(self, join: Join) -> None:
        if join.params.prompt_logprobs is not None:
            prompt = join.token_ids[: join.num_prompt_tokens]
            self._prompts[join.req_id] = (prompt, join.params.prompt_logprobs)

    def leave(self, req_id: str) -> None:
        self._prompts.pop(req_id, None)

    def __call__(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> dict[str, list[PositionLogprobs]]:
        if not self._prompts:
            return {}
        found = {}
        for i, req_id in enumerate(batch.req_ids):
            if req_id not in self._prompts:
                continue
            prompt, num_top = self._prompts[req_id]
            start, first = plan.start[req_id], int(batch.query_start[i])
            targets = prompt[start + 1 : start + plan.num_tokens[req_id] + 1]
            if targets:
                logits = self._logits_of(hidden[first : first + len(targets)])
                found[req_id] = position_logprobs(logits, torch.tensor(targets, device=logits.device), num_top)
        return found
