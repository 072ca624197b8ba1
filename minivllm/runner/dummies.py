"""Forwards that no request sees, for warming up and for measuring: prompts that write to the spare block alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minivllm.batch import InputBatch


@dataclass(frozen=True, slots=True)
class DummyBatches:
    spare_block: int
    block_size: int
    max_model_len: int
    num_groups: int = 1  # KV groups

    def make(self, num_tokens: int, queries: int = 0) -> InputBatch:
        """So many tokens, in prompts of at most max_model_len, or, for a whole forward, of `queries` tokens each."""
        at, most = np.arange(num_tokens), queries or self.max_model_len
        positions = at % most
        query_start = np.append(np.arange(0, num_tokens, most), num_tokens).astype(np.int32)
        seq_lens = np.diff(query_start).astype(np.int32)
        num_requests, longest = len(seq_lens), int(seq_lens.max())
        groups = () if self.num_groups == 1 else (self.num_groups,)
        slots = self.spare_block * self.block_size + positions % self.block_size
        width = -(-longest // self.block_size)
        return InputBatch(
            req_ids=[f"dummy-{i}" for i in range(num_requests)],
            rows=np.arange(num_requests),
            token_ids=at % 100,
            positions=positions,
            slot_mapping=np.broadcast_to(slots, (*groups, num_tokens)),
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=np.full((*groups, num_requests, width), self.spare_block, np.int32),
            sample_tokens=query_start[1:].astype(np.int64) - 1,
            sample_requests=np.arange(num_requests),
            draft_tokens=np.full(num_requests, -1),
            num_tokens=num_tokens,
            max_query=longest,
            max_seq=longest,
            whole=queries > 0,
            encoded=np.zeros(num_requests, np.int64),
        )
