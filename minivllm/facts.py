"""WorkerFacts: what the control plane and the front end need to know of a worker. No torch here: a simulated worker
has them too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.config import Decision
from minivllm.kv_groups import ONE_GROUP, KVGroups


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    model_name: str
    tokenizer_dir: Path
    decisions: list[Decision]
    info: dict[str, Any]  # what a server tells of itself, and a trace of its run
    keeps_kv: bool = True  # False: each prompt runs whole, in one step, and leaves nothing behind
    num_ends: int = 0  # tokens' places behind the longest prompt for what it ends with; 1 where that is a vector
    lookahead: int = 0  # KV slots that proposing drafts takes behind a request's tokens
    groups: KVGroups = ONE_GROUP
    encoder_positions: int = 0  # that an encoder computes of an item of a prompt; 0: it has none
    encoder_slots: int = 0  # items whose encoder outputs there may be at once
    block_size: int = 1  # tokens a block of KV: no fewer than kv.block_size
