"""What `plan` prints, writes and draws."""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import parse_set
from minivllm.runner.memory import format_size
from minivllm.terminal import fail, print_table

if TYPE_CHECKING:
    from minivllm.simulate.capacity import Answer, Choice, Devices, Prefill, Setup
    from minivllm.simulate.steady import Arithmetic


ARITHMETIC = ("set-up", "weights", "tokens of KV", "TTFT at least", "TPOT at least", "requests/s, about")
SERVED = ("tokens/s", "TTFT p50, p99", "TPOT p50, p99", "cost of 1M tokens", "band")


def unit(args: Namespace) -> str:
    return "" if args.price else " device-hours"


def tell_arithmetic(known: Sequence[tuple[Setup, Arithmetic]], refused: Mapping[str, str]) -> None:
    """Before anything is simulated."""
    rows = [
        [
            setup.name,
            format_size(of.weight_bytes),
            f"{of.kv_tokens:,}",
            f"{1e3 * of.first_token:.3g} ms",
            f"{1e3 * of.token:.3g} ms",
            f"{of.rate:.3g}",
        ]
        for setup, of in known
    ]
    print_table("by arithmetic alone", ARITHMETIC, rows)
    for name, why in refused.items():
        print(f"{name}: {why}")
    print("\nsimulated:", flush=True)


def tell_found(answer: Answer, rate: float | None) -> None:
    """As soon as it is."""
    print(f"{answer.setup.name}: {_served(answer, rate)}", flush=True)


def _served(answer: Answer, rate: float | None) -> str:
    if answer.best is None:
        return "none holds" + (f", {answer.why}" if answer.why else "")
    low, high = answer.band
    if rate is None:
        return f"{answer.best.rate:.3g} ({low:.3g} to {high:.3g}) requests/s"
    fewest, most = (f"{round(rate / each)}" if each else "no number" for each in (high, low))
    return f"{replicas(answer, rate)} x {answer.best.rate:.3g} requests/s ({fewest} to {most})"


def tell_ranked(args: Namespace, answers: Sequence[Answer]) -> None:
    columns = ("set-up", "requests/s" if args.rate is None else "replicas x requests/s", *SERVED)
    print()
    print_table("what each set-up serves", columns, [_row(answer, args.rate, unit(args)) for answer in answers])
    if not answers or (first := answers[0]).best is None:
        print("No set-up meets the objectives at any rate.")
        return
    for_rate = "" if args.rate is None else f" for {args.rate:g} requests/s: {replicas(first, args.rate)} times,"
    print(f"\nCheapest{for_rate} {first.setup.name}. {_how(first.setup)}")
    print(f"  {command(args, first)}")
    for answer in _others(answers):
        print(f"Cheapest {_kind(answer.setup)}: {answer.setup.name}. {_how(answer.setup)}")
        print(f"  {command(args, answer)}")


def replicas(answer: Answer, rate: float | None) -> int:
    """That serve the rate together."""
    assert answer.best is not None
    return 1 if rate is None else round(rate / answer.best.rate)


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


def _row(answer: Answer, rate: float | None, unit: str) -> list[str]:
    if answer.best is None:
        return [answer.setup.name, _served(answer, rate), *[""] * len(SERVED)]
    got, (low, high) = answer.best.summary, answer.cost_band
    return [
        answer.setup.name,
        _served(answer, rate).replace(" requests/s", ""),
        f"{replicas(answer, rate) * answer.best.rate * answer.output:,.0f}",
        f"{got['ttft']['p50']:.3g}, {got['ttft']['p99']:.3g} s",
        f"{1e3 * answer.best.median_tpot:.3g}, {1e3 * got['tpot'].get('p99', 0):.3g} ms",
        f"{answer.cost():.3g}{unit}",
        f"{low:.3g} to {high:.3g}",
    ]


def command(args: Namespace, answer: Answer) -> str:
    """What serves so, or simulates it at the rate that is served."""
    setup, number = answer.setup, replicas(answer, args.rate)
    options = {**parse_set(args.set), **setup.options}
    preset = [] if args.preset == "v1" else ["--preset", args.preset]
    sets = [part for field, value in options.items() for part in ("--set", f"{field}={value}")]
    if _is_served(setup):
        words = ["serve", args.model, "--executor", "simulated", "--gpu", setup.devices.name]
        words += ["--replicas", str(number)] if number > 1 else []
    else:
        assert answer.best is not None
        rate = answer.best.rate if args.rate is None else args.rate
        words = ["simulate", args.model, "--gpu", setup.devices.name, *_several(setup, number)]
        words += ["--trace", args.workload, "--rate", f"{rate:.4g}", "--seed", str(args.seed)]
    return f"python -m minivllm {shlex.join([*words, *preset, *sets])}"


def _several(setup: Setup, number: int) -> list[str]:
    if (of := setup.prefill) is None:
        return ["--replicas", str(number)] if number > 1 else []
    counts = {"--prefill-replicas": number * of.num_replicas, "--decode-replicas": number * of.num_decode}
    words = [word for option, count in counts.items() for word in (option, str(count))]
    other = [] if of.devices == setup.devices else ["--prefill-set", f"executor.device={of.devices.name}"]
    return [*words, *other, "--kv-wire", of.wire]


def plain(
    args: Namespace,
    known: Sequence[tuple[Setup, Arithmetic]],
    answers: Sequence[Answer],
    refused: Mapping[str, str],
) -> dict[str, Any]:
    """For JSON, which has no infinity: of what holds nothing, the cost is null."""
    from minivllm.simulate.capacity import choices, front

    return {
        "schema": "minivllm.plan/1",
        "model": args.model,
        "workload": {"trace": args.workload, "seconds": args.seconds, "seed": args.seed},
        "objectives": args.objective,
        "rate": args.rate,
        "arithmetic": {setup.name: asdict(of) for setup, of in known},
        "set_ups": [
            {
                "name": answer.setup.name,
                **_devices_plain(answer.setup.devices),
                "options": dict(answer.setup.options),
                "prefill": _prefill_plain(answer.setup.prefill),
                "rate": None if answer.best is None else answer.best.rate,
                "rate_band": answer.band,
                "replicas": None if answer.best is None else replicas(answer, args.rate),
                "why": answer.why,
                "cost_of_1m_tokens": None if answer.best is None else answer.cost(),
                "command": None if answer.best is None else command(args, answer),
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


def draw(path: Path, answers: Sequence[Answer], unit: str) -> None:
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
