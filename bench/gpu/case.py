"""One row of bench/gpu/run.py's tables, and how rows come together."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import note
from torch import Tensor

NO_TIME = "left out: the part's time was up"


class Setting(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    tiny: bool  # shapes for triton's interpreter

    @property
    def unit(self) -> float:
        """The distance from 1 to the next number."""
        return torch.finfo(self.dtype).eps

    @property
    def num_sms(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 2

    @property
    def major(self) -> int:
        """Of the compute capability."""
        return torch.cuda.get_device_capability(self.device)[0] if self.device.type == "cuda" else 9


class Case(NamedTuple):
    kernel: str
    shape: str
    call: Callable[[], Tensor]  # writes its poisoned output and returns it
    oracle: Callable[[], Tensor]
    tolerance: float  # of |error| / (1 + |result|); 0: equal
    num_bytes: int  # read and written once
    flops: int = 0
    read: Callable[[Tensor], Tensor] = Tensor.double  # what call() gave, as the oracle gives it
    rivals: Mapping[str, Callable[[], Any]] = {}  # what would do in its place
    timed: bool = True  # False: only its result is looked at
    captured: bool = True  # False: it cannot be part of a graph


class Rows(list):
    """A part's rows as they come. What fails is a row that says so, and what would come too late is not begun: a lease
    of a card is short, and one wrong kernel should not take the others' figures along."""

    def __init__(self, seconds: float, only: str = "", partial: Path | None = None):
        """only: rows that have this in their names. partial: where the rows so far are kept, should the process be
        killed."""
        self.until, self.only, self.partial = time.monotonic() + seconds, only, partial

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def wants(self, *names: str) -> bool:
        return self.only in " ".join(names)

    def add(self, row: dict[str, Any]) -> None:
        self.append(row)
        if self.partial is not None:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.partial.write_text(json.dumps(list(self)))

    def attempt(self, head: dict[str, Any], call: Callable[[], dict[str, Any]]) -> bool:
        """Adds head and what `call` gives, or why it gave nothing. -> whether it did."""
        if self.left <= 0:
            self.add(head | {"error": NO_TIME})
            return False
        note(f"{self.left:4.0f} s left: {', '.join(map(str, head.values()))}")
        try:
            self.add(head | call())
        except Exception as e:
            note(traceback.format_exc())
            self.add(head | {"error": said(e)})
            return False
        return True


def said(e: BaseException) -> str:
    """In a line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
