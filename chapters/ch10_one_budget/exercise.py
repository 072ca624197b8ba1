"""Chapter 10: write V1's scheduler. Fill in `schedule`, then run the tests:

python -m minivllm chapter 10 --exercise
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Request:
    id: str
    tokens: list[int]  # the prompt, then the answer so far
    num_computed: int = 0  # of these, how many have their K and V in the cache


def schedule(
    running: list[Request],
    waiting: list[Request],
    budget: int,
    max_running: int,
) -> dict[str, int]:
    """One step: {request id: how many of its next tokens to compute}, in the order of service.

    Those that run come first, then those that wait, each list in its order and nobody overtaken.
    Whoever is in the plan and was waiting moves from `waiting` to the end of `running`. A step has
    at most `budget` tokens, and at most `max_running` requests run. A request that gets nothing is
    not in the plan.
    """
    raise NotImplementedError("yours to write")
