"""One row of bench/gpu/run.py's tables."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Case(NamedTuple):
    kernel: str
    shape: str
    call: Callable[[], Tensor]  # writes its poisoned output and returns it
    oracle: Callable[[], Tensor]
    tolerance: float  # of |error| / (1 + |result|); 0: equal
    num_bytes: int  # read and written once
    flops: int = 0
    read: Callable[[Tensor], Tensor] = Tensor.double  # what call() gave, as the oracle gives it
