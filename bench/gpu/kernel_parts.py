"""Parts `correctness` and `kernels` of bench/gpu/run.py."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from card import NOT_MEASURED, copy_bandwidth, replayed
from case import Case

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def obstacle(args: Namespace) -> str | None:
    """Why these parts cannot run here, or None."""
    try:
        from minivllm.kernels.triton.interpreted import INTERPRETED
    except ImportError:
        return 'triton is not installed: pip install "minivllm[gpu]" (Linux only)'
    args.dtype = args.dtype or ("float16" if INTERPRETED else "bfloat16")
    if args.device == "cpu" and not INTERPRETED:
        return "--device cpu runs kernels in triton's interpreter: set TRITON_INTERPRET=1"
    return None


def correctness(args: Namespace, device: torch.device) -> list[dict[str, Any]]:
    return [check(case) for case in _cases(args, device)]


def kernels(args: Namespace, device: torch.device) -> list[dict[str, Any]]:
    rows = [timed(case, device) for case in _cases(args, device)]
    return [*rows, {"kernel": "copy", "shape": "256 MB", "gb_per_s": copy_bandwidth(device)}]


def _cases(args: Namespace, device: torch.device) -> list[Case]:
    from cases import cases  # only now is it known that triton is there

    return list(cases(device, DTYPES[args.dtype], device.type == "cpu", args.seed))


def check(case: Case) -> dict[str, Any]:
    """Largest error relative to 1 + |result|; an output that kept its poison (NaN) is wrong."""
    got, wanted = case.read(case.call()), case.oracle().double()
    error = ((got - wanted).abs() / (1 + wanted.abs())).nan_to_num(nan=torch.inf).max().item()
    return {"kernel": case.kernel, "shape": case.shape, "error": error, "right": error <= case.tolerance}


def timed(case: Case, device: torch.device) -> dict[str, Any]:
    case.call()  # compiled, and every buffer there
    row = {"kernel": case.kernel, "shape": case.shape}
    if device.type == "cpu":  # the interpreter's times say nothing about a GPU
        return row | {"us": NOT_MEASURED, "gb_per_s": NOT_MEASURED, "tflops": NOT_MEASURED}
    seconds = replayed(case.call)
    rate = {"gb_per_s": round(case.num_bytes / seconds / 1e9, 1), "tflops": round(case.flops / seconds / 1e12, 1)}
    return row | {"us": round(seconds * 1e6, 2)} | rate
