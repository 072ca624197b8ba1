"""How fast is minivllm beside vLLM, llama.cpp and transformers, on the same token ids and cores?

Engines take turns; figures are medians.

    make peers                                         the environments, once
    python -m bench peers --quick                      a look
    python -m bench peers --rounds 3 --out             the table of bench/results/peers.md
    python -m bench peers --model dummy:llama-3.2-1b --engines minivllm llama.cpp --workloads one decode

Every engine is loaded once and answers all rounds; who waits is stopped. A round is A B C, then the next: a noisy
minute meets all of them. Of vLLM's two settings both run in the first round of a workload, then the better one, or both
where they are within 15 %; the better median counts. No ratio is given when the runs of one of the two engines differ
by more than 15 %, or are fewer than three.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import RESULTS, note, record
from bench.peers import report
from bench.peers.engines import Engine, LeftOut, Running, known_engines, python_of
from bench.peers.install import FOLDER, NotInstalled, export_model, gguf_file, of_shape
from bench.peers.workloads import WORKLOADS, Requests, Workload, draw, quick
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import ModelError
from minivllm.machine import cpu_flags, num_cores

MOST_APART = 0.15  # of the median: the range of an engine's runs above which no ratio is given
MIN_RUNS = 3
SLOW_START = 20.0  # seconds: an engine that takes longer is started once
LATENT = {"minivllm-8bit", "minivllm-compiled"}  # take part only when named; the second with --compile, too
Start = Callable[[Engine], Running]
Targets = Mapping[tuple[str, str, str], float]

# (workload, ours, family, times): what this project wants to reach (its issues on speed on a CPU).
TARGETS: Targets = {
    ("one", "minivllm", "llama.cpp"): 1.8,
    ("decode", "minivllm", "llama.cpp"): 1.6,
    ("one", "minivllm", "vllm"): 3.2,
    **{(name, "minivllm", "vllm"): 2.2 for name in ("eight", "mixed32", "mixed64")},
    ("prefill", "minivllm", "llama.cpp"): 5.0,
    ("prefill", "minivllm", "vllm"): 2.3,
    ("prefill", "minivllm", "transformers"): 2.0,
    **{(name, "minivllm-bf16", "vllm"): 1.3 for name in ("one", "eight", "mixed32", "mixed64")},
}
# The same of a CPU without AVX-512.
NARROW_TARGETS: Targets = {
    **{(name, "minivllm", "llama.cpp"): 1.8 for name in ("one", "decode")},
    ("prefill", "minivllm", "llama.cpp"): 3.0,
    **{(name, "minivllm", "vllm"): 4.0 for name in ("eight", "mixed32")},
}


@dataclass
class Runs:
    """Of one engine in one workload."""

    rates: list[float] = field(default_factory=list)  # tokens a second, a round each
    peak_mib: list[int] = field(default_factory=list)
    why: str = ""  # it has none, or no more


@dataclass
class Field:
    """The engines that take part, and why others do not."""

    running: dict[str, Running] = field(default_factory=dict)
    parts: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # of each start
    left_out: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, reason: str) -> None:
        note(f"{name}: left out, {reason}")
        self.left_out[name] = reason
        if name in self.running:
            self.running.pop(name).close()


# ------------------------------------------------------------------------------------------ start


def start_all(engines: Sequence[Engine], start: Start, num_starts: int) -> Field:
    """Start each once and keep it; then start the quick ones again, in turns, for the times alone."""
    found = Field()
    try:
        for i in range(num_starts):
            for engine in engines:
                if i == 0 or (engine.name in found.running and total(found.parts[engine.name][0]) < SLOW_START):
                    start_one(engine, start, found, keep=i == 0)
    except BaseException:
        close_all(found)
        raise
    return found


def start_one(engine: Engine, start: Start, found: Field, keep: bool) -> None:
    try:
        running = start(engine)
    except LeftOut as e:
        return found.drop(engine.name, str(e))
    found.parts.setdefault(engine.name, []).append(running.parts)
    note(f"{engine.name}: {total(running.parts):.1f} s to the first token")
    if keep:
        running.pause()
        found.running[engine.name] = running
    else:
        running.close()


def total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def close_all(found: Field) -> None:
    for running in found.running.values():
        running.close()


# ------------------------------------------------------------------------------------------ rounds


def measure(found: Field, name: str, workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one workload."""
    runs = {engine: Runs(why=running.unable.get(workload.kind, "")) for engine, running in found.running.items()}
    tokens: dict[str, list[list[int]]] = {}
    warm = draw(name, quick(workload), args.seed, -1, args.vocab)
    each_turn(found, runs, lambda running: running.ask(warm.job(num_tokens=2)))
    for round_ in range(args.rounds):
        requests = draw(name, workload, args.seed, round_, args.vocab)
        first = draw(name + " first", workload, args.seed, round_, args.vocab)

        def turn(running: Running, requests: Requests = requests, first: Requests = first) -> None:
            running.forget_peak()
            seconds, out = timed(running, requests)
            if workload.counts == "decode":
                seconds -= timed(running, first, num_tokens=1)[0]
            mine = runs[running.engine.name]
            mine.rates.append(counted(workload, requests) / seconds)
            if (peak := running.peak_mib()) is not None:
                mine.peak_mib.append(peak)
            tokens.setdefault(running.engine.name, out[0])

        each_turn(found, runs, turn)
        note(
            f"{workload.what}, round {round_}: "
            + ", ".join(f"{n} {r.rates[-1]:.1f}" for n, r in runs.items() if r.rates)
        )
        if round_ == 0:
            keep_the_best(runs, {engine: r.engine.family for engine, r in found.running.items()})
    num_in, num_out = sum(map(len, requests.prompts)), sum(requests.num_tokens)
    return {
        "what": workload.what,
        "counts": workload.counts,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "runs": {engine: vars(r) for engine, r in runs.items()},
        "first_tokens": tokens,  # of the first request of the first round: they show what was computed
    }


def each_turn(found: Field, runs: dict[str, Runs], turn: Callable[[Running], Any]) -> None:
    """Let each engine that still runs this workload have its turn; one that fails is out of everything."""
    for name, running in list(found.running.items()):
        if runs[name].why:
            continue
        try:
            with awake(running):
                turn(running)
        except LeftOut as e:
            runs[name].why = str(e)
            found.drop(name, str(e))


@contextmanager
def awake(running: Running) -> Iterator[None]:
    running.resume()
    try:
        yield
    finally:
        running.pause()


def timed(running: Running, requests: Requests, num_tokens: int | None = None) -> tuple[float, list[list[int]]]:
    """Raises LeftOut for an answer of another length than asked for."""
    job = requests.job(num_tokens)
    answer = running.ask(job)
    lengths = [len(tokens) for tokens in answer["tokens"]]
    if lengths != job["num_tokens"]:
        raise LeftOut(f"it gave {sum(lengths)} tokens for {len(lengths)} requests, not {sum(job['num_tokens'])}")
    return answer["seconds"], answer["tokens"]


def counted(workload: Workload, requests: Requests) -> int:
    """The tokens whose rate is the figure."""
    num_out = sum(requests.num_tokens)
    by_side = {"output": num_out, "input": sum(map(len, requests.prompts)), "decode": num_out - len(requests.prompts)}
    return by_side[workload.counts]


def keep_the_best(runs: dict[str, Runs], family_of: Mapping[str, str]) -> None:
    """After the first round: of several settings of one engine, those clearly behind stop."""
    for family in {family_of[name] for name in runs if name in family_of}:
        rates = {n: r.rates[0] for n, r in runs.items() if family_of.get(n) == family and r.rates and not r.why}
        for name, rate in rates.items():
            if rate < (1 - MOST_APART) * max(rates.values()):
                runs[name].why = "another setting of it is faster"


# ------------------------------------------------------------------------------------------ ratios


def apart(values: Sequence[float]) -> float:
    """How far runs differ: their range over their median."""
    return (max(values) - min(values)) / statistics.median(values)


def ratio(ours: Sequence[float], theirs: Sequence[float], names: tuple[str, str]) -> tuple[float | None, str]:
    """Of medians, ours over theirs, or None and why it is not given."""
    for name, values in zip(names, (ours, theirs), strict=True):
        if len(values) < MIN_RUNS:
            return None, f"{name} has {len(values)} of {MIN_RUNS} runs"
        if apart(values) > MOST_APART:
            return None, f"runs of {name} differ by {apart(values):.0%}"
    return statistics.median(ours) / statistics.median(theirs), ""


def best(family: str, runs: Mapping[str, dict[str, Any]], family_of: Mapping[str, str]) -> str | None:
    """The setting of a family with the highest median among those that ran most rounds; None: none ran."""
    names = [name for name, r in runs.items() if family_of[name] == family and r["rates"]]
    return max(names, key=lambda n: (len(runs[n]["rates"]), statistics.median(runs[n]["rates"])), default=None)


def targets_here() -> Targets:
    flags = cpu_flags()
    return NARROW_TARGETS if flags and "avx512f" not in flags else TARGETS


def all_ratios(
    workloads: Mapping[str, dict[str, Any]], family_of: Mapping[str, str], targets: Targets = TARGETS
) -> list[dict[str, Any]]:
    """The best setting of each of our families against that of each other one, in each workload that both ran."""
    rows = []
    families = list(dict.fromkeys(family_of.values()))
    for workload, measured in workloads.items():
        runs = measured["runs"]
        for mine in (family for family in families if family.startswith("minivllm")):
            ours = best(mine, runs, family_of)
            if ours is None:
                continue
            for family in (family for family in families if not family.startswith("minivllm")):
                theirs = best(family, runs, family_of)
                if theirs is None:
                    continue
                value, why = ratio(runs[ours]["rates"], runs[theirs]["rates"], (ours, theirs))
                row = {
                    "workload": workload,
                    "ours": ours,
                    "family": family,
                    "theirs": theirs,
                    "ratio": value,
                    "why": why,
                }
                rows.append(row | {"at_least": targets.get((workload, mine, family))})
    return rows


# ------------------------------------------------------------------------------------------ the command


def starter(args: argparse.Namespace, job: dict[str, Any]) -> Start:
    """Starts an engine on the form of the model that it reads."""
    model = of_shape(args.model, args.peers)
    find = {
        "ours": lambda: model,
        "folder": lambda: str(export_model(model, args.peers).resolve()),
        "gguf": lambda: str(gguf_file(model)),
    }

    def start(engine: Engine) -> Running:
        python = python_of(engine, args.peers)
        try:
            model = find[engine.files]()
        except (ModelError, NotInstalled, StopIteration) as e:
            raise LeftOut(f"no model file for it: {e}") from e
        return Running(engine, python, {"model": model, **job}, (args.peers / "logs" / f"{engine.name}.log").resolve())

    return start


def run(
    engines: Sequence[Engine], start: Start, workloads: dict[str, Workload], args: argparse.Namespace
) -> dict[str, Any]:
    """Everything, as the results of a record."""
    load, begin = os.getloadavg()[0], time.time()
    found = start_all(engines, start, args.starts)
    with ExitStack() as stack:
        stack.callback(close_all, found)
        measured = {name: measure(found, name, workload, args) for name, workload in workloads.items()}
        settings = {name: running.settings for name, running in found.running.items()}
    return {
        "engines": {engine.name: {"what": engine.what, "family": engine.family} for engine in engines},
        "settings": settings,
        "start_seconds": found.parts,
        "workloads": measured,
        "ratios": all_ratios(measured, {engine.name: engine.family for engine in engines}, targets_here()),
        "left_out": found.left_out,
        "load_before": round(load, 2),
        "minutes": round((time.time() - begin) / 60, 1),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--model", default=DEFAULT_MODEL, help="an alias, a .gguf file, or dummy:<shape> in Q4_K_M")
    args.add_argument("--peers", type=Path, default=FOLDER, help="the folder that `make peers` filled")
    args.add_argument(
        "--engines", nargs="+", choices=list(known_engines(1)), help=f"by default all but {', '.join(sorted(LATENT))}"
    )
    args.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument(
        "--starts", type=int, default=4, help="of engines that start quickly; the first warms the files up"
    )
    args.add_argument("--threads", type=int, default=num_cores())
    args.add_argument("--vocab", type=int, default=49_152, help="prompts are random ids below this")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--compile", action="store_true", help="also minivllm with compiled pieces (builds for a minute)")
    args.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    where = RESULTS / "peers.json"
    args.add_argument("--out", nargs="?", const=where, type=Path, help=f"write OUT ({where}), a table and a plot")
    return args.parse_args(argv)


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine stays behind, stopped
    engines = known_engines(args.threads)
    latent = LATENT - {"minivllm-compiled"} if args.compile else LATENT
    names = args.engines or [name for name in engines if name not in latent]
    workloads = {n: quick(WORKLOADS[n]) if args.quick else WORKLOADS[n] for n in args.workloads}
    max_len = max(w.input_len[1] + w.output_len[1] for w in workloads.values()) + 24
    job = {"threads": args.threads, "max_len": max_len}
    results = run([engines[name] for name in names], starter(args, job), workloads, args)
    params = {n: getattr(args, n) for n in ("model", "rounds", "starts", "threads", "vocab", "seed", "quick")}
    found = record("peers", params | {"max_len": max_len}, results)
    print(json.dumps(found))
    note(report.markdown(found))
    if args.out is not None:
        report.write(found, args.out)


if __name__ == "__main__":
    main()
