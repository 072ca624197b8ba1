"""What the parts `engine`, `ablation` and `peers` of bench/gpu/run.py share: engines over models of random weights, and
the requests that they get."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch

from minivllm import LLM, SamplingParams
from minivllm.config import preset_overrides
from minivllm.engine.core import Observer

# What is meant to be fast on a GPU; `--set` changes it, the ablation switches each of them back.
ON_A_CPU = {"runner.attention": "reference"}  # it can be part of a recorded call
# `auto` does not choose it before a card has shown it right. The budget is nano-vllm's; with it 256 prompts of 1,024
# tokens are through before the first of them has ended.
ON_A_GPU = {"runner.attention": "triton", "scheduler.max_num_batched_tokens": 16_384}
OVERRIDES = preset_overrides("v1-gpu") | {"kv.prefix": "none"}


class Requests(NamedTuple):
    prompts: list[list[int]]
    num_tokens: list[int]

    @property
    def longest(self) -> int:
        return max(len(prompt) + n for prompt, n in zip(self.prompts, self.num_tokens, strict=True))


def nano_requests(num: int = 256, low: int = 100, high: int = 1024, max_id: int = 10_000, seed: int = 0) -> Requests:
    """nano-vllm's benchmark (its bench.py): lengths in and out, and ids, as its generator draws them."""
    draw = Random(seed)
    prompts = [[draw.randint(0, max_id) for _ in range(draw.randint(low, high))] for _ in range(num)]
    return Requests(prompts, [draw.randint(low, high) for _ in range(num)])


def equal_requests(num: int, num_in: int, num_out: int, max_id: int, seed: int = 0) -> Requests:
    draw = Random(seed)
    return Requests([[draw.randrange(max_id) for _ in range(num_in)] for _ in range(num)], [num_out] * num)


def make_llm(model: str, device: torch.device, loads: list[Requests], overrides: dict[str, Any], observers=()) -> LLM:
    """With room in the pool for all requests of each of the loads at once."""
    most = max(len(load.prompts) for load in loads)
    sized = {"kv.num_blocks": max(map(_blocks, loads)) + 8, "scheduler.max_num_seqs": most, "kv.block_size": 16}
    longest = max(load.longest for load in loads)
    wide = {"model.path": model, "model.device": device.type, "model.max_model_len": longest + 1}
    attention = ON_A_CPU if device.type == "cpu" else ON_A_GPU
    return LLM(overrides=sized | wide | attention | OVERRIDES | overrides, observers=observers)


def _blocks(requests: Requests) -> int:
    return sum(-(-(len(p) + n) // 16) for p, n in zip(requests.prompts, requests.num_tokens, strict=True))


def run(llm: LLM, requests: Requests, temperature: float = 0.0) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate(requests.num_tokens)
    ]
    prompts = [{"prompt_token_ids": ids} for ids in requests.prompts]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs]


@dataclass
class DecodeTimes(Observer):
    """Seconds between the ends of two steps in which so many requests had one token each."""

    num_requests: int = 0  # 0: none are timed

    def __post_init__(self):
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_start(self, config, info) -> None: ...
    def on_add(self, req, step) -> None: ...
    def on_abort(self, req_id) -> None: ...
    def close(self) -> None: ...

    def on_step(self, plan, out, deltas, times) -> None:
        now = time.perf_counter()
        if plan.total_tokens == len(plan.num_tokens) == self.num_requests:
            if self._last is not None:
                self.seconds.append(now - self._last)
            self._last = now
        else:
            self._last = None
