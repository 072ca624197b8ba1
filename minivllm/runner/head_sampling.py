"""SamplingHead: hidden states become tokens, and what was asked for beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor, nn

from minivllm.batch import InputBatch
from minivllm.plan import NO_DISTRIBUTION, AsyncOutput, StepOutput, StepPlan
from minivllm.runner.async_sampling import AsyncVerifier
from minivllm.runner.inputs import InputBuilder
from minivllm.runner.prompt_logprobs import Found, PromptLogprobs
from minivllm.sampling.base import Sampled
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.verify import Verifier
from minivllm.spec_decode.base import Proposer
from minivllm.upload import select


@dataclass(slots=True)
class SamplingHead:
    """A Head. It knows no feature by name either: each part keeps its own state of a request."""

    model: nn.Module  # whose `logits` it calls
    inputs: InputBuilder  # which is told of new tokens
    sampler: Sampler
    verifier: Verifier | AsyncVerifier
    proposer: Proposer
    prompt_logprobs: PromptLogprobs

    @property
    def lookahead(self) -> int:
        return self.proposer.lookahead

    def __call__(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> StepOutput | AsyncOutput[StepOutput]:
        prompts = self.prompt_logprobs(plan, batch, hidden)  # 5
        sampled = self._sample(batch, hidden)  # 6
        self.inputs.append(batch, batch.sample_requests[sampled.kept], sampled.tokens)  # 7
        finish = partial(self._report, plan, batch, hidden, sampled, prompts)  # 8
        output = AsyncOutput(lambda: prompts.is_ready() and sampled.output.is_ready(), finish)
        return output.result() if output.is_ready() else output

    def _sample(self, batch: InputBatch, hidden: Tensor) -> Sampled:
        """Final tokens: of each sampled request the drafts that were accepted, and one more."""
        samples = batch.sample_tokens
        if not len(samples):
            return Sampled(np.empty(0, np.int64), [], kept=np.empty(0, np.int64))
        logits = self.model.logits(select(hidden, samples))
        positions = batch.positions_of(samples, batch.sample_requests) + 1  # of the token being drawn
        return self.verifier(logits, batch.rows[batch.sample_requests], positions, batch.draft_tokens)

    def _report(
        self, plan: StepPlan, batch: InputBatch, hidden: Tensor, sampled: Sampled, prompts: AsyncOutput[Found]
    ) -> StepOutput:
        """Write down what was sampled, and what may follow. Perhaps behind the start of the next step."""
        out = StepOutput(prompt_logprobs=prompts.result())
        requests = batch.sample_requests[sampled.kept].tolist()
        sampled = sampled.output.result()
        for i, token, logprobs in zip(requests, sampled.tokens.tolist(), sampled.logprobs, strict=True):
            req_id = batch.req_ids[i]
            out.tokens.setdefault(req_id, []).append(token)
            if logprobs is not None:
                out.logprobs.setdefault(req_id, []).append(logprobs)
        for i in sampled.invalid.tolist():
            why = self.sampler.failure(int(batch.rows[requests[i]]))
            out.errors[batch.req_ids[requests[i]]] = why or NO_DISTRIBUTION
        out.drafts = self.proposer.propose(plan, batch, out.tokens, hidden)
        return out
