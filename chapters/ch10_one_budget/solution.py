"""The solution of chapter 10's exercise."""

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
    """One step: {request id: how many of its next tokens to compute}, in the order of service."""
    plan: dict[str, int] = {}
    for request in running:
        new_tokens = min(len(request.tokens) - request.num_computed, budget)
        if new_tokens:
            plan[request.id] = new_tokens
            budget -= new_tokens
    while waiting and budget and len(running) < max_running:
        request = waiting.pop(0)
        running.append(request)
        new_tokens = min(len(request.tokens) - request.num_computed, budget)
        plan[request.id] = new_tokens
        budget -= new_tokens
    return plan
