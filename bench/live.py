"""What does it cost the engine's steps to be looked at, by the server's page (GET /debug/live)?

n requests decode over a fake model that answers at once, so that a step is the control plane alone and the cost shows
at its largest. Three engines take their steps in turns, a run of steps each: one at which nobody has ever looked, one
at which nobody looks any more (a server whose page was closed), and one that is watched. The ratio to the first is
taken within a round, with its 95 % bootstrap interval over the rounds. A look itself is timed apart: the core does not
step meanwhile, and an open page looks four times a second.

    python -m bench live --num-reqs 1 64 --num-blocks 20000 100000
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import emit, note, parser, spread
from latency import bootstrap_ratio, shown

from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.engine.core import EngineCore
from minivllm.engine.live import LiveView
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.request import EngineRequest, SamplingParams
from minivllm.scheduler.base import Limits

PROMPT, BLOCK_SIZE = 64, 16


class FakeModel:
    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        return AsyncOutput.ready(StepOutput({req_id: [5] for req_id in plan.num_tokens}))

    def shutdown(self) -> None: ...


class Engine:
    """num_reqs requests that do not end for num_steps steps."""

    def __init__(self, num_reqs: int, num_blocks: int, num_steps: int):
        config = EngineConfig.build(overrides={"kv.block_size": BLOCK_SIZE})
        max_len = PROMPT + num_steps + 2
        limits = Limits(num_reqs, num_reqs * PROMPT, max_len, num_blocks * BLOCK_SIZE)
        scheduler = build_scheduler(config, build_kv(config, num_blocks, max_len), limits)
        self.core = EngineCore(scheduler, FakeModel())
        self.core.observers.append(_Reporter())  # as a server has one
        self.view = LiveView(self.core, scheduler.base)
        self.after = 0
        params = SamplingParams(max_tokens=max_len - PROMPT, ignore_eos=True)
        for i in range(num_reqs):
            self.core.add(EngineRequest(f"r{i}", [i % 100] * PROMPT, params, time.monotonic()))
        self.core.step()

    def steps(self, number: int) -> float:
        """Seconds a step."""
        begin = time.perf_counter()
        for _ in range(number):
            self.core.step()
        return (time.perf_counter() - begin) / number

    def look(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self.after = self.view.look(self.after).next
        return time.perf_counter() - begin

    def leave(self) -> None:
        """Nobody looks any more: the lease has run out, and the next step ends the watching."""
        self.view._lease = 0.0
        self.core.step()
        assert self.view not in self.core.observers


class _Reporter:
    def on_add(self, *_: Any) -> None: ...
    def on_step(self, *_: Any) -> None: ...


def measure(num_reqs: int, num_blocks: int, args: argparse.Namespace) -> dict[str, Any]:
    num_steps = args.rounds * args.steps + 10
    engines = {name: Engine(num_reqs, num_blocks, num_steps) for name in ("never", "left", "watched")}
    engines["left"].look()
    engines["left"].leave()
    micros: dict[str, list[float]] = {name: [] for name in engines}
    looks = []
    for i in range(args.rounds):
        for name in list(engines) if i % 2 else list(reversed(engines)):
            if name == "watched":
                looks.append(1e3 * engines[name].look())  # which also renews the lease
            micros[name].append(1e6 * engines[name].steps(args.steps))
    row: dict[str, Any] = {"num_reqs": num_reqs, "num_blocks": num_blocks, "look_ms": spread(looks)}
    for name, values in micros.items():
        row[f"{name}_us_per_step"] = spread(values, 2)
    for name in ("left", "watched"):
        row[f"{name}_ratio"] = shown(bootstrap_ratio(micros["never"], micros[name]))
    return row


def main() -> None:
    p = parser(__doc__.partition("\n")[0], "live")
    p.add_argument("--num-reqs", type=int, nargs="+", default=[1, 64])
    p.add_argument("--num-blocks", type=int, nargs="+", default=[20_000])
    p.add_argument("--rounds", type=int, default=30)
    p.add_argument("--steps", type=int, default=100, help="in a row, of one engine")
    args = p.parse_args()
    rows = []
    for num_reqs in args.num_reqs:
        for num_blocks in args.num_blocks:
            rows.append(measure(num_reqs, num_blocks, args))
            note(str(rows[-1]))
    emit("live", {"rounds": args.rounds, "steps": args.steps}, rows, args.out)


if __name__ == "__main__":
    main()
