"""Part `engine` of bench/gpu/run.py: the whole engine beside what the card could do.

A decode step must read `mb`: every weight once (but for the look-up of embeddings), and each request's K and V. At the
copy bandwidth measured in the same run that takes `floor_ms`, and `fraction` is the floor over the measured step.
nano-vllm's benchmark has a floor, too: see `nano_floor`. `gpu_busy` is the share of time in which the device did
anything, in a window of decodes under the profiler, which costs the host time of its own: it is not flattered.

One engine for each model serves all of its batches, so that it is captured once.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from busy import BusyWatch
from card import NOT_MEASURED, Ceilings, ceilings
from case import Rows
from common import spread
from serving import DecodeTimes, Requests, equal_requests, make_llm, nano_requests, run

from minivllm import LLM

NUM_DECODES = 64  # steps that are timed
MODELS = ("llama-3.1-8b", "qwen3-0.6b")


class Watch(DecodeTimes):
    """The times of steps, and how busy the device is, for one load after the other."""

    def __init__(self):
        super().__init__()
        self.busy: BusyWatch | None = None

    def on_step(self, plan, out, deltas, times) -> None:
        super().on_step(plan, out, deltas, times)
        if self.busy is not None:
            self.busy.on_step(plan, out, deltas, times)


@dataclass
class Side:
    """A model that is loaded, with all that its rows need."""

    args: Namespace
    device: torch.device
    llm: LLM
    watch: Watch
    best: Ceilings | None

    def decode(self, requests: Requests) -> dict[str, Any]:
        num, watch = len(requests.prompts), self.watch
        watch.num_requests, watch.seconds = num, []
        for _ in range(self.args.rounds):
            run(self.llm, requests)
        assert watch.seconds, "no step was all decodes"
        steps, watch.num_requests = watch.seconds, 0
        num_bytes, flops = self.needs(num * (len(requests.prompts[0]) + requests.num_tokens[0] / 2), num)
        row = {"mb": round(num_bytes / 1e6, 3)}
        if self.best is None:
            return row | dict.fromkeys(("ms", "tokens_per_s", "floor_ms", "fraction"), NOT_MEASURED)
        ms = spread([1e3 * seconds for seconds in steps])
        floor = 1e3 * self.best.seconds(num_bytes, flops)
        rate = round(1e3 * num / ms["median"], 1)
        row |= {"ms": ms["median"], "tokens_per_s": rate, "floor_ms": round(floor, 3)}
        return row | {"fraction": round(floor / ms["median"], 3), "spread": ms, "settings": settings(self.llm)}

    def busy(self, requests: Requests) -> dict[str, Any]:
        """After all that is timed: a profiler may stay in the process."""
        num_steps = min(NUM_DECODES, requests.num_tokens[0]) // 2
        self.watch.busy = busy = BusyWatch(self.device, len(requests.prompts), num_steps)
        run(self.llm, requests)
        busy.end()
        self.watch.busy = None
        assert busy.ended, "the profiler saw no step that was all decodes"
        if self.best is None:
            return {"gpu_busy": NOT_MEASURED}
        assert busy.busy is not None, "the profiler saw nothing on the device"
        return {"gpu_busy": round(busy.busy, 4)}

    def nano(self, requests: Requests) -> dict[str, Any]:
        seconds = [run(self.llm, requests, temperature=0.6)[0] for _ in range(min(self.args.rounds, 2) + 1)][1:]
        if self.best is None:
            return {"tokens_per_s": NOT_MEASURED, "fraction": NOT_MEASURED}
        floor = nano_floor(requests, sizes_of(self.llm), self.best)
        taken = spread(seconds)
        rate = round(sum(requests.num_tokens) / taken["median"], 1)
        row = {"ms": round(1e3 * taken["median"], 1), "tokens_per_s": rate, "floor_ms": round(1e3 * floor, 1)}
        return row | {"fraction": round(floor / taken["median"], 3), "spread": taken, "settings": settings(self.llm)}

    def needs(self, num_cached: float, num_tokens: int) -> tuple[float, float]:
        """Bytes and operations of a step of num_tokens decodes over num_cached tokens."""
        sizes = sizes_of(self.llm)
        return sizes.weight_bytes + num_cached * sizes.token_bytes, 2 * (sizes.layers + sizes.head) * num_tokens


def engine(args: Namespace, device: torch.device, rows: Rows) -> None:
    best = ceilings(device)
    for model in ("tiny",) if device.type == "cpu" else MODELS:
        _rows_of(args, device, rows, model, best)
    shown = {"gb_per_s": best.gb_per_s, "tflops": best.tflops} if best else {"gb_per_s": NOT_MEASURED}
    rows.add({"case": "copy and matrix product", **shown})


def _rows_of(args: Namespace, device: torch.device, rows: Rows, model: str, best: Ceilings | None) -> None:
    tiny, watch, made = device.type == "cpu", Watch(), []
    sizes = (1, 3) if tiny else (1, 32, 256)
    loads = [equal_requests(num, *((12, 9) if tiny else (1024, NUM_DECODES)), max_id=500) for num in sizes]
    nano = nano_requests(4, 3, 12, 500) if tiny else nano_requests()
    every = loads if model == "llama-3.1-8b" else [*loads, nano]

    def start() -> dict[str, Any]:
        made.append(make_llm(f"dummy:{model}", device, every, args.overrides, [watch]))
        return {"note": "started"}

    if not rows.attempt({"case": "start", "model": model}, start):
        return
    side = Side(args, device, made[0], watch, best)
    try:
        for load in loads:
            case = {"case": "decodes", "model": model, "requests": len(load.prompts)}
            rows.attempt(case, lambda load=load: side.decode(load))
        if nano in every:
            case = {"case": "nano-vllm's benchmark", "model": model, "requests": len(nano.prompts)}
            rows.attempt(case, lambda: side.nano(nano))
        for load in loads:
            case = {"case": "GPU busy in decodes", "model": model, "requests": len(load.prompts)}
            rows.attempt(case, lambda load=load: side.busy(load))
    finally:
        side.llm.shutdown()


class Sizes(NamedTuple):
    """Of a model in an engine."""

    layers: int  # weights that every token is multiplied with
    head: int  # and those that a token is multiplied with if another one follows
    weight_bytes: int  # of both
    token_bytes: float  # of a token's K and V in all layers


def nano_floor(requests: Requests, sizes: Sizes, best: Ceilings) -> float:
    """Seconds that no engine can undercut: all requests decode together from the first step on, each step reads the
    weights and the K and V of those that still run, and the prompts are multiplied with the layers' weights."""
    pairs = zip(map(len, requests.prompts), requests.num_tokens, strict=True)
    cached = sum(n_in * n_out + n_out * (n_out - 1) / 2 for n_in, n_out in pairs)
    decodes = best.seconds(max(requests.num_tokens) * sizes.weight_bytes + cached * sizes.token_bytes)
    return decodes + best.seconds(0, 2 * sizes.layers * sum(map(len, requests.prompts)))


def sizes_of(llm: LLM) -> Sizes:
    """Of an engine in this process. The look-up of embeddings reads next to nothing; tied, they are the head."""
    runner = worker_of(llm).runner
    table = runner.model.embedding.weight
    parameters = list(runner.model.parameters())
    count, held = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    looked_up = 0 if runner.model.spec.tie_embeddings else table.numel()
    layers = count - looked_up - table.numel()
    slots = llm.info["num_blocks"] + 1
    per_token = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches) / slots / llm.info["block_size"]
    return Sizes(layers, table.numel(), held - looked_up * table.element_size(), per_token)


def worker_of(llm: LLM) -> Any:
    executor = llm._core.executor
    return getattr(executor, "worker", None) or executor.inner.worker


def settings(llm: LLM) -> dict[str, str]:
    """What was chosen for this card."""
    return {decision.field: f"{decision.value}: {decision.reason}" for decision in llm.decisions}
