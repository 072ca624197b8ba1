"""The `plan` command: which devices and options serve a workload within its objectives, and what a token costs."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import signal
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm import child
from minivllm.config import EngineConfig, parse_set
from minivllm.errors import ConfigError, EngineDead
from minivllm.machine import num_cores
from minivllm.terminal import Parser

if TYPE_CHECKING:
    from minivllm.engine.build.capacity import Question
    from minivllm.simulate.capacity import Answer, Devices, Prefill, Setup
    from minivllm.simulate.steady import Arithmetic
    from minivllm.simulate.workload import TraceRequest

LEAST_REQUESTS, MOST_REQUESTS = 200, 20_000  # of a trial
EXAMPLE = "llama-3.3-70b --gpu h100 h200 --price h100=2.5 h200=3.5 --objective ttft_p99=1s tpot_p50=40ms"


def main(argv: Sequence[str], prog: str = "python -m minivllm plan") -> int:
    args = _parse(argv, prog)
    from minivllm.cli import plan_tables
    from minivllm.engine.build.capacity import Question
    from minivllm.simulate.capacity import rank, read_objective

    prices = _prices(args.price, [*args.gpu, *args.prefill_gpu])
    config = EngineConfig.build(args.preset, {"model.path": args.model, **parse_set(args.set)})
    objectives = [read_objective(text) for text in args.objective]
    question = Question(config, Workload(args.workload, args.seconds, args.seed, LEAST_REQUESTS), objectives, args.rate)
    refused: dict[str, str] = {}
    known = list(_reckoned(question, list(_setups(config, args)), refused))
    plan_tables.tell_arithmetic(known, refused)
    answers = []
    for setup, found in _explored(question, [(setup, setup.price(prices)) for setup, _ in known], args.jobs):
        if isinstance(found, str):
            refused[setup.name] = found
            print(f"{setup.name}: {found}", flush=True)
        else:
            answers.append(found)
            plan_tables.tell_found(found, args.rate)
    answers = rank(answers)
    plan_tables.tell_ranked(args, answers)
    if args.json is not None:
        args.json.write_text(json.dumps(plan_tables.plain(args, known, answers, refused), indent=1) + "\n")
    if args.plot is not None:
        plan_tables.draw(args.plot, answers, plan_tables.unit(args))
    return 0 if answers and answers[0].best is not None else 1


@dataclass(frozen=True, slots=True)
class Workload:
    """What a trial asks of a set-up."""

    source: str  # as load_trace has it
    seconds: float | None  # of arrivals; None: as a trial would have it
    seed: int
    least: int  # requests

    def __call__(self, rate: float, seconds: float) -> Iterable[TraceRequest]:
        from minivllm.simulate.traces import load_trace

        seconds = seconds if self.seconds is None else self.seconds
        count = min(MOST_REQUESTS, max(self.least, round(rate * seconds)))
        return load_trace(self.source, rate=rate, num_requests=count, seed=self.seed)


def _reckoned(
    question: Question, setups: Iterable[Setup], refused: dict[str, str]
) -> Iterator[tuple[Setup, Arithmetic]]:
    """What arithmetic says of each. refused: gets those that cannot be, by name, and why."""
    from minivllm.engine.build.capacity import reckon

    for setup in setups:
        try:
            yield setup, reckon(question, setup)
        except (ConfigError, EngineDead) as error:
            refused[setup.name] = str(error)


def _explored(
    question: Question, priced: Sequence[tuple[Setup, float]], jobs: int
) -> Iterator[tuple[Setup, Answer | str]]:
    """Each set-up with what it reaches, or why it cannot be, as they are found by so many processes."""
    if (jobs := min(jobs, len(priced))) <= 1:
        yield from ((setup, _explore(question, setup, price)) for setup, price in priced)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, child.ignore_interrupts) as pool:
        try:
            with _interrupts_blocked():  # in the processes, too, until they ignore them
                asked = {pool.submit(_explore, question, *each): each[0] for each in priced}
            yield from ((asked[found], found.result()) for found in as_completed(asked))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, child.INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _explore(question: Question, setup: Setup, price: float) -> Answer | str:
    from minivllm.engine.build.capacity import explore

    try:
        return explore(question, setup, price, _note)
    except (ConfigError, EngineDead) as error:
        return str(error)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: Sequence[str], prog: str) -> Namespace:
    parser = Parser(
        prog=prog,
        description="Which devices and options serve a model within objectives, and what does a token cost there? Each "
        "set-up is simulated under rising load; no device need be there.",
        epilog=f"example: {prog} {EXAMPLE}",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name that `serve --executor simulated` takes, or a folder with a config.json")
    add("--gpu", nargs="+", default=["h100"], metavar="NAME", help="kinds of device (h100)")
    usual = [(1, count) for count in (1, 2, 4, 8)]
    add("--count", nargs="+", type=_count, default=usual, metavar="N", help="that share a model (1 2 4 8), 2x4: stages")
    add("--prefill-replicas", nargs="+", type=_number, default=[], metavar="N", help="that compute prompts alone")
    add("--decode-replicas", nargs="+", type=_number, default=[], metavar="N", help="that go on from their KV")
    add("--prefill-gpu", nargs="+", default=[], metavar="NAME", help="kinds of device of the first (as the others')")
    add("--prefill-count", nargs="+", type=_count, default=[], metavar="N", help="that share a model there (as many)")
    add("--kv-wire", metavar="NAME", help="that KV takes between them, as of `simulate` (ib-200)")
    add("--vary", nargs="+", default=[], metavar="a.b=x,y", help="options to try, each with each: kv.dtype=auto,int8")
    add("--objective", nargs="+", default=[], metavar="ttft_p99=1s", help="the most of ttft, tpot, itl or latency")
    add("--price", nargs="+", default=[], metavar="NAME=P", help="of a device's hour; without: 1 for each kind")
    add("--workload", default="sharegpt", metavar="TRACE", help="a trace's file, or the name of a draw (sharegpt)")
    add("--rate", type=_above_0, metavar="R", help="requests a second: with how many replicas, and at what cost")
    add("--seconds", type=_above_0, help="of arrivals in a trial (as long as ten requests take, and at least 20)")
    add("--seed", type=int, default=0, help="of the workload (0)")
    add("--preset", default="v1", metavar="NAME", help="of the engine's options (v1)")
    add("--set", action="append", default=[], metavar="a.b=c", help="set one option; may be repeated")
    add("--jobs", type=_number, default=num_cores(), metavar="N", help="processes that simulate (cores)")
    add("--json", type=Path, metavar="FILE", help="write all that was found")
    add("--plot", type=Path, metavar="FILE", help="draw it, as PNG or SVG (needs matplotlib: the extra plots)")
    return parser.parse_args(argv)


def _count(text: str) -> tuple[int, int]:
    """Stages of a pipeline, and devices of each: "4" and "2x4"."""
    stages, times, count = text.rpartition("x")
    if times and stages == "1":
        raise ArgumentTypeError(f"one stage is no pipeline: {count}, not {text}")
    return (_number(stages) if times else 1), _number(count)


def _number(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise ArgumentTypeError(f"an integer above 0, not {text!r}")
    return int(text)


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ArgumentTypeError(f"a number above 0, not {text!r}")
    return value


def _prices(pairs: Sequence[str], devices: Sequence[str]) -> dict[str, float]:
    """Of each device. Raises ConfigError: some prices and not all cannot be compared."""
    if not pairs:
        return dict.fromkeys(devices, 1.0)
    prices = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in devices:
            raise ConfigError(f'--price {pair}: "{name}" is not among the devices asked for: {", ".join(devices)}')
        try:
            prices[name] = _above_0(value)
        except ArgumentTypeError as error:
            raise ConfigError(f"--price {pair}: {error}") from None
    if missing := [name for name in devices if name not in prices]:
        raise ConfigError(f"--price: none for {', '.join(missing)}; name all, or none")
    return prices


def _setups(config: EngineConfig, args: Namespace) -> Iterator[Setup]:
    """Each of devices that do all, then each of prefill replicas beside decode replicas. Raises ConfigError for what no
    device could mend, before anything is simulated."""
    from minivllm.simulate.capacity import Setup

    _check_kinds(args)
    fields, options = [], []
    for pair in args.vary:
        field, equals, values = pair.partition("=")
        if not equals:
            raise ConfigError(f"--vary {pair}: an option, = and its values, such as kv.dtype=auto,int8")
        fields.append(field)
        options.append([config.override({field: value}).get(field) for value in values.split(",")])
    varied = [dict(zip(fields, chosen, strict=True)) for chosen in product(*options)]
    all_devices = _devices(args.gpu, args.count)
    for devices, own in product(all_devices, varied):
        yield Setup(devices, own)
    for devices, own in product(all_devices, varied):
        for prefill in _prefills(args, devices):
            yield Setup(devices, own, prefill)


def _check_kinds(args: Namespace) -> None:
    from minivllm.simulate.devices import DEVICES
    from minivllm.simulate.machines import find_machine, is_profile
    from minivllm.simulate.wire import parse_wire

    for option, kinds in (("--gpu", args.gpu), ("--prefill-gpu", args.prefill_gpu)):
        for kind in kinds:
            find_machine(kind)
            if kind not in DEVICES and not is_profile(kind):
                raise ConfigError(f"{option} {kind}: kinds of device; how many of them share a model is --count")
    if bool(args.prefill_replicas) != bool(args.decode_replicas):
        raise ConfigError("--prefill-replicas and --decode-replicas come together: who computes prompts, who answers")
    if not args.prefill_replicas and (args.prefill_gpu or args.prefill_count or args.kv_wire):
        raise ConfigError("--prefill-gpu, --prefill-count and --kv-wire are of --prefill-replicas")
    if args.kv_wire:
        parse_wire(args.kv_wire)


def _devices(kinds: Iterable[str], counts: Iterable[tuple[int, int]]) -> list[Devices]:
    from minivllm.simulate.capacity import Devices

    return [Devices(kind, count, num_stages) for kind, (num_stages, count) in product(kinds, counts)]


def _prefills(args: Namespace, decode: Devices) -> Iterator[Prefill]:
    """What may compute prompts for such decode replicas. Unless other devices are asked for, they are alike."""
    from minivllm.simulate.capacity import Prefill
    from minivllm.simulate.wire import DEFAULT_WIRE

    kinds, counts = args.prefill_gpu or [decode.kind], args.prefill_count or [(decode.num_stages, decode.count)]
    numbers = args.prefill_replicas, args.decode_replicas
    for devices, num_prefill, num_decode in product(_devices(kinds, counts), *numbers):
        yield Prefill(devices, num_prefill, num_decode, args.kv_wire or DEFAULT_WIRE)
