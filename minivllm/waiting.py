"""How the CPU backend's threads wait for each other: a short while awake, then asleep.

torch's GNU OpenMP spins for about 10 ms before a waiting thread sleeps. When another program wants the same cores, the
thread that is waited for is then often not running while the one that waits burns its time. Within a step the next
parallel region comes after some 10 us, so a wait of about 0.1 ms keeps threads awake through a step and gives the cores
back between steps. GNU OpenMP reads its setting once, from the environment, while torch is being loaded: this is the
one place where the engine sets a variable. It is a default, yields to the user's own, and is shown at start.
"""

from __future__ import annotations

import functools
import os
import sys

from minivllm.config import Decision

SPIN_COUNT = "2000"
THEIRS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@functools.cache
def settle() -> Decision:
    """To be called before torch is imported for the first time: the first call decides, and if it comes too late it
    changes nothing and says so."""
    given = [f"{name}={os.environ[name]}" for name in THEIRS if name in os.environ]
    if given:
        return Decision("executor.waiting", ", ".join(given), "as the environment says")
    if "torch" in sys.modules:
        return Decision(
            "executor.waiting", "as OpenMP does", "torch was loaded before the engine: GNU OpenMP spins for 10 ms"
        )
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return Decision(
        "executor.waiting",
        f"GOMP_SPINCOUNT={SPIN_COUNT}",
        "then asleep, so that they do not hold cores that others want",
    )
