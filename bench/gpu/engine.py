"""Part `engine` of bench/gpu/run.py: the whole engine beside what the card could do.

A decode step must read `mb`: every weight once (but for the look-up of embeddings), and each request's K and V. At the
copy bandwidth measured in the same run that takes `floor_ms`, and `fraction` is the floor over the measured step. For
nano-vllm's benchmark there is no such floor: its row is tokens a second.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from card import NOT_MEASURED, copy_bandwidth
from common import spread
from serving import DecodeTimes, Requests, equal_requests, make_llm, nano_requests, run

from minivllm import LLM

NUM_DECODES = 64  # steps that are timed


def engine(args: Namespace, device: torch.device) -> list[dict[str, Any]]:
    gb_per_s = copy_bandwidth(device)
    tiny = device.type == "cpu"
    rows = []
    for num in (1, 3) if tiny else (1, 32, 256):
        requests = equal_requests(num, *((12, 5) if tiny else (1024, NUM_DECODES)), max_id=500)
        rows.append(_decode(args, device, "dummy:tiny" if tiny else "dummy:llama-3.1-8b", requests, gb_per_s))
    requests = nano_requests(4, 3, 12, 500) if tiny else nano_requests()
    rows.append(_mixed(args, device, "dummy:tiny" if tiny else "dummy:qwen3-0.6b", requests))
    return [*rows, {"case": "copy", "gb_per_s": gb_per_s}]


def _decode(args: Namespace, device: torch.device, model: str, requests: Requests, gb_per_s: Any) -> dict[str, Any]:
    watch = DecodeTimes(len(requests.prompts))
    llm = make_llm(model, device, requests, args.overrides, [watch])
    try:
        for _ in range(args.rounds):
            run(llm, requests)
        middle = len(requests.prompts[0]) + requests.num_tokens[0] / 2  # tokens of a request, halfway
        num_bytes = bytes_of_a_step(llm, len(requests.prompts) * middle)
        row = {"case": f"{len(requests.prompts)} decodes at {len(requests.prompts[0])}", "model": model}
        row["mb"] = round(num_bytes / 1e6, 3)
        if device.type == "cpu":
            assert watch.seconds, "no step was all decodes"
            return row | dict.fromkeys(("ms", "tokens_per_s", "floor_ms", "fraction"), NOT_MEASURED)
        ms = spread([1e3 * seconds for seconds in watch.seconds])
        floor = num_bytes / (gb_per_s * 1e6)
        rate = round(1e3 * len(requests.prompts) / ms["median"], 1)
        shown = {"ms": ms["median"], "tokens_per_s": rate, "floor_ms": round(floor, 3)}
        return row | shown | {"fraction": round(floor / ms["median"], 3), "spread": ms, "settings": settings(llm)}
    finally:
        llm.shutdown()


def _mixed(args: Namespace, device: torch.device, model: str, requests: Requests) -> dict[str, Any]:
    llm = make_llm(model, device, requests, args.overrides)
    try:
        seconds = [run(llm, requests, temperature=0.6)[0] for _ in range(args.rounds + 1)][1:]
        row = {"case": f"nano-vllm's {len(requests.prompts)} requests", "model": model}
        if device.type == "cpu":
            return row | {"tokens_per_s": NOT_MEASURED}
        rates = spread([sum(requests.num_tokens) / s for s in seconds], 1)
        return row | {"tokens_per_s": rates["median"], "spread": rates, "settings": settings(llm)}
    finally:
        llm.shutdown()


def bytes_of_a_step(llm: LLM, num_cached: float) -> float:
    """Weights, and the K and V of num_cached tokens. Of an engine in this process."""
    runner = worker_of(llm).runner
    table = runner.model.embedding.weight
    weights = sum(p.numel() * p.element_size() for p in runner.model.parameters())
    if not runner.model.spec.tie_embeddings:
        weights -= table.numel() * table.element_size()
    slots = llm.info["num_blocks"] + 1
    per_token = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches) / slots / llm.info["block_size"]
    return weights + num_cached * per_token


def worker_of(llm: LLM) -> Any:
    executor = llm._core.executor
    return getattr(executor, "worker", None) or executor.inner.worker


def settings(llm: LLM) -> dict[str, str]:
    """What was chosen for this card."""
    return {decision.field: f"{decision.value}: {decision.reason}" for decision in llm.decisions}
