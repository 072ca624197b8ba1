"""Part `ablation` of bench/gpu/run.py: each thing that is meant to be fast on a GPU switched back alone, and V0 and V1
as they were. One engine with everything is kept; each other one is loaded beside it, and a round runs both, in turns
who is first, and gives one ratio. None of it has what the other one took to be ready: to load, warm up and capture, and
to build its pieces if it is the first that has them."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any, NamedTuple

import torch
from card import NOT_MEASURED
from case import Rows
from common import spread
from serving import Requests, make_llm, nano_requests, run

from minivllm import LLM
from minivllm.config import preset_overrides

_COMPILED = {"runner.forward": "piecewise", "runner.compile": "wait"}
_V1 = {"engine.overlap": 1, "runner.inputs": "persistent", "kv.prefix": "hash", "runner.graphs": "piecewise"}


class Switch(NamedTuple):
    name: str
    changes: dict[str, Any]
    num_requests: int | None = None  # None: all


SWITCHES = (
    Switch("eager: no graphs", {"runner.graphs": "none"}),
    Switch("graphs of whole decodes alone", {"runner.graphs": "full"}),
    Switch("graphs between attentions alone", {"runner.graphs": "piecewise"}),
    Switch("no overlap", {"engine.overlap": 1}),
    Switch("persistent inputs", {"runner.inputs": "persistent"}),
    Switch("rebuilt inputs", {"runner.inputs": "rebuild"}),
    Switch("prefix cache", {"kv.prefix": "hash"}),
    Switch("small kernels in torch", {"runner.kernels": "torch"}),
    Switch("V0, with graphs of whole decodes", preset_overrides("v0") | {"engine.overlap": 1, "runner.graphs": "full"}),
    Switch("V1 of 2025, its pieces not compiled", preset_overrides("v1") | _V1),
)
ON_A_GPU = (  # compiling would take minutes of a CPU
    Switch("compiled, no graphs", _COMPILED | {"runner.graphs": "none"}),
    Switch("compiled, with graphs", _COMPILED),
    Switch("compiled, with graphs of the pieces alone", _COMPILED | {"runner.graphs": "piecewise"}),
    Switch("V1 of 2025", preset_overrides("v1") | _V1 | _COMPILED),
    Switch("attention in torch", {"runner.attention": "sdpa"}, 16),
)


def ablation(args: Namespace, device: torch.device, rows: Rows) -> None:
    tiny = device.type == "cpu"
    requests = nano_requests(4, 3, 12, 500) if tiny else nano_requests(128, 100, 512)
    model = "dummy:tiny" if tiny else "dummy:qwen3-0.6b"
    base = make_llm(model, device, [requests], args.overrides)
    try:
        run(base, requests)
        for switch in SWITCHES if tiny else SWITCHES + ON_A_GPU:
            if rows.wants(switch.name):
                head = {"switched back": switch.name}
                rows.attempt(head, lambda s=switch: _compare(args, device, rows, model, requests, base, s))
    finally:
        base.shutdown()


def _check(llm: LLM, switch: Switch) -> None:
    """An engine that could not do what it was asked for says so, and runs. Its time would stand under a wrong name."""
    for decision in llm.decisions:
        if str(switch.changes.get(decision.field, decision.value)) != str(decision.value):
            raise RuntimeError(f"{decision.field} became {decision.value}: {decision.reason}")


def _compare(
    args: Namespace, device: torch.device, rows: Rows, model: str, requests: Requests, base: LLM, switch: Switch
) -> dict[str, Any]:
    requests = Requests(*(part[: switch.num_requests] for part in requests))
    begin = time.perf_counter()
    other = make_llm(model, device, [requests], args.overrides | switch.changes)
    ready = time.perf_counter() - begin
    sides = base, other
    try:
        _check(other, switch)
        warm = [run(side, requests) for side in sides]
        num_different = sum(a != b for a, b in zip(*(tokens for _, tokens in warm), strict=True))
        a_round = sum(seconds for seconds, _ in warm)
        ratios = []
        for round_ in range(args.rounds):
            if ratios and rows.left < a_round:
                break
            order = (0, 1) if round_ % 2 == 0 else (1, 0)
            seconds = {i: run(sides[i], requests)[0] for i in order}
            ratios.append(seconds[1] / seconds[0])
    finally:
        other.shutdown()
    row = {"changes": ", ".join(f"{field}={value}" for field, value in switch.changes.items())}
    if device.type == "cpu":
        return row | {"times as long": NOT_MEASURED, "outputs differ": num_different, "ready in s": NOT_MEASURED}
    found = spread(ratios)
    took = {"ready in s": round(ready, 1)}
    return row | {"times as long": found["median"], "outputs differ": num_different} | took | {"spread": found}
