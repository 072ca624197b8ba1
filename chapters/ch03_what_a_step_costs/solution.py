"""The solution of chapter 3's exercise, and what its script draws the machine's limit with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm.models.spec import ModelSpec


class Cost(NamedTuple):
    flops: int  # multiplications and additions
    bytes: int  # moved between memory and the processor


def step_cost(
    spec: ModelSpec,
    requests: Sequence[tuple[int, int]],
    weight_bytes: int = 2,
    kv_bytes: int = 2,
) -> Cost:
    """One step over `requests`, each (tokens now, tokens computed before). Sizes: bytes a number."""
    heads = 2 * (spec.num_heads + spec.num_kv_heads)  # of q and o, k and v
    attention = spec.hidden_size * spec.head_size * heads
    mlp = 3 * spec.hidden_size * spec.intermediate_size  # gate, up and down
    layers, head = spec.num_layers * (attention + mlp), spec.vocab_size * spec.hidden_size
    tokens = sum(now for now, _ in requests)
    kept = sum(now + before for now, before in requests)
    pairs = sum(now * before + now * (now + 1) // 2 for now, before in requests)
    flops = 2 * tokens * layers + 2 * len(requests) * head
    flops += spec.num_layers * spec.num_heads * 4 * spec.head_size * pairs
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * kept
    return Cost(flops, weight_bytes * (layers + head) + kv_bytes * kv)
