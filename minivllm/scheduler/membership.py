"""Who joins and who leaves: what the next plan must tell the workers of requests that came or went since the last one.

A request that is admitted joins in the plan that admits it. One that begins to run between two plans (a fork, or one
that was let in) waits here for the next, with its blocks; if it goes before that plan is made, the workers never hear
of it. Its items come and go with it (items.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.plan import Join, StepPlan
from minivllm.request import Request
from minivllm.scheduler.items import HeldItems


class Membership:
    def __init__(self, items: HeldItems) -> None:
        self.items = items
        self._joins: dict[str, tuple[Join, list[int]]] = {}  # between two plans: who, and its blocks
        self._leaves: list[str] = []  # rows that the workers may drop

    def enter(self, plan: StepPlan, req: Request) -> None:
        """In the plan that admits it."""
        self.items.join(req)
        plan.joins.append(join_of(req))

    def join(self, req: Request, blocks: Sequence[int]) -> None:
        self.items.join(req)
        self._joins[req.id] = join_of(req), list(blocks)

    def is_unheard_of(self, req_id: str) -> bool:
        """It runs, and no plan has said so."""
        return req_id in self._joins

    def leave(self, req_id: str) -> None:
        self.items.leave(req_id)
        if self._joins.pop(req_id, None) is None:
            self._leaves.append(req_id)

    def take_back(self, plan: StepPlan) -> None:
        """The plan has not run: what it told is told again. To leave twice is harmless."""
        self._leaves += plan.leaves
        self.items.take_back(plan)

    def drain(self, plan: StepPlan) -> None:
        """Into the plan, before the columns that its own decisions have filled."""
        plan.leaves, self._leaves = self._leaves, []
        for req_id, (join, blocks) in self._joins.items():
            plan.joins.append(join)
            plan.new_blocks[req_id] = blocks + plan.new_blocks.get(req_id, [])
        self._joins.clear()
        self.items.drain(plan)


def join_of(req: Request) -> Join:
    state = req.num_prompt_tokens, req.params, req.adapter, req.cache_salt, req.pooling, req.items
    return Join(req.id, list(req.token_ids), *state)
