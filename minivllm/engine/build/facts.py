"""What a worker is, once it has run, as the control plane and a front end are told. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from minivllm.config import Decisions, EngineConfig
from minivllm.facts import WorkerFacts
from minivllm.kv_groups import KVGroups
from minivllm.runner.memory import Sizes


class About(NamedTuple):
    """Of its model, and how it is computed; `more` behind the vocabulary's size."""

    model: str
    tokenizer_dir: Path
    device: str
    vocab_size: int
    dtype: str
    attention: str
    more: dict[str, Any] = {}

    @property
    def info(self) -> dict[str, Any]:
        told = {"model": self.model, "device": self.device, "vocab_size": self.vocab_size}
        return told | self.more | {"dtype": self.dtype, "attention": self.attention}


def facts_with_kv(
    config: EngineConfig,
    about: About,
    sizes: Sizes,
    groups: KVGroups,
    decisions: Decisions,
    seconds: float,
    budget: int,
    lookahead: int = 0,
) -> WorkerFacts:
    """Of a worker that keeps K and V. seconds: that building it took; budget: the most tokens of a step."""
    info = {
        "num_blocks": sizes.num_blocks,
        "num_host_blocks": sizes.num_host_blocks,
        "block_size": config.kv.block_size,
        "kv_tokens": sizes.num_blocks * config.kv.block_size // len(groups.groups),  # at least
        "max_model_len": sizes.max_model_len,
        "load_seconds": round(seconds, 3),
    }
    return WorkerFacts(
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=budget,
        model_name=about.model,
        tokenizer_dir=about.tokenizer_dir,
        decisions=decisions,
        info=about.info | info,
        lookahead=lookahead,
        groups=groups,
        block_size=config.kv.block_size,
    )


def facts_without_kv(
    config: EngineConfig, about: About, longest: int, decisions: Decisions, seconds: float
) -> WorkerFacts:
    """Of one whose prompts run whole, and end with a vector. longest: tokens of a prompt."""
    return WorkerFacts(
        num_blocks=0,
        num_host_blocks=0,
        max_model_len=longest,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        model_name=about.model,
        tokenizer_dir=about.tokenizer_dir,
        decisions=decisions,
        info=about.info | {"max_model_len": longest, "load_seconds": round(seconds, 3)},
        keeps_kv=False,
        num_ends=1,
    )
