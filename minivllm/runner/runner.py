"""ModelRunner: one plan in, one output out, in eight named steps.

Be paranoid about changing this file. It knows no feature by name: what a request wants beyond its next token lives in
the parts that the runner is built from (head, block moves, input builder, attention backend, and what these are made
of), each of which keeps its own state. The less common a feature, the further from here it belongs. What becomes of
hidden states, tokens or something else, is the head's: steps 5 to 8 (head_sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend
from minivllm.batch import InputBatch
from minivllm.compile.context import run_forward
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.forward import ForwardRunner
from minivllm.runner.head import Head
from minivllm.runner.inputs import InputBuilder, Rows, RowState, leave_and_join
from minivllm.runner.model_state import ModelState


@dataclass(slots=True)
class ModelRunner:
    model: nn.Module
    forward: ForwardRunner
    attention: AttentionBackend
    kv_caches: list[Tensor]
    inputs: InputBuilder
    rows: Rows
    head: Head
    block_moves: BlockMoves
    adapters: AdapterSlots | NoAdapters
    model_state: ModelState
    states: Sequence[RowState]  # of these parts and the head's, those that keep something of each request

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | AsyncOutput[StepOutput]:
        self._leave_and_join(plan)  # 1
        self.block_moves(plan)  # 2
        if not plan.num_tokens:
            return StepOutput()
        batch = self._prepare(plan)  # 3
        hidden = self.run_model(batch)  # 4
        return self.head(plan, batch, hidden)  # 5 to 8

    def _leave_and_join(self, plan: StepPlan) -> None:
        self.model_state.encode(plan)
        leave_and_join(plan, self.rows, self.states, self.inputs)

    def _prepare(self, plan: StepPlan) -> InputBatch:
        shape = len(plan.num_tokens), plan.total_tokens, max(plan.num_tokens.values())
        adapted = self.adapters.are_used_by(map(self.rows.of.__getitem__, plan.num_tokens))
        return self.inputs.build(plan, self.forward.key_for(*shape, adapted))

    def run_model(self, batch: InputBatch) -> Tensor:
        self.adapters.prepare(batch.rows, batch.query_start)
        self.model_state.prepare(batch)
        return run_forward(self.forward, batch, self.attention, self.kv_caches, self.model.attention_layers)
