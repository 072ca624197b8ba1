"""Part `ablation` of bench/gpu/run.py: each thing that is meant to be fast on a GPU switched back alone, on nano-vllm's
requests. Both engines are loaded; a round runs one and then the other, in turns who is first, and gives one ratio."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from card import NOT_MEASURED
from common import spread
from serving import Requests, make_llm, nano_requests, run

SWITCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no graphs", {"runner.graphs": "none"}),
    ("whole decodes alone", {"runner.graphs": "full"}),
    ("between attentions alone", {"runner.graphs": "piecewise"}),
    ("no overlap", {"engine.overlap": 1}),
    ("persistent inputs", {"runner.inputs": "persistent"}),
    ("rebuilt inputs", {"runner.inputs": "rebuild"}),
    ("prefix cache", {"kv.prefix": "hash"}),
)
ON_A_GPU: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention in Triton", {"runner.attention": "triton"}),
    ("attention in torch", {"runner.attention": "sdpa"}),
)


def ablation(args: Namespace, device: torch.device) -> list[dict[str, Any]]:
    tiny = device.type == "cpu"
    requests = nano_requests(4, 3, 12, 500) if tiny else nano_requests()
    model = "dummy:tiny" if tiny else "dummy:qwen3-0.6b"
    switches = SWITCHES if tiny else SWITCHES + ON_A_GPU
    return [_compare(args, device, model, requests, name, changes) for name, changes in switches]


def _compare(
    args: Namespace, device: torch.device, model: str, requests: Requests, name: str, changes: dict[str, Any]
) -> dict[str, Any]:
    sides = [make_llm(model, device, requests, args.overrides | change) for change in ({}, changes)]
    try:
        warm = [run(side, requests)[1] for side in sides]
        num_different = sum(a != b for a, b in zip(*warm, strict=True))
        ratios = []
        for round_ in range(args.rounds):
            order = (0, 1) if round_ % 2 == 0 else (1, 0)
            seconds = {i: run(sides[i], requests)[0] for i in order}
            ratios.append(seconds[1] / seconds[0])
    finally:
        for side in sides:
            side.shutdown()
    row = {"switched back": name, "changes": ", ".join(f"{field}={value}" for field, value in changes.items())}
    if device.type == "cpu":
        return row | {"times as long": NOT_MEASURED, "outputs differ": num_different}
    found = spread(ratios)
    return row | {"times as long": found["median"], "outputs differ": num_different, "spread": found}
