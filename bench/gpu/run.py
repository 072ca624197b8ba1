"""The engine and its kernels on a GPU: right, and how near to what the card can do.

    python bench/gpu/run.py --part correctness     every kernel against its float64 oracle
    python bench/gpu/run.py --part kernels         times, as a fraction of the copy bandwidth measured in the same run
    python bench/gpu/run.py --part engine          decode steps against the floor of the memory; nano-vllm's benchmark
    python bench/gpu/run.py --part ablation        graphs, overlap, inputs ... switched back one by one
    python bench/gpu/run.py --part peers           nano-vllm's benchmark on every engine that is installed
    python bench/gpu/run.py --part engine --device cpu     tiny shapes; kernels then want TRITON_INTERPRET=1

With no card nothing is timed: the tables say "not measured". One JSON line on standard output says what ran on which
card, at which clocks, with which versions; --out also appends it to a file. A short table comes last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (0, 1, 2)]

import torch  # noqa: E402
from ablation import ablation  # noqa: E402
from card import card  # noqa: E402
from common import emit, note, parser  # noqa: E402
from engine import engine  # noqa: E402
from kernel_parts import DTYPES, correctness, kernels, obstacle  # noqa: E402
from rivals import peers  # noqa: E402

from minivllm.config import parse_set  # noqa: E402

PARTS = {"correctness": correctness, "kernels": kernels, "engine": engine, "ablation": ablation, "peers": peers}
HIDDEN = ("spread", "settings")  # of the table: the JSON has them


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    rows = PARTS[args.part](args, device)
    shown = ("part", "device", "dtype", "seed", "rounds", "overrides")
    params = {name: getattr(args, name) for name in shown}
    emit(f"gpu_{args.part}", params, {"gpu": card(device), "rows": rows}, args.out)
    table(rows)
    if wrong := [row for row in rows if row.get("right") is False]:
        sys.exit(f"{len(wrong)} kernels are wrong")


def arguments():
    options = parser(__doc__.partition("\n")[0], "gpu/runs")
    options.add_argument("--part", choices=PARTS, required=True)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--dtype", choices=DTYPES, help="of kernels; default: bfloat16, in the interpreter float16")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--rounds", type=int, default=3, help="of engines")
    options.add_argument("--set", action="append", default=[], metavar="A.B=C", help="an option of the engine")
    args = options.parse_args()
    args.overrides = parse_set(args.set)
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error("no CUDA device that this torch can use: --device cpu runs tiny shapes")
    if args.part in ("correctness", "kernels") and (why := obstacle(args)) is not None:
        options.error(why)
    return args


def table(rows: list[dict[str, Any]]) -> None:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    for line in [dict(zip(names, names, strict=True)), *rows]:
        note("  ".join(f"{line.get(name, '')!s:24.24}" for name in names))


if __name__ == "__main__":
    main()
