"""Where does a decode step's time go, and how near is it to reading the weights and the KV once?

R requests of one length decode greedily in a whole engine. Each part (schedule, prepare, attention, linear layers by
kind, LM head, sampler, update, detokenise ...) is the time inside of its calls less that of the parts that these call.
Where the forward runs the whole stack in one C++ call, its inside is not seen by these clocks: it is one part, `stack`.
`--forward eager` shows the model as it is written, by kinds of layers.

The bound of a step is its linear layers alone, each product's best of many apart from all else (LM head included), plus
the time to read its KV at the rate of a large copy. A part is the median over steps, so parts add up to about a step.
`read` is another bound, of memory alone: all weights' bytes and the KV, at that rate.

    python -m bench step_profile --num-reqs 1 8 32 --forward auto eager
    python -m bench step_profile --model dummy:llama-3.2-1b --quantization int4 --num-reqs 1
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import emit, note, parser, spread

from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.runner.forward_fused import FusedModel, linears


class Clock:
    """Exclusive time of nested calls: entering a part stops its caller's clock."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def wrap(self, owner: Any, name: str, part: str) -> None:
        run: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(run)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(push=part)
            try:
                return run(*args, **kwargs)
            finally:
                self._switch()

        object.__setattr__(owner, name, timed)

    def _switch(self, push: str | None = None) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        if push is None:
            self._open.pop()
        else:
            self._open.append(push)
        self._since = now

    def take(self) -> dict[str, float]:
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found


class Proxy:
    """Stands for an object whose class has slots, so that a method of it can be timed."""

    def __init__(self, target: Any):
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def call(self, *args: Any) -> Any:
        return self._target(*args)


def instrument(llm: LLM) -> Clock:
    clock, core = Clock(), llm._core
    runner, model = core.executor.worker.runner, core.executor.worker.runner.model
    clock.wrap(core, "step", "core")
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(core.scheduler, "update", "update")
    clock.wrap(core.executor, "submit", "runner")
    clock.wrap(runner.inputs, "build", "prepare")
    clock.wrap(runner.inputs, "append", "prepare")
    clock.wrap(runner.attention, "prepare", "prepare attention")
    clock.wrap(runner.attention, "forward", "attention")
    clock.wrap(llm._front.processor, "process", "detokenise")
    for owner, name, part in ((runner, "forward", "forward: the rest"), (runner.head, "verifier", "sampler")):
        proxy = Proxy(getattr(owner, name))
        clock.wrap(proxy, "call", part)
        setattr(owner, name, proxy)
    clock.wrap(model.lm_head, "forward", "LM head")
    for layer in model.layers:
        clock.wrap(layer.attention.qkv, "forward", "linear qkv")
        clock.wrap(layer.attention.o, "forward", "linear o")
        clock.wrap(layer.mlp.gate_up, "forward", "linear gate_up")
        clock.wrap(layer.mlp.down, "forward", "linear down")
        for norm in (layer.attention_norm, layer.mlp_norm):
            clock.wrap(norm, "forward", "norms")
        clock.wrap(layer.mlp, "forward", "silu")
        clock.wrap(layer.attention, "forward", "rope and views")
    clock.wrap(model.norm, "forward", "norms")
    fused = getattr(getattr(runner.forward, "_run", None), "__self__", None)
    if isinstance(fused, FusedModel):
        parts = {"decode": "stack", "add_norm": "norms", "embed": "norms", "rotate": "rope and views", "gate": "silu"}
        for name, part in parts.items():
            clock.wrap(fused.kernels, name, part)
    return clock


@torch.inference_mode()
def floor_seconds(model: Any, num_tokens: int, tries: int) -> float:
    """Every product of a step with its own input, the best of each; what no engine over these layers can beat."""
    total = 0.0
    for layer in [*linears(model), model.lm_head]:
        n_in = model.spec.hidden_size if layer is model.lm_head else layer.n_in
        x, best = torch.randn(num_tokens, n_in).to(model.dtype), float("inf")
        for _ in range(tries):
            begin = time.perf_counter()
            layer.method.apply(layer, x)
            best = min(best, time.perf_counter() - begin)
        total += best
    return total


def weight_bytes(model: Any) -> int:
    """Of all linear layers, in the form in which few tokens are multiplied with them."""
    total = 0
    for layer in [*linears(model), model.lm_head]:
        kept = next(filter(None, (getattr(layer, form, None) for form in ("matrix", "panels", "tiles"))), None)
        if kept is None:
            weight = layer.packed if layer.weight is None else layer.weight  # oneDNN's, or as it was loaded
            total += weight.numel() * weight.element_size()
        else:
            total += kept.num_bytes
    return total


def bytes_per_second(tries: int = 10, size: int = 1 << 28) -> float:
    """Of a sum of integers that lie in huge pages, if the system has some: numpy asks for them."""
    source, best = torch.from_numpy(np.ones(size // 8, np.int64)), float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        source.sum()
        best = min(best, time.perf_counter() - begin)
    return size / best


def profile(llm: LLM, clock: Clock, num_reqs: int, length: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of each part of a decode step in which num_reqs requests run."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, llm.info["vocab_size"], length - num_steps // 2).tolist() for _ in range(num_reqs)]
    params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
    steps: list[dict[str, float]] = []
    core, step = llm._core, llm._core.step

    def watched() -> Any:
        if len(steps):
            steps[-1] |= clock.take()  # what came between: detokenising
        begin = time.perf_counter()
        deltas = step()
        steps.append({"step": time.perf_counter() - begin, "num_tokens": len(deltas)})
        return deltas

    clock.take()
    core.step = watched
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        core.step = step
    steps = [s for s in steps[:-1] if s.pop("num_tokens") == num_reqs][3:]
    names = list(dict.fromkeys(name for s in steps for name in s))
    return {name: [1e3 * s.get(name, 0.0) for s in steps] for name in names}


def report(
    how: str, num_reqs: int, parts: dict[str, list[float]], bound: dict[str, float], read_ms: float
) -> dict[str, Any]:
    """Medians, since a step that met other work would weigh for many."""
    medians = {name: float(np.median(ms)) for name, ms in parts.items()}
    whole, least = medians.pop("step"), float(np.min(parts["step"]))
    total = whole + medians.get("detokenise", 0.0)
    limit = sum(bound.values())
    note(f"\n{how}, {num_reqs} requests: a step {whole:.2f} ms (best {least:.2f}), bound {limit:.2f} = "
         + " + ".join(f"{name} {ms:.2f}" for name, ms in bound.items())
         + f"; reached {limit / whole:.2f} (best {limit / least:.2f}); its bytes are read in {read_ms:.2f}: "
         + f"{read_ms / whole:.2f} (best {read_ms / least:.2f})")  # fmt: skip
    for name, ms in sorted(medians.items(), key=lambda item: -item[1]):
        note(f"  {name:20} {ms:8.3f} ms {100 * ms / total:5.1f} %")
    return {
        "forward": how,
        "num_reqs": num_reqs,
        "step_ms": spread(parts["step"]),
        "parts_ms": {name: round(ms, 4) for name, ms in medians.items()},
        "bound_ms": {name: round(ms, 3) for name, ms in bound.items()},
        "reached": round(limit / whole, 3),
        "read_ms": round(read_ms, 3),
        "reached_of_read": round(read_ms / whole, 3),
    }


def run(how: str, args: Any, rate: float) -> list[dict[str, Any]]:
    overrides = {
        "runner.forward": how,
        "kv.num_blocks": max(args.num_reqs) * -(-2 * args.length // 16) + 64,
        "quantization.activation_bits": args.activation_bits,
    }
    if args.threads:
        overrides["executor.num_threads"] = args.threads
    rows = []
    with LLM(args.model, max_model_len=2 * args.length, quantization=args.quantization, overrides=overrides) as llm:
        for thread in threading.enumerate():
            if thread.name == "huge-pages":  # weights that still move are slow
                thread.join()
        for decision in llm.decisions:
            note(f"{decision.field}: {decision.value} ({decision.reason})")
        model, cache = llm._core.executor.worker.runner.model, llm._core.executor.worker.runner.kv_caches
        if model.spec.experts is not None:
            sys.exit(f"{args.model}: this bound is of dense models; which experts a step reads is not known to it")
        floors = {n: floor_seconds(model, n, args.tries) for n in args.num_reqs}
        per_token = sum(kv[0].numel() * kv.element_size() for kv in cache) / llm.info["block_size"]
        clock = instrument(llm)
        for num_reqs in args.num_reqs:
            kv_ms = 1e3 * num_reqs * args.length * per_token / rate
            bound = {"linear layers": 1e3 * floors[num_reqs], "KV": kv_ms}
            read_ms = 1e3 * weight_bytes(model) / rate + kv_ms
            rows.append(report(how, num_reqs, profile(llm, clock, num_reqs, args.length, args.steps), bound, read_ms))
    return rows


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--quantization", default="auto")
    args.add_argument(
        "--activation-bits", default="auto", choices=["auto", "8", "16"], help="of packed weights' inputs"
    )
    args.add_argument("--forward", nargs="+", default=["auto"])
    args.add_argument("--num-reqs", type=int, nargs="+", default=[1, 8, 32])
    args.add_argument("--length", type=int, default=200, help="tokens of each request, half-way through")
    args.add_argument("--steps", type=int, default=60)
    args.add_argument("--tries", type=int, default=20, help="of each product, for the bound")
    args.add_argument("--threads", type=int, default=0, help="0: as the engine chooses")
    args = args.parse_args()
    rate = bytes_per_second()
    note(f"memory is read at {rate / 1e9:.1f} GB/s by torch")
    rows = [row for how in args.forward for row in run(how, args, rate)]
    emit("step_profile", vars(args) | {"read_gb_per_s": round(rate / 1e9, 2)}, rows, args.out)


if __name__ == "__main__":
    sys.exit(main())
