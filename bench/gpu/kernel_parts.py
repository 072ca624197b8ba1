"""Parts `correctness` and `kernels` of bench/gpu/run.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from card import NOT_MEASURED, Ceilings, ceilings, error_of, measured, replayed
from case import Case, Rows, Setting, said

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def unsupported_reason(args: Namespace) -> str | None:
    """Why these parts cannot run here, or None."""
    try:
        from minivllm.kernels.triton.interpreted import INTERPRETED
    except ImportError:
        return 'triton is not installed: pip install "minivllm[gpu]" (Linux only)'
    args.dtype = args.dtype or ("float16" if INTERPRETED else "bfloat16")
    if args.device == "cpu" and not INTERPRETED:
        return "--device cpu runs kernels in triton's interpreter: set TRITON_INTERPRET=1"
    return None


def correctness(args: Namespace, device: torch.device, rows: Rows) -> None:
    _over_cases(args, device, rows, check)


def kernels(args: Namespace, device: torch.device, rows: Rows) -> None:
    best = ceilings(device)
    _over_cases(args, device, rows, lambda case: timed(case, best), lambda case: case.timed)
    rows.add({"kernel": "copy", "shape": "2 GB", "gb_per_s": best.gb_per_s if best else NOT_MEASURED})
    rows.add({"kernel": "matrix product", "shape": "8192 x 3, bf16", "tflops": best.tflops if best else NOT_MEASURED})
    if best is not None:  # what a row's time holds that is not the kernel's
        one = torch.zeros(1, device=device)
        us = round(replayed(lambda: one.add_(1)).median * 1e6, 2)
        rows.add({"kernel": "a launch", "shape": "1", "us": us})


def _over_cases(
    args: Namespace,
    device: torch.device,
    rows: Rows,
    look: Callable[[Case], dict[str, Any]],
    wanted: Callable[[Case], bool] = lambda case: True,
) -> None:
    from cases import CASES  # only now is it known that triton is there

    setting = Setting(device, DTYPES[args.dtype], device.type == "cpu")
    for i, (kernel, make) in enumerate(CASES.items()):
        if not rows.wants(kernel):
            continue
        torch.manual_seed(args.seed + i)
        try:
            for case in make(setting):
                if wanted(case):
                    rows.attempt({"kernel": case.kernel, "shape": case.shape}, lambda case=case: look(case))
        except Exception as e:
            rows.add({"kernel": kernel, "shape": "", "error": said(e)})


def check(case: Case) -> dict[str, Any]:
    with poisoned_memory():
        got = case.read(case.call())
    error = error_of(got, case.oracle())
    return {"error_size": error, "right": error <= case.tolerance}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is taken without being filled is NaN, or the largest integer: what a launcher makes for itself."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def timed(case: Case, best: Ceilings | None) -> dict[str, Any]:
    """Beside its rivals: how many times as fast as each it is."""
    case.call()
    row = measured(case.call, case.num_bytes, case.flops, best, case.captured)
    for name, rival in case.rivals.items():
        rival()
        row[f"times {name}"] = NOT_MEASURED if best is None else round(replayed(rival).median * 1e6 / row["us"], 2)
    return row
