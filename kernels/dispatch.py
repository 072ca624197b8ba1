"""`runner.kernels`: which Triton kernels the engine uses on this device, and why not the others.

The C++ kernels have choices of their own, and so has attention, whose `auto` asks here. Whoever could use a kernel asks
for it by its name in table.py and brings a proof: a function that runs the kernel on the device, on a little input, and
says whether it gave what its reference gives. With `auto` a kernel is used on a CUDA device, once its proof has held
there: no kernel that this card computes otherwise, or that this compiler cannot build, ever serves. The reference takes
its place, and the start-up table says so.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from minivllm.errors import ConfigError
from minivllm.kernels.table import KERNELS

logger = logging.getLogger("minivllm")

Proof = Callable[[torch.device], bool]
NAMES = frozenset(kernel.name for kernel in KERNELS if kernel.family == "triton")


def unsupported_reason(device: torch.device) -> str | None:
    """Why no Triton kernel can run there, or None."""
    if find_spec("triton") is None:
        return 'triton is not installed: pip install "minivllm[gpu]" (Linux only)'
    if device.type == "cuda":
        return None
    # Nobody else asks for its interpreter, and to import it takes a tenth of a start.
    if device.type == "cpu" and ("TRITON_INTERPRET" in os.environ or "triton" in sys.modules):
        from minivllm.kernels.triton.interpreted import INTERPRETED

        if INTERPRETED:
            return None
    return f"Triton's kernels need a CUDA device, not {device.type}"


class Dispatch:
    def __init__(self, asked: str, device: torch.device):
        """asked: runner.kernels. Raises ConfigError if what is asked for cannot run there."""
        self.device, self._asked = device, asked
        self._proves = asked == "auto"
        self._off: str | None = "as configured" if asked == "torch" else unsupported_reason(device)
        if asked == "auto" and self._off is None and device.type == "cpu":
            self._off = "the interpreter is for tests"
        if asked == "triton" and self._off is not None:
            raise ConfigError(f"runner.kernels=triton cannot run here: {self._off}. Use runner.kernels=auto")
        self._outcomes: dict[str, str | None] = {}  # by name: why not, or None

    def uses(self, name: str, proof: Proof) -> bool:
        """Whether the engine shall call kernel `name` (of table.py). Each is proven once."""
        return self.verdict((name,), proof)[0]

    def verdict(self, names: Sequence[str], proof: Proof, reference: str = "its reference") -> tuple[bool, str]:
        """Whether the engine shall call these kernels, which one proof is of, and why or why not."""
        assert NAMES.issuperset(names), names
        if self._off is not None:
            return False, "runner.kernels=torch" if self._asked == "torch" else self._off
        if names[0] not in self._outcomes:
            why_not = self._why_not(proof, reference) if self._proves else None
            self._outcomes |= dict.fromkeys(names, why_not)
            if why_not is not None:
                logger.warning("kernels: %s stays in torch: %s", ", ".join(names), why_not)
        if (why_not := self._outcomes[names[0]]) is not None:
            return False, why_not
        return True, f"gave the answer of {reference} on this device" if self._proves else "runner.kernels=triton"

    def refuse(self, name: str, why: str) -> None:
        """What kernel `name` would be used for is none of its work, whatever its proof would say."""
        assert name in NAMES, name
        self._outcomes[name] = why

    def _why_not(self, proof: Proof, reference: str) -> str | None:
        try:
            return None if proof(self.device) else f"it differs from {reference} on this device"
        except Exception as e:  # whatever a compiler or a driver says; what is told is the first line
            return f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0][:120]}"

    @property
    def decision(self) -> tuple[str, str]:
        """The kernels that were asked for so far: for the start-up table."""
        if self._off is not None:
            return "torch", self._off
        used = [name for name, why_not in self._outcomes.items() if why_not is None]
        refused = [f"{name} in torch ({why_not})" for name, why_not in self._outcomes.items() if why_not is not None]
        how = "each gave its reference's answer on this device" if self._proves else "as configured"
        shown = [f"{', '.join(used)}: {how}"] if used else []
        return "triton" if used else "torch", "; ".join(shown + refused) or "nothing of this engine has a kernel"
