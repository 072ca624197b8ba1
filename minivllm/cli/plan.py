"""The `plan` command: which devices and options serve a workload within its objectives, and what a token costs."""

from __future__ import annotations

import json
import math
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineConfig, parse_set
from minivllm.errors import ConfigError, EngineDead
from minivllm.terminal import Parser, fail, print_table

if TYPE_CHECKING:
    from minivllm.simulate.capacity import Answer, Choice, Devices, Prefill, Setup
    from minivllm.simulate.workload import TraceRequest

LEAST_REQUESTS, MOST_REQUESTS = 200, 20_000  # of a trial
EXAMPLE = "llama-3.3-70b --gpu h100 h200 --price h100=2.5 h200=3.5 --objective ttft_p99=1s tpot_p50=40ms"
COLUMNS = ("set-up", "requests/s", "tokens/s", "TTFT p50, p99", "TPOT p50, p99", "cost of 1M tokens", "band")


def main(argv: Sequence[str], prog: str = "python -m minivllm plan") -> int:
    args = _parse(argv, prog)
    from minivllm.simulate.capacity import rank, read_objective

    objectives = [read_objective(text) for text in args.objective]
    prices = _prices(args.price, [*args.gpu, *args.prefill_gpu])
    config = EngineConfig.build(args.preset, {"model.path": args.model, **parse_set(args.set)})
    answers, refused = [], []
    for setup in _shown(list(_setups(config, args))):
        try:
            answers.append(_explore(config, setup, _workload(args), objectives, setup.price(prices)))
        except (ConfigError, EngineDead) as error:
            refused.append((setup.name, str(error)))
    answers = rank(answers)
    _tell(args, answers, refused)
    if args.json is not None:
        args.json.write_text(json.dumps(_plain(args, answers, refused), indent=1) + "\n")
    if args.plot is not None:
        _draw(args.plot, answers, _unit(args))
    return 0 if answers and answers[0].best is not None else 1


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
    add("--rate", type=_above_0, metavar="R", help="requests a second to be served: says how many replicas they take")
    add("--seconds", type=_above_0, default=20.0, help="of arrivals in a trial (20), with 200 to 20,000 requests")
    add("--seed", type=int, default=0, help="of the workload (0)")
    add("--preset", default="v1", metavar="NAME", help="of the engine's options (v1)")
    add("--set", action="append", default=[], metavar="a.b=c", help="set one option; may be repeated")
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


def _workload(args: Namespace) -> Callable[[float], Iterable[TraceRequest]]:
    from minivllm.simulate.traces import load_trace

    def requests(rate: float) -> Iterable[TraceRequest]:
        count = min(MOST_REQUESTS, max(LEAST_REQUESTS, round(rate * args.seconds)))
        return load_trace(args.workload, rate=rate, num_requests=count, seed=args.seed)

    return requests


def _explore(config, setup, requests, objectives, price) -> Answer:
    from minivllm.engine.build.capacity import explore

    return explore(config, setup, requests, objectives, price)


def _shown(setups: Sequence[Setup]) -> Iterable[Setup]:
    from tqdm import tqdm

    return tqdm(setups, unit=" set-ups", disable=None)


# ------------------------------------------------------------------------------------------------------------- output


def _unit(args: Namespace) -> str:
    return "" if args.price else " device-hours"


def _tell(args: Namespace, answers: Sequence[Answer], refused: Sequence[tuple[str, str]]) -> None:
    print_table("what each set-up serves", COLUMNS, [_row(answer, _unit(args)) for answer in answers])
    for name, why in refused:
        print(f"{name}: {why}")
    if not answers or (first := answers[0]).best is None:
        print("No set-up meets the objectives at any rate.")
        return
    replicas = _replicas(args, first)
    for_rate = "" if args.rate is None else f" for {args.rate:g} requests/s: {replicas} times,"
    print(f"\nCheapest{for_rate} {first.setup.name}. {_how(first.setup)}")
    print(f"  {command(args, first, replicas)}")
    for answer in _others(answers):
        print(f"Cheapest {_kind(answer.setup)}: {answer.setup.name}. {_how(answer.setup)}")
        print(f"  {command(args, answer, _replicas(args, answer))}")


def _replicas(args: Namespace, answer: Answer) -> int:
    assert answer.best is not None
    return 1 if args.rate is None else math.ceil(args.rate / answer.best.rate)


def _others(answers: Sequence[Answer]) -> list[Answer]:
    """The cheapest that serves, of each kind of set-up but the first's. answers: cheapest first."""
    by_kind: dict[str, Answer] = {}
    for answer in answers:
        if answer.best is not None:
            by_kind.setdefault(_kind(answer.setup), answer)
    return list(by_kind.values())[1:]


def _kind(setup: Setup) -> str:
    if setup.prefill is not None:
        return "with prompts elsewhere"
    return "pipeline" if setup.devices.num_stages > 1 else "of replicas that do all"


def _is_served(setup: Setup) -> bool:
    """Whether `serve` has devices like these."""
    return setup.prefill is None and setup.devices.num_stages == 1


def _how(setup: Setup) -> str:
    if _is_served(setup):
        return "To try it at its speed, without the device:"
    return "On a virtual clock, since `serve` has neither stages nor prefill replicas:"


def _row(answer: Answer, unit: str) -> list[str]:
    if answer.best is None:
        return [answer.setup.name, "none holds", *[""] * (len(COLUMNS) - 2)]
    got, (low, high) = answer.best.summary, answer.cost_band
    return [
        answer.setup.name,
        f"{answer.best.rate:.3g} ({answer.band[0]:.3g} to {answer.band[1]:.3g})",
        f"{answer.best.tokens_per_s:,.0f}",
        f"{got['ttft']['p50']:.3g}, {got['ttft']['p99']:.3g} s",
        f"{1e3 * got['tpot'].get('p50', 0):.3g}, {1e3 * got['tpot'].get('p99', 0):.3g} ms",
        f"{answer.cost():.3g}{unit}",
        f"{low:.3g} to {high:.3g}",
    ]


def command(args: Namespace, answer: Answer, replicas: int) -> str:
    """What serves so, or simulates it at the rate that so many serve."""
    setup = answer.setup
    options = {**parse_set(args.set), **setup.options}
    preset = [] if args.preset == "v1" else ["--preset", args.preset]
    sets = [part for field, value in options.items() for part in ("--set", f"{field}={value}")]
    if _is_served(setup):
        words = ["serve", args.model, "--executor", "simulated", "--gpu", setup.devices.name]
        words += ["--replicas", str(replicas)] if replicas > 1 else []
    else:
        assert answer.best is not None
        rate = replicas * answer.best.rate if args.rate is None else args.rate
        words = ["simulate", args.model, "--gpu", setup.devices.name, *_several(setup, replicas)]
        words += ["--trace", args.workload, "--rate", f"{rate:.4g}", "--seed", str(args.seed)]
    return f"python -m minivllm {shlex.join([*words, *preset, *sets])}"


def _several(setup: Setup, replicas: int) -> list[str]:
    if (of := setup.prefill) is None:
        return ["--replicas", str(replicas)] if replicas > 1 else []
    counts = {"--prefill-replicas": replicas * of.num_replicas, "--decode-replicas": replicas * of.num_decode}
    words = [word for option, count in counts.items() for word in (option, str(count))]
    other = [] if of.devices == setup.devices else ["--prefill-set", f"executor.device={of.devices.name}"]
    return [*words, *other, "--kv-wire", of.wire]


def _plain(args: Namespace, answers: Sequence[Answer], refused: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """For JSON, which has no infinity: of what holds nothing, the cost is null."""
    from minivllm.simulate.capacity import choices, front

    return {
        "schema": "minivllm.plan/1",
        "model": args.model,
        "workload": {"trace": args.workload, "seconds": args.seconds, "seed": args.seed},
        "objectives": args.objective,
        "set_ups": [
            {
                "name": answer.setup.name,
                **_devices_plain(answer.setup.devices),
                "options": dict(answer.setup.options),
                "prefill": _prefill_plain(answer.setup.prefill),
                "rate": None if answer.best is None else answer.best.rate,
                "rate_band": answer.band,
                "cost_of_1m_tokens": None if answer.best is None else answer.cost(),
                "command": None if answer.best is None else command(args, answer, _replicas(args, answer)),
                "trials": [asdict(point) for point in answer.points],
            }
            for answer in answers
        ],
        "front": [asdict(choice) for choice in front(choices(answers))],
        "refused": dict(refused),
    }


def _devices_plain(devices: Devices) -> dict[str, Any]:
    return {"device": devices.kind, "count": devices.count, "num_stages": devices.num_stages}


def _prefill_plain(prefill: Prefill | None) -> dict[str, Any] | None:
    if prefill is None:
        return None
    numbers = {"num_replicas": prefill.num_replicas, "num_decode": prefill.num_decode, "kv_wire": prefill.wire}
    return _devices_plain(prefill.devices) | numbers


def _draw(path: Path, answers: Sequence[Answer], unit: str) -> None:
    """What a user gets, and what it costs, at each rate that was tried; and the front."""
    from minivllm.simulate.capacity import choices, front

    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot needs matplotlib: pip install 'minivllm[plots]'")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for answer in answers:
        found: list[Choice] = choices([answer])
        line = axes.plot(*_xy(found), marker="o", markersize=3, linewidth=1, label=answer.setup.name)[0]
        if answer.best is not None and (at := [c for c in found if c.rate == answer.best.rate]):
            low, high = answer.cost_band
            below, above = at[0].cost - min(low, at[0].cost), max(high, at[0].cost) - at[0].cost
            if math.isfinite(above):
                axes.errorbar(*_xy(at), yerr=[[below], [above]], color=line.get_color(), capsize=3)
    axes.plot(*_xy(front(choices(answers))), color="black", linewidth=3, alpha=0.25, label="nobody is better")
    axes.set(xlabel="tokens a second of one user (1 / median TPOT)", ylabel=f"cost of 1M tokens{unit}", yscale="log")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _xy(found: Sequence[Choice]) -> tuple[list[float], list[float]]:
    return [choice.tokens_per_s_of_a_user for choice in found], [choice.cost for choice in found]
