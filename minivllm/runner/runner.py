"""ModelRunner: one plan in, one output out, in eight named steps.

Be paranoid about changing this file. It knows no feature by name: what a request wants beyond its next token lives in
the parts that the runner is built from (sampler, verifier, proposer, prompt log-probabilities, block moves, input
builder, attention backend), each of which keeps its own state. The less common a feature, the further from here it
belongs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.plan import NO_DISTRIBUTION, Landing, StepOutput, StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.forward import ForwardRunner
from minivllm.runner.inputs import InputBuilder, Rows
from minivllm.runner.late import LateTokens
from minivllm.runner.prompt_logprobs import PromptLogprobs, PromptParcel
from minivllm.sampling.base import Sampled
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.verify import Verifier
from minivllm.spec_decode.base import Proposer
from minivllm.upload import upload


@dataclass(slots=True)
class ModelRunner:
    model: nn.Module
    forward: ForwardRunner
    attention: AttentionBackend
    kv_caches: list[Tensor]
    inputs: InputBuilder
    rows: Rows
    sampler: Sampler
    verifier: Verifier | LateTokens
    proposer: Proposer
    prompt_logprobs: PromptLogprobs
    block_moves: BlockMoves
    adapters: AdapterSlots | NoAdapters

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | Landing:
        self._leave_and_join(plan)  # 1
        self.block_moves(plan)  # 2
        if not plan.num_tokens:
            return StepOutput()
        batch = self._prepare(plan)  # 3
        hidden = self.run_model(batch)  # 4
        prompts = self.prompt_logprobs(plan, batch, hidden)  # 5
        sampled = self._sample(batch, hidden)  # 6
        self.inputs.append(batch, batch.sample_requests[sampled.kept], sampled.tokens)  # 7
        finish = partial(self._report, plan, batch, hidden, sampled, prompts)  # 8
        parcels = [prompts] if sampled.parcel is None else [prompts, sampled.parcel]
        landing = Landing(lambda: all(parcel.is_here() for parcel in parcels), finish)
        return finish() if landing.is_here() else landing

    def _leave_and_join(self, plan: StepPlan) -> None:
        for req_id in plan.leaves:
            if req_id in self.rows.of:  # not there if the step that it should have joined in failed
                row = self.rows.leave(req_id)
                self.sampler.leave(row)
                self.proposer.leave(row)
                self.prompt_logprobs.leave(req_id)
        rows = [self.rows.join(join.req_id) for join in plan.joins]
        for row, join in zip(rows, plan.joins, strict=True):
            self.sampler.join(row, join.params, join.token_ids, join.num_prompt_tokens)
            self.prompt_logprobs.join(join)
            self.proposer.join(row, join)
            self.adapters.join(row, join.adapter)
        self.inputs.apply(plan, rows)

    def _prepare(self, plan: StepPlan) -> InputBatch:
        shape = len(plan.num_tokens), plan.total_tokens, max(plan.num_tokens.values())
        adapted = self.adapters.are_used_by(map(self.rows.of.__getitem__, plan.num_tokens))
        return self.inputs.build(plan, self.forward.key_for(*shape, adapted))

    def run_model(self, batch: InputBatch) -> Tensor:
        self.adapters.prepare(batch.rows, batch.query_start)
        meta = self.attention.prepare(batch)
        context = ForwardContext(self.attention, meta, self.kv_caches, self.model.attention_layers)
        with forward_context(context):
            return self.forward(batch)

    def _sample(self, batch: InputBatch, hidden: Tensor) -> Sampled:
        """Final tokens: of each sampled request the drafts that were accepted, and one more."""
        samples = batch.sample_tokens
        if not len(samples):
            return Sampled(np.empty(0, np.int64), [], kept=np.empty(0, np.int64))
        logits = self.model.logits(hidden[upload(samples, hidden.device)])
        positions = batch.positions_of(samples, batch.sample_requests) + 1  # of the token being drawn
        return self.verifier(logits, batch.rows[batch.sample_requests], positions, batch.draft_tokens)

    def _report(
        self, plan: StepPlan, batch: InputBatch, hidden: Tensor, sampled: Sampled, prompts: PromptParcel
    ) -> StepOutput:
        """Write down what was sampled, and what may follow. Perhaps behind the start of the next step."""
        out = StepOutput(prompt_logprobs=prompts.open())
        sampled.receive()
        requests = batch.sample_requests[sampled.kept].tolist()
        for i, token, logprobs in zip(requests, sampled.tokens.tolist(), sampled.logprobs, strict=True):
            req_id = batch.req_ids[i]
            out.tokens.setdefault(req_id, []).append(token)
            if logprobs is not None:
                out.logprobs.setdefault(req_id, []).append(logprobs)
        for i in sampled.invalid.tolist():
            out.errors[batch.req_ids[requests[i]]] = NO_DISTRIBUTION
        out.drafts = self.proposer.propose(plan, batch, out.tokens, hidden)
        return out
