"""RebuildInputs: every step's arrays from scratch, in plain Python, as vLLM V0 prepared its inputs.

The obviously right reference of the other builders, and the baseline that the persistent batch is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minivllm.batch import BatchKey, InputBatch, InputSizes
from minivllm.plan import StepPlan


@dataclass(slots=True)
class _Sequence:
    row: int
    token_ids: list[int]
    blocks: list[int]


class _Lists(NamedTuple):
    """A step's columns, as InputBatch has them, without padding."""

    token_ids: list[int]
    positions: list[int]
    slots: list[list[int]]  # of each KV group
    query_start: list[int]
    seq_lens: list[int]
    sample_tokens: list[int]
    sample_requests: list[int]
    draft_tokens: list[int]


class RebuildInputs:
    on_device = False

    def __init__(self, sizes: InputSizes):
        self.sizes = sizes
        self.sequences: dict[str, _Sequence] = {}

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        for req_id in plan.leaves:
            self.sequences.pop(req_id, None)
        for join, row in zip(plan.joins, rows, strict=True):
            self.sequences[join.req_id] = _Sequence(row, list(join.token_ids), [])
        for req_id, blocks in plan.new_blocks.items():
            self.sequences[req_id].blocks += blocks

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        made = self._lists(plan)
        num_tokens, seq_lens = len(made.token_ids), made.seq_lens
        num_padding = key.num_tokens - num_tokens
        padding_slot = self.sizes.spare_block * self.sizes.block_size
        width, num_groups = -(-max(seq_lens) // self.sizes.block_size), self.sizes.num_groups
        owners = [self.sequences[req_id] for req_id in plan.num_tokens]
        tables = [[seq.blocks[group::num_groups][:width] for seq in owners] for group in range(num_groups)]
        padded = [[table + [0] * (width - len(table)) for table in own] for own in tables]
        slots = [own + [padding_slot] * num_padding for own in made.slots]
        return InputBatch(
            req_ids=list(plan.num_tokens),
            rows=np.array([self.sequences[req_id].row for req_id in plan.num_tokens], np.int64),
            token_ids=np.array(made.token_ids + [0] * num_padding, np.int64),
            positions=np.array(made.positions + [0] * num_padding, np.int64),
            slot_mapping=np.array(slots if num_groups > 1 else slots[0], np.int64),
            query_start=np.array(made.query_start, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
            block_tables=np.array(padded if num_groups > 1 else padded[0], np.int32),
            sample_tokens=np.array(made.sample_tokens, np.int64),
            sample_requests=np.array(made.sample_requests, np.int64),
            draft_tokens=np.array(made.draft_tokens, np.int64),
            num_tokens=num_tokens,
            max_query=max(plan.num_tokens.values()),
            max_seq=max(seq_lens),
            whole=key.whole,
        )

    def _lists(self, plan: StepPlan) -> _Lists:
        block_size, num_groups = self.sizes.block_size, self.sizes.num_groups
        token_ids, positions, query_start, seq_lens = [], [], [0], []
        slots: list[list[int]] = [[] for _ in range(num_groups)]
        sample_tokens, sample_requests, draft_tokens = [], [], []
        for i, (req_id, num_new) in enumerate(plan.num_tokens.items()):
            seq = self.sequences[req_id]
            start = plan.start[req_id]
            end = start + num_new
            drafts = plan.drafts.get(req_id)
            tokens = seq.token_ids + drafts if drafts else seq.token_ids
            for position in range(start, end):
                token_ids.append(tokens[position])
                positions.append(position)
                for group, own in enumerate(slots):
                    block = seq.blocks[position // block_size * num_groups + group]
                    own.append(block * block_size + position % block_size)
            query_start.append(len(token_ids))
            seq_lens.append(end)
            for position in range(max(start, len(seq.token_ids) - 1), end):  # what follows is new
                sample_tokens.append(len(token_ids) - (end - position))
                sample_requests.append(i)
                draft_tokens.append(tokens[position + 1] if position + 1 < end else -1)
        samples = sample_tokens, sample_requests, draft_tokens
        return _Lists(token_ids, positions, slots, query_start, seq_lens, *samples)

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray) -> None:
        for i, token in zip(requests.tolist(), tokens.tolist(), strict=True):
            self.sequences[batch.req_ids[i]].token_ids.append(token)
