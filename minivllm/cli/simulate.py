"""The `simulate` command: a cluster of devices that are not there, and what it would do with a trace of requests."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineConfig, check_options, from_vllm_names, parse_set
from minivllm.errors import ConfigError
from minivllm.terminal import Parser, add_engine_options, engine_options, fail, print_table

if TYPE_CHECKING:
    from minivllm.simulate.cluster import Cluster
    from minivllm.simulate.figures import Figures
    from minivllm.simulate.host import HostCost

SCHEMA = "minivllm.simulate/1"
OBJECTIVES = ("ttft", "tpot", "latency")
INPUT_LEN, OUTPUT_LEN = 512, 128
EXAMPLES = """Scheduler, KV manager and router are the engine's own; only the devices and the time are not there.
The same command gives the same bytes.

  %(prog)s dummy:llama-3.1-8b --gpu h100 --replicas 8 --rate 20 --num-requests 1000
  %(prog)s dummy:llama-3.1-8b --gpu a100-80 --trace sharegpt --rate 4 --slo ttft=500ms tpot=50ms --json run.json
  %(prog)s opt-13b --preset distserve --gpu a100-80 --prefill-replicas 2 --decode-replicas 1 --trace sharegpt --rate 4
"""


def main(argv: Sequence[str], prog: str = "python -m minivllm simulate") -> int:
    args = parser(prog).parse_args(argv)
    options = engine_options(args)
    config = EngineConfig.build(args.preset, {**from_vllm_names(_names(options)), **options["overrides"]})
    source = _source(args)
    from minivllm.simulate.objectives import parse_objectives
    from minivllm.simulate.traces import load_trace

    try:
        objectives = parse_objectives(args.slo, OBJECTIVES)
    except ValueError as error:
        fail(f"--slo: {error}", code=2)
    host = _host(args.host, config)
    requests = load_trace(source, rate=args.rate, num_requests=args.num_requests, seed=args.seed)
    begin = time.perf_counter()
    figures = _build(args, config, host).run(requests)
    seconds = time.perf_counter() - begin
    found = figures.summary(objectives)
    if not found["num_finished"]:
        raise ConfigError(f"none of the {found['num_requests']:,} requests can run: {figures.why_refused}")
    asked = {"trace": source, "rate": args.rate, "num_requests": args.num_requests, "seed": args.seed}
    around = {
        **_replicas(args),
        "host_kv": None if args.host_kv is None else {"tokens": args.host_kv, "shared": args.host_kv_shared},
        "host": host._asdict(),
        "link_seconds": args.link_us * 1e-6,
        "objectives": objectives,
    }
    record = {"schema": SCHEMA, "config": config.flat(), "workload": asked, **around, "result": found}
    if args.json is not None:
        _write(record, args.json)
    if args.json != "-":
        show(config, _place(args, config), found, figures)
        rate = f"{found['num_requests'] / seconds:,.0f} requests a second"
        print(f"Simulated in {seconds:.1f} s: {rate}.", file=sys.stderr)
    return 0


def _build(args: argparse.Namespace, config: EngineConfig, host: HostCost) -> Cluster:
    from minivllm.engine.build.cluster import HostKV, build_cluster
    from minivllm.engine.build.disaggregated import Counts, build_disaggregated
    from minivllm.simulate.wire import parse_wire

    link_seconds = args.link_us * 1e-6
    host_kv = None if args.host_kv is None else HostKV(args.host_kv, args.host_kv_shared)
    if args.num_prefill is None:
        return build_cluster(config, args.num_replicas, host, link_seconds, host_kv=host_kv)
    prefill = config.override(parse_set(args.prefill_set))
    check_options(prefill)
    counts = Counts(args.num_prefill, args.num_decode)
    wire = parse_wire(args.kv_wire)
    return build_disaggregated(prefill, config, counts, host, link_seconds, wire, host_kv=host_kv)


def _replicas(args: argparse.Namespace) -> dict[str, Any]:
    """For the record."""
    if args.num_prefill is None:
        return {"num_replicas": args.num_replicas}
    from minivllm.simulate.wire import parse_wire

    counts = {"num_prefill_replicas": args.num_prefill, "num_decode_replicas": args.num_decode}
    return counts | {"prefill": parse_set(args.prefill_set), "kv_wire": parse_wire(args.kv_wire)._asdict()}


def _place(args: argparse.Namespace, config: EngineConfig) -> str:
    """In words."""
    if args.num_prefill is not None:
        return f"{args.num_prefill} for prompts behind {config.engine.router}, {args.num_decode} for answers"
    return f"{args.num_replicas} replicas behind {config.engine.router}" if args.num_replicas > 1 else "one replica"


def parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="What devices that are not there would do with a trace of requests.")
    parser.conflict_handler = "resolve"  # --trace: what is asked, and not what is recorded; --replicas: no processes
    add_engine_options(parser, model_argument=True)
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("simulation")
    group.add_argument("--trace", dest="source", metavar="FILE|NAME", help="who asks what, and when: a file, or a draw")
    group.add_argument("--replicas", dest="num_replicas", type=int, metavar="N", help="engines, and GPUs (1)")
    group.add_argument("--prefill-replicas", dest="num_prefill", type=int, metavar="N", help="compute prompts alone")
    group.add_argument("--decode-replicas", dest="num_decode", type=int, metavar="N", help="go on from their KV")
    group.add_argument(
        "--prefill-set", action="append", default=[], metavar="a.b=c", help="an option of prefill replicas alone"
    )
    group.add_argument("--kv-wire", metavar="NAME", help="that KV takes: nvlink3, ib-200; or GB/s,us: 25,20 (ib-200)")
    group.add_argument("--host-kv", type=int, metavar="N", help="tokens of K and V in each replica's host memory (0)")
    group.add_argument("--host-kv-shared", action="store_true", help="each finds there what any has computed")
    group.add_argument("--input-len", type=int, metavar="N", help=f"without a trace: tokens of a prompt ({INPUT_LEN})")
    group.add_argument("--output-len", type=int, metavar="N", help=f"without a trace: of an answer ({OUTPUT_LEN})")
    group.add_argument(
        "--rate", type=float, metavar="R", help="requests a second; a file is stretched to it (1 of a draw)"
    )
    group.add_argument("--num-requests", type=int, metavar="N", help="the first N (of a draw 1000)")
    group.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    group.add_argument("--host", help="its time a step: none, minivllm, or microseconds: step,request (as profiled)")
    group.add_argument("--link-us", type=float, default=0.0, metavar="US", help="a way between router and replica (0)")
    group.add_argument("--slo", nargs="+", default=[], metavar="NAME=TIME", help="objectives: ttft=500ms tpot=50ms")
    group.add_argument("--json", metavar="FILE", help="write all of it there; -: to the standard output, and no table")
    parser.set_defaults(trace=None, executor="simulated")
    return parser


def _names(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("preset", "overrides")}


def _host(asked: str | None, config: EngineConfig) -> HostCost:
    """Unless it is asked for: of a machine that was measured its own, else none."""
    from minivllm.simulate.host import NO_HOST, parse_host
    from minivllm.simulate.machines import find_machine
    from minivllm.simulate.profile import Profile

    if asked is not None:
        return parse_host(asked)
    machine = find_machine(config.executor.device) if config.executor.device else None
    return machine.host_cost if isinstance(machine, Profile) else NO_HOST


def _source(args: argparse.Namespace) -> str:
    _check_replicas(args)
    if args.link_us < 0:
        fail(f"--link-us {args.link_us:g}: must be at least 0", code=2)
    if args.source is None:
        input_len = INPUT_LEN if args.input_len is None else args.input_len
        output_len = OUTPUT_LEN if args.output_len is None else args.output_len
        return f"fixed:prompt={input_len},output={output_len}"
    if args.input_len is not None or args.output_len is not None:
        fail("--input-len and --output-len are for a run without --trace, which says lengths itself", code=2)
    return args.source


def _check_replicas(args: argparse.Namespace) -> None:
    """And what nobody said of how KV moves."""
    if (args.num_prefill is None) != (args.num_decode is None):
        fail("--prefill-replicas and --decode-replicas come together: who computes prompts, and who answers", code=2)
    if args.num_prefill is None and (args.prefill_set or args.kv_wire):
        fail("--prefill-set and --kv-wire are of a cluster with --prefill-replicas", code=2)
    if args.num_prefill is not None and args.num_replicas is not None:
        fail("--replicas does both prompts and answers: leave it out beside --prefill-replicas", code=2)
    if args.host_kv_shared and args.host_kv is None:
        fail("--host-kv-shared is of --host-kv, which says how many tokens", code=2)
    args.num_replicas = 1 if args.num_replicas is None else args.num_replicas
    args.kv_wire = args.kv_wire or "ib-200"


def _write(record: dict[str, Any], path: str) -> None:
    text = json.dumps(record, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


# ------------------------------------------------------------------------------------------------------ for people


def show(config: EngineConfig, place: str, found: dict[str, Any], figures: Figures) -> None:
    print(f"{config.model.path} on {config.executor.device or 'h100'} (simulated), {place}")
    print(f"{found['num_finished']:,} requests in {found['seconds']:,.1f} simulated seconds\n")
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [(name.upper(), *_milliseconds(found[name], columns)) for name in ("ttft", "tpot", "itl", "latency")]
    print_table("milliseconds", ("milliseconds", *columns), rows)
    print()
    print_table("figures", ("what", "value"), _totals(found))
    for sentence in remarks(found, figures.why_refused):
        print(f"\n{sentence}")


def _milliseconds(of: dict[str, float], columns: Sequence[str]) -> list[str]:
    return [f"{1e3 * of[column]:,.2f}" if column in of else "" for column in columns]


def _totals(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("requests/s", f"{found['requests_per_s']:,.2f}"),
        ("output tokens/s", f"{found['output_tokens_per_s']:,.0f}"),
        ("tokens/s, prompts included", f"{found['total_tokens_per_s']:,.0f}"),
        ("device busy", f"{found['device_busy']:.1%}"),
        ("KV pool in use", f"{found['kv_usage']['mean']:.1%}, {found['kv_usage']['max']:.1%} at most"),
        ("prefix hits", f"{found['prefix_hit_rate']:.1%} of the tokens looked up"),
        ("preemptions", f"{found['preemptions']:,}"),
    ]
    rows += [(f"device busy, {name}", f"{busy:.1%}") for name, busy in found.get("device_busy_by", {}).items()]
    if (sent := found.get("kv_transfers", {})).get("num"):
        size = f"{sent['bytes_a_device'] / sent['num'] / 1e6:,.1f} MB of a device"
        rows.append(("KV sent", f"{sent['num']:,} times, {size}, {1e3 * sent['seconds']['mean']:,.2f} ms in the mean"))
        rows.append(("KV waited", f"{1e3 * sent['waited']['mean']:,.2f} ms in the mean, {sent['given_up']:,} given up"))
    if "attained" in found:
        met = f"{found['attained']:.1%} of requests, {found['goodput_per_s']:,.2f} a second"
        rows.append(("objectives met", met))
    return rows


def remarks(found: dict[str, Any], why_refused: str) -> list[str]:
    """What a reader of the figures must know first."""
    said = []
    if found["queue_grew"]:
        said.append(
            f"The queue grew throughout: {found['requests_per_s']:,.2f} requests a second are served and more arrive, "
            "so that latencies say how long the run was. Lower --rate, or add --replicas."
        )
    if found["num_refused"]:
        said.append(f"{found['num_refused']:,} requests can never run and were refused: {why_refused}")
    if found["num_cut"]:
        said.append(f"{found['num_cut']:,} answers were cut where prompt and answer reach the longest length.")
    return said
