"""What do transcripts that are being written feel of recordings that arrive, with a bound on encoding and without one?

Eight transcripts are written, 32 recordings arrive at once, and each that is let in must be encoded first: a pass over
30 seconds of sound, as long as many steps. By default a step encodes one (scheduler.encoder_budget), so a gap between
two tokens should be as long as without arrivals, and one encode. Without a bound, as it was before, the first step
encodes them all.

A run is quiet, then loaded, until each newcomer has its first token; engines with the one bound and the other take
turns. A token's time is when the step loop had it. An encode alone is measured in the same rounds, in an idle engine.

    python -m bench encoder --out
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from common import emit, note, parser, spread

from minivllm import LLM
from minivllm.engine.audio import RATE
from minivllm.plan import StepPlan
from minivllm.request import Beside, EngineRequest, SamplingParams

UNBOUNDED = 10**9  # positions
FIRST_STEPS = 4  # of a quiet phase, which are not looked at


class Run(NamedTuple):
    """Milliseconds: gaps between two tokens of the transcripts, and first tokens of those who arrived."""

    quiet: list[float]
    loaded: list[float]
    first: list[float]
    most: int  # encodes in a step


class Engine:
    def __init__(self, args: Any, budget: int | None):
        options = {"engine.core": "inproc", "kv.prefix": "none", "scheduler.encoder_budget": budget}
        options |= {"executor.num_threads": args.num_threads}
        self.llm = LLM(args.model, overrides=options)
        self.core, self.args = self.llm._core, args
        self.most = 0
        submit = self.core.executor.submit

        def counted(plan: StepPlan) -> Any:
            self.most = max(self.most, len(plan.encode))
            return submit(plan)

        self.core.executor.submit = counted

    def hear(self, seed: int) -> Beside:
        """A recording as long as the model hears: tones, each a tenth of it."""
        audio, draw = self.llm.hearing.audio, np.random.default_rng(seed)
        pitches = np.repeat(draw.uniform(100, 7000, 10), audio.seconds * RATE // 10)
        return audio.heard((0.5 * np.sin(2 * np.pi * np.cumsum(pitches) / RATE)).astype(np.float32))

    def add(self, name: str, heard: Beside, num_tokens: int) -> None:
        prompt = self.llm.hearing.speech.start("", 1)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        self.core.add(EngineRequest(name, prompt, params, items=heard.items, contents=dict(heard.contents)))

    def run(self, transcripts: list[Beside], newcomers: list[Beside]) -> Run:
        times: dict[str, list[float]] = {}

        def step() -> None:
            deltas, now = self.core.step(), time.perf_counter()
            for delta in deltas:
                times.setdefault(delta.req_id, []).append(1e3 * now)

        names = [f"t{i}" for i in range(len(transcripts))]
        for name, heard in zip(names, transcripts, strict=True):
            self.add(name, heard, self.args.num_tokens)
        while len(times) < len(names):
            step()
        begin = len(times[names[0]]) + FIRST_STEPS
        for _ in range(FIRST_STEPS + self.args.quiet_steps):
            step()
        quiet = [b - a for name in names for a, b in pairwise(times[name][begin:])]
        self.most, arrival = 0, 1e3 * time.perf_counter()
        last = {name: len(times[name]) - 1 for name in names}
        new = [f"n{i}" for i in range(len(newcomers))]
        for name, heard in zip(new, newcomers, strict=True):
            self.add(name, heard, self.args.new_tokens)
        while not all(name in times for name in new):
            step()
        loaded = [b - a for name in names for a, b in pairwise(times[name][last[name] :])]
        self.core.abort([*names, *new])
        while not self.core.is_settled:
            self.core.step()
        return Run(quiet, loaded, [times[name][0] - arrival for name in new], self.most)

    @torch.inference_mode()
    def encode(self, heard: Beside) -> float:
        """Milliseconds, alone."""
        worker = self.core.executor.worker
        state, (digest,) = worker.runner.model_state, heard.contents
        worker.hold_item(digest, heard.contents[digest])
        begin = time.perf_counter()
        state.encode(StepPlan(0, encode=[digest]))
        seconds = time.perf_counter() - begin
        state.encode(StepPlan(0, forget=[digest]))
        worker.drop_item(digest)
        return 1e3 * seconds


def main() -> None:
    options = parser(__doc__.splitlines()[0], "encoder")
    options.add_argument("--model", default="whisper-tiny.en")
    options.add_argument("--num-transcripts", type=int, default=8)
    options.add_argument("--num-tokens", type=int, default=400, help="of a transcript, at most")
    options.add_argument("--num-new", type=int, default=32, help="recordings that arrive")
    options.add_argument("--new-tokens", type=int, default=2, help="of each")
    options.add_argument("--quiet-steps", type=int, default=40)
    options.add_argument("--num-threads", type=int, help="of the engine")
    options.add_argument("--rounds", type=int, default=10)
    args = options.parse_args()
    engines = {"bounded": Engine(args, None), "unbounded": Engine(args, UNBOUNDED)}
    hear = engines["bounded"].hear
    transcripts = [hear(seed) for seed in range(args.num_transcripts)]
    newcomers = [hear(1000 + seed) for seed in range(args.num_new)]
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    alone: list[float] = []
    for i in range(args.rounds + 1):
        for name in list(engines) if i % 2 else list(reversed(engines)):
            runs[name].append(engines[name].run(transcripts, newcomers))
            alone += [engines[name].encode(heard) for heard in newcomers[:4]]
        note(f"round {i}: " + ", ".join(f"{name} {told([each[-1]], alone)}" for name, each in runs.items()))
    results = {name: told(each[1:], alone) for name, each in runs.items()} | {"encode": percentiles(alone)}
    for engine in engines.values():
        engine.llm.shutdown()
    emit("encoder", vars(args), results, args.out)


def told(runs: list[Run], alone: list[float]) -> dict[str, Any]:
    """Milliseconds: percentiles of the gaps of all runs together, and of the rounds' p99 the spread. allowed: a gap
    without arrivals, and an encode alone, as it is in the median and in its p99."""
    quiet, loaded, first = ([gap for run in runs for gap in run[column]] for column in range(3))
    encode, gap = percentiles(alone), percentiles(quiet)["p99"]
    return {
        "quiet": percentiles(quiet),
        "loaded": percentiles(loaded),
        "loaded_p99_by_round": spread([percentiles(run.loaded)["p99"] for run in runs], 1),
        "allowed": {"p50": round(gap + encode["p50"], 1), "p99": round(gap + encode["p99"], 1)},
        "first_token": percentiles(first),
        "most_encodes": max(run.most for run in runs),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    found = np.percentile(values, [50, 99, 100])
    return {name: round(float(value), 1) for name, value in zip(("p50", "p99", "max"), found, strict=True)}


if __name__ == "__main__":
    main()
