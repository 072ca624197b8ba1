"""ModelRunner: one plan in, one output out, in eight named steps.

Be paranoid about changing this file. It knows no feature by name: what a request wants beyond its next token lives in
the parts that the runner is built from (sampler, prompt log-probabilities, block moves, input builder, attention
backend), each of which keeps its own state. The less common a feature, the further from here it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.plan import StepOutput, StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.forward import ForwardRunner
from minivllm.runner.inputs import InputBuilder, Rows
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.sampling.sampler import Sampled, Sampler

NO_DISTRIBUTION = "the logits are NaN or all masked: no token can be chosen (check the weights and the dtype)"


@dataclass(slots=True)
class ModelRunner:
    model: nn.Module
    forward: ForwardRunner
    attention: AttentionBackend
    kv_caches: list[Tensor]
    inputs: InputBuilder
    rows: Rows
    sampler: Sampler
    prompt_logprobs: PromptLogprobs
    block_moves: BlockMoves
    adapters: AdapterSlots | NoAdapters

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        self._leave_and_join(plan)  # 1
        self.block_moves(plan)  # 2
        if not plan.num_tokens:
            return StepOutput()
        batch = self._prepare(plan)  # 3
        hidden = self.run_model(batch)  # 4
        prompt_logprobs = self.prompt_logprobs(plan, batch, hidden)  # 5
        if not len(batch.sample_tokens):
            return StepOutput(prompt_logprobs=prompt_logprobs)
        sampled = self._sample(batch, hidden)  # 6
        self._remember(batch, sampled)  # 7
        return self._output(batch, sampled, prompt_logprobs)  # 8

    def _leave_and_join(self, plan: StepPlan) -> None:
        for req_id in plan.leaves:
            if req_id in self.rows.of:  # not there if the step that it should have joined in failed
                self.sampler.leave(self.rows.leave(req_id))
                self.prompt_logprobs.leave(req_id)
        rows = [self.rows.join(join.req_id) for join in plan.joins]
        for row, join in zip(rows, plan.joins, strict=True):
            self.sampler.join(row, join.params, join.token_ids, join.num_prompt_tokens)
            self.prompt_logprobs.join(join)
            self.adapters.join(row, join.adapter)
        self.inputs.apply(plan, rows)

    def _prepare(self, plan: StepPlan) -> InputBatch:
        key = self.forward.key_for(len(plan.num_tokens), plan.total_tokens, max(plan.num_tokens.values()))
        return self.inputs.build(plan, key)

    def run_model(self, batch: InputBatch) -> Tensor:
        self.adapters.prepare(batch.rows, batch.query_start)
        meta = self.attention.prepare(batch)
        context = ForwardContext(self.attention, meta, self.kv_caches, self.model.attention_layers)
        with forward_context(context):
            return self.forward(batch)

    def _sample(self, batch: InputBatch, hidden: Tensor) -> Sampled:
        logits = self.model.logits(hidden[torch.from_numpy(batch.sample_tokens).to(hidden.device)])
        positions = batch.seq_lens[batch.sample_requests].astype("int64")  # of the token being drawn
        return self.sampler(logits, batch.rows[batch.sample_requests], positions)

    def _remember(self, batch: InputBatch, sampled: Sampled) -> None:
        self.inputs.append(batch, sampled.tokens)
        self.sampler.observe(batch.rows[batch.sample_requests], sampled.tokens)

    def _output(self, batch: InputBatch, sampled: Sampled, prompt_logprobs: dict) -> StepOutput:
        out = StepOutput(prompt_logprobs=prompt_logprobs)
        requests = batch.sample_requests.tolist()
        for i, token, logprobs in zip(requests, sampled.tokens.tolist(), sampled.logprobs, strict=True):
            req_id = batch.req_ids[i]
            out.tokens[req_id] = [token]
            if logprobs is not None:
                out.logprobs[req_id] = [logprobs]
        for i in sampled.invalid.tolist():
            out.errors[batch.req_ids[requests[i]]] = NO_DISTRIBUTION
        return out
