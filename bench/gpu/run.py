"""Are the engine and its kernels right on a GPU, and how near are they to what the card can do?

    python -m bench gpu --part correctness     every kernel against its float64 oracle
    python -m bench gpu --part kernels         times, as a fraction of the copy bandwidth or the matrix rate
    python -m bench gpu --part attention       decodes and prefills beside SDPA, FlexAttention, FlashAttention ...
    python -m bench gpu --part engine          decode steps against the floor of the memory; nano-vllm's benchmark
    python -m bench gpu --part ablation        graphs, overlap, inputs ... switched back one by one; V0 against V1
    python -m bench gpu --part peers           nano-vllm's benchmark on every engine that is installed
    python -m bench gpu --part tune            the fastest tile of each attention launch: a file for kernels/tuned
    python -m bench gpu --part engine --device cpu     tiny shapes; kernels then want TRITON_INTERPRET=1

A part begins nothing new after --seconds, so that it ends within 8 minutes. What fails is a row with its error. With no
card nothing is timed: the tables say "not measured". One JSON line on standard output says what ran on which card, at
which clocks, with which versions; --out also appends it to FOLDER/<part>.jsonl. A short table comes last, and below it
the design's targets. README.md beside this file has how to run it all.
"""

from __future__ import annotations

import secrets
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import torch  # noqa: E402
from card import card, clocks  # noqa: E402
from case import Rows  # noqa: E402
from common import RESULTS, emit, note, parser  # noqa: E402
from kernel_parts import DTYPES, unsupported_reason  # noqa: E402
from targets import judge  # noqa: E402

PARTS = {  # "module:function": kernels alone need no more than torch and triton
    "correctness": "kernel_parts:correctness",
    "kernels": "kernel_parts:kernels",
    "attention": "attend:attention",
    "engine": "engine:engine",
    "ablation": "ablation:ablation",
    "peers": "rivals:peers",
    "tune": "tune:tune",
}
HIDDEN = ("spread", "settings", "how", "changes", "kv_bytes")  # of the table: the JSON has them


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    before = clocks() if args.device == "cuda" else {}
    partial = args.out and args.out / f"{args.part}.partial.json"
    rows = Rows(args.seconds, args.only, partial)
    module, _, name = PARTS[args.part].partition(":")
    getattr(import_module(module), name)(args, device, rows)
    verdicts = judge(args.part, rows)
    shown = ("part", "device", "dtype", "seed", "rounds", "seconds", "only", "overrides")
    params = {name: getattr(args, name) for name in shown}
    results = {"gpu": card(device), "clocks_before": before, "rows": list(rows), "targets": verdicts}
    emit(f"gpu_{args.part}", params, results, args.out and args.out / f"{args.part}.jsonl")
    sys.stdout.flush()  # the table comes last also where both streams are one
    if partial is not None:
        partial.unlink(missing_ok=True)
    table(rows)
    table(verdicts)
    if wrong := [row for row in rows if row.get("right") is False]:
        sys.exit(f"{len(wrong)} of {len(rows)} rows are wrong")
    if failed := [row for row in rows if "error" in row]:
        sys.exit(f"{len(failed)} of {len(rows)} rows failed, or were left out")


def arguments():
    options = parser(__doc__.partition("\n")[0], "gpu")
    out = next(action for action in options._actions if action.dest == "out")
    out.const, out.metavar = RESULTS / "gpu", "FOLDER"
    out.help = f"also append the line to FOLDER/<part>.jsonl ({out.const})"
    options.add_argument("--part", choices=PARTS, required=True)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--dtype", choices=DTYPES, help="of kernels; default: bfloat16, in the interpreter float16")
    options.add_argument("--seed", type=int, help="of the random inputs; default: another one in each run")
    options.add_argument("--rounds", type=int, default=3, help="of engines")
    options.add_argument("--seconds", type=float, default=400, help="after which nothing new begins")
    options.add_argument("--only", default="", metavar="NAME", help="rows that have NAME in theirs, not of engines")
    options.add_argument("--set", action="append", default=[], metavar="A.B=C", help="an option of the engine")
    args = options.parse_args()
    args.seed = secrets.randbits(31) if args.seed is None else args.seed
    args.overrides = {}
    if args.set:
        from minivllm.config import parse_set

        args.overrides = parse_set(args.set)
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error("no CUDA device that this torch can use: --device cpu runs tiny shapes")
    if args.part in ("correctness", "kernels", "attention", "tune") and (why := unsupported_reason(args)) is not None:
        options.error(why)
    return args


def table(rows: list[dict[str, Any]]) -> None:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    cells = [[str(row.get(name, "")) for name in names] for row in [dict(zip(names, names, strict=True)), *rows]]
    widths = [min(44, max(len(row[i]) for row in cells)) for i in range(len(names))]
    for row in cells:
        note("  ".join(f"{cell[:44]:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
