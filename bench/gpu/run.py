"""The kernels on a GPU: right, and how near to what the card can do.

    python bench/gpu/run.py --part correctness     every kernel against its float64 oracle
    python bench/gpu/run.py --part kernels         times, as a fraction of the copy bandwidth measured in the same run
    TRITON_INTERPRET=1 python bench/gpu/run.py --part kernels --device cpu     tiny shapes in the interpreter

With no card, nothing is timed: the tables say "not measured". The last thing printed is one JSON line, which --out also
appends to a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (0, 1, 2)]

import torch  # noqa: E402
from common import emit, note, parser  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NOT_MEASURED = "not measured"


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    from cases import cases  # only now is it known that triton is there

    work = list(cases(device, DTYPES[args.dtype], device.type == "cpu", args.seed))
    rows = [check(case) if args.part == "correctness" else timed(case, device) for case in work]
    if args.part == "kernels":
        rows.append({"kernel": "copy", "shape": "256 MB", "gb_per_s": copy_bandwidth(device)})
    table(rows)
    params = {"part": args.part, "device": args.device, "dtype": args.dtype, "seed": args.seed}
    emit(f"gpu_{args.part}", params, {"gpu": card(device), "rows": rows}, args.out)
    if wrong := [row for row in rows if row.get("right") is False]:
        sys.exit(f"{len(wrong)} kernels are wrong")


def arguments():
    options = parser(__doc__.partition("\n")[0], "gpu/kernels")
    options.add_argument("--part", choices=("correctness", "kernels"), required=True)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--dtype", choices=DTYPES, help="default: bfloat16; in the interpreter float16")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    try:
        from minivllm.kernels.triton.interpreted import INTERPRETED
    except ImportError:
        options.error('triton is not installed: pip install "minivllm[gpu]" (Linux only)')
    if args.device == "cpu" and not INTERPRETED:
        options.error("--device cpu runs in triton's interpreter: set TRITON_INTERPRET=1")
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error("no CUDA device that this torch can use: --device cpu runs tiny shapes in the interpreter")
    args.dtype = args.dtype or ("float16" if INTERPRETED else "bfloat16")
    return args


def check(case) -> dict:
    """Largest error relative to 1 + |result|; an output that kept its poison (NaN) is wrong."""
    got, wanted = case.read(case.call()), case.oracle().double()
    error = ((got - wanted).abs() / (1 + wanted.abs())).nan_to_num(nan=torch.inf).max().item()
    return {"kernel": case.kernel, "shape": case.shape, "error": error, "right": error <= case.tolerance}


def timed(case, device: torch.device) -> dict:
    case.call()  # compiled, and every buffer there
    row = {"kernel": case.kernel, "shape": case.shape}
    if device.type == "cpu":  # the interpreter's times say nothing about a GPU
        return row | {"us": NOT_MEASURED, "gb_per_s": NOT_MEASURED, "tflops": NOT_MEASURED}
    seconds = replayed(case.call)
    rate = {"gb_per_s": round(case.num_bytes / seconds / 1e9, 1), "tflops": round(case.flops / seconds / 1e12, 1)}
    return row | {"us": round(seconds * 1e6, 2)} | rate


def replayed(call, num_replays: int = 20, num_rounds: int = 5) -> float:
    """Seconds a call on the device, best round: under graph replay, since a launch from the host can take longer than
    the kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    rounds = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_replays):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / num_replays)
    return min(rounds)


def copy_bandwidth(device: torch.device) -> float | str:
    """GB/s, read and write counted."""
    if device.type == "cpu":
        return NOT_MEASURED
    source = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round(2 * source.numel() / replayed(lambda: target.copy_(source)) / 1e9, 1)


def card(device: torch.device) -> dict | str:
    if device.type == "cpu":
        return "none: triton's interpreter"
    properties = torch.cuda.get_device_properties(device)
    clock = torch.cuda.clock_rate(device) if hasattr(torch.cuda, "clock_rate") else None
    return {"name": properties.name, "sms": properties.multi_processor_count, "mhz": clock}


def table(rows: list[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    for line in [dict(zip(names, names, strict=True)), *rows]:
        note("  ".join(f"{line.get(name, '')!s:24.24}" for name in names))


if __name__ == "__main__":
    main()
