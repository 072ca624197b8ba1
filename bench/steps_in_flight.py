"""What does planning the next step while one runs bring, with and without speculation, beside a device?

The device is a stand-in: it sleeps for as long as a forward takes, so the host is free meanwhile, as beside a GPU. Its
text repeats itself, but for a token in every so many: what repeats can be drafted. All else is the engine's own:
scheduler, inputs, sampling, verification, proposers. Between two forwards the device is idle.

What is counted no machine changes by much: tokens a forward, forwards that ended with the next plan there, steps whose
output was taken in while no forward ran. Idle time and speed it does, most of all one whose cores others use too: they
are shares and ratios of engines that take turns. The CPU time between two forwards is the device's thread's own.

    python -m bench steps_in_flight --out
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from common import emit, note, parser, spread
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.batch import InputBatch
from minivllm.plan import StepOutput, StepPlan

SIZES = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 4096, "kv.prefix": "none"}
SIZES |= {"executor.num_threads": 1, "scheduler.max_num_seqs": 256, "spec_decode.adaptive": False}
METHODS = ["none", "ngram", "suffix"]  # who guess without a model
FIRST, PERIOD = 20, 12  # the text: these tokens, over and over


class Sleeper:
    """The stand-in, in the place of a ForwardRunner and of a model's logits. passes: when each began and ended."""

    def __init__(self, forward: Any, vocab_size: int, seconds: float, surprise_every: int):
        self.key_for, self.decision = forward.key_for, forward.decision
        self._vocab_size, self._seconds, self._surprise_every = vocab_size, seconds, surprise_every
        self.clear()

    def clear(self) -> None:
        self.passes: list[tuple[float, float]] = []
        self.cpu: list[tuple[float, float]] = []  # the thread's own seconds then
        self.handed_over: list[float] = []  # when each plan was
        self.taken_in: list[float] = []  # when each output was

    def __call__(self, batch: InputBatch) -> Tensor:
        """[T, 1]: the token that follows each."""
        begin, cpu = time.perf_counter(), time.thread_time()
        tokens, behind = np.asarray(batch.token_ids), np.asarray(batch.positions) + 1
        follows = FIRST + (tokens - FIRST + 1) % PERIOD
        surprises = FIRST + behind * 7919 // self._surprise_every % PERIOD
        hidden = torch.from_numpy(np.where(behind % self._surprise_every, follows, surprises))
        time.sleep(self._seconds)
        self.passes.append((begin, time.perf_counter()))
        self.cpu.append((cpu, time.thread_time()))
        return hidden[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self._vocab_size).scatter_(1, hidden, 1.0)


class Run(NamedTuple):
    tokens: list[list[int]]
    seconds: float
    passes: list[tuple[float, float]]
    cpu: list[tuple[float, float]]
    handed_over: list[float]
    taken_in: list[float]

    @property
    def idle(self) -> float:
        """The share of the time from the first forward to the last in which none ran."""
        whole = self.passes[-1][1] - self.passes[0][0]
        return 1 - sum(end - begin for begin, end in self.passes) / whole

    @property
    def cpu_between(self) -> float:
        """Seconds of CPU that the device's thread spends between two forwards, median."""
        return statistics.median(after[0] - before[1] for before, after in pairwise(self.cpu))

    @property
    def num_between(self) -> int:
        """Outputs that were taken in while no forward ran, though another followed."""
        during = [time for time in self.taken_in if any(begin < time < end for begin, end in self.passes)]
        return len(self.taken_in) - len(during) - 1  # the last one

    @property
    def num_ready(self) -> int:
        """Forwards that ended with the next one's plan there."""
        return sum(plan < before[1] for before, plan in zip(self.passes, self.handed_over[1:], strict=False))


class Engine:
    def __init__(self, method: str, overlap: int, args: Any):
        drafts = {"spec_decode.method": method, "spec_decode.k": args.k}
        self.llm = LLM(overrides={**SIZES, **drafts, "engine.overlap": overlap})
        executor = self.llm._core.executor
        runner = getattr(executor, "inner", executor).worker.runner
        vocab_size = runner.head.sampler.vocab_size
        self.device = Sleeper(runner.forward, vocab_size, args.pass_ms / 1e3, args.surprise_every)
        runner.forward = runner.head.model = self.device
        if overlap > 1:
            executor.hold_until_forwards()  # of this one
        submit, update = executor.submit, self.llm._core.scheduler.update

        def noted(plan: StepPlan) -> Any:
            if plan.num_tokens:
                self.device.handed_over.append(time.perf_counter())
            return submit(plan)

        def taken_in(plan: StepPlan, out: StepOutput) -> Any:
            if plan.num_tokens:
                self.device.taken_in.append(time.perf_counter())
            return update(plan, out)

        executor.submit, self.llm._core.scheduler.update = noted, taken_in

    def run(self, num_requests: int, num_tokens: int) -> Run:
        self.device.clear()
        params = [SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)] * num_requests
        prompts = [[FIRST + (i + j) % PERIOD for j in range(2 * PERIOD)] for i in range(num_requests)]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        device = self.device
        return Run(tokens, seconds, device.passes, device.cpu, device.handed_over, device.taken_in)


def main() -> None:
    options = parser(__doc__.splitlines()[0], "steps_in_flight")
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options.add_argument("--k", type=int, default=4, help="drafts a step at most")
    options.add_argument("--surprise-every", type=int, default=7, help="tokens")
    options.add_argument("--num-requests", type=int, default=64)
    options.add_argument("--num-tokens", type=int, default=100)
    options.add_argument("--pass-ms", type=float, default=10.0, help="what a forward takes on the device")
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    results, first = [], None
    for method in args.methods:
        engines = {overlap: Engine(method, overlap, args) for overlap in (1, 2)}
        runs: dict[int, list[Run]] = {1: [], 2: []}
        for i in range(args.rounds + 1):
            for overlap in (1, 2) if i % 2 else (2, 1):
                runs[overlap].append(engines[overlap].run(args.num_requests, args.num_tokens))
                first = first or runs[overlap][0].tokens
                assert runs[overlap][-1].tokens == first, "an overlap or a draft has changed a token"
        results.append({"method": method, **told({n: each[1:] for n, each in runs.items()})})
        note(f"{method}: {results[-1]}")
        for engine in engines.values():
            engine.llm.shutdown()
    emit("steps_in_flight", vars(args), results, args.out)


def told(runs: dict[int, list[Run]]) -> dict[str, Any]:
    """runs: by steps in flight."""
    found: dict[str, Any] = {}
    for overlap, each in runs.items():
        num_tokens = sum(map(len, each[0].tokens))
        found[str(overlap)] = {
            "tokens_per_second": spread([num_tokens / run.seconds for run in each], 0),
            "tokens_per_forward": round(num_tokens / len(each[0].passes), 2),
            "idle_percent": spread([100 * run.idle for run in each], 1),
            "cpu_between_ms": spread([1e3 * run.cpu_between for run in each], 3),
            "taken_in_between_percent": spread([100 * run.num_between / (len(run.passes) - 1) for run in each], 1),
            "ready_percent": spread([100 * run.num_ready / (len(run.passes) - 1) for run in each], 1),
        }
    return found | {"speedup": spread([one.seconds / two.seconds for one, two in zip(*runs.values(), strict=True)])}


if __name__ == "__main__":
    main()
