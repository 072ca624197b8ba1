"""The `trace` command: what can be done with a run recorded by `--trace run.jsonl`, and with traces of requests, which
say what a simulated engine is asked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from minivllm.config import parse_set
from minivllm.terminal import Parser, add_subcommands, print_table


def main(argv: Sequence[str], prog: str = "python -m minivllm trace") -> int:
    parser = Parser(prog=prog, description="Look at a run recorded by --trace run.jsonl, or at a trace of requests.")
    commands = add_subcommands(parser)
    export = commands.add_parser("export", help="write it for chrome://tracing or ui.perfetto.dev")
    export.add_argument("trace", help="run.jsonl")
    export.add_argument("out", help="run.json")
    replay = commands.add_parser(
        "replay", help="run its plans again and compare the tokens; exit code 1 if they differ"
    )
    replay.add_argument("trace", help="run.jsonl")
    replay.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change an option of the run")
    asked = commands.add_parser("requests", help="what a trace of requests asks: lengths, rate, what prompts share")
    asked.add_argument("trace", metavar="FILE|NAME", help="a file, or a draw: sharegpt, alpaca:arrivals=gamma,cv=2 ...")
    asked.add_argument("--rate", type=float, help="requests a second; a file's times are stretched to it")
    asked.add_argument("--num-requests", type=int, metavar="N", help="the first N (of a draw 1000)")
    asked.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    asked.add_argument("--out", metavar="FILE.jsonl", help="write them there, one a line, instead of describing them")
    args = parser.parse_args(argv)
    if args.command == "requests":
        return _requests(args)
    return _export(args.trace, args.out) if args.command == "export" else _replay(args.trace, args.set)


def _export(trace: str, out: str) -> int:
    from minivllm.trace import to_chrome

    print(f"{out}: {to_chrome(trace, out)} events. Open it in ui.perfetto.dev or chrome://tracing.")
    return 0


def _replay(path: str, pairs: list[str]) -> int:
    from minivllm.trace import replay

    report = replay(path, overrides=parse_set(pairs))
    print(f"{report.num_steps} steps, {report.num_tokens} tokens: {report.divergence or 'equal'}")
    return 1 if report.divergence else 0


def _requests(args: argparse.Namespace) -> int:
    from minivllm.simulate.trace_files import write_trace
    from minivllm.simulate.traces import describe, load_trace

    requests = load_trace(args.trace, rate=args.rate, num_requests=args.num_requests, seed=args.seed)
    if args.out is not None:
        print(f"{args.out}: {write_trace(requests, args.out)} requests")
        return 0
    found = describe(requests)
    pace = f"in {found.seconds:.1f} s, {found.rate:.2f} a second" if found.seconds else "at once"
    print(f"{found.num_requests} requests {pace}")
    print_table("", ("tokens", *found.prompts), [_row("prompts", found.prompts), _row("answers", found.outputs)])
    print(f"{100 * found.shared:.1f} % of the prompts' tokens began an earlier prompt: a cache's most")
    return 0


def _row(name: str, moments: Mapping[str, float]) -> tuple[str, ...]:
    return name, *(f"{value:.1f}" for value in moments.values())
