"""The `trace` command: what can be done with a run recorded by `--trace run.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.cli import Parser, add_subcommands
from minivllm.config import parse_set


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m minivllm trace", description="Look at a run recorded by --trace run.jsonl.")
    commands = add_subcommands(parser)
    export = commands.add_parser("export", help="write it for chrome://tracing or ui.perfetto.dev")
    export.add_argument("trace", help="run.jsonl")
    export.add_argument("out", help="run.json")
    replay = commands.add_parser(
        "replay", help="run its plans again and compare the tokens; exit code 1 if they differ"
    )
    replay.add_argument("trace", help="run.jsonl")
    replay.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change an option of the run")
    args = parser.parse_args(argv)
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
