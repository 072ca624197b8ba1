"""Drafts: a request with guesses is more than one token behind, and that is all that a scheduler knows of speculation.

update()    keeps of the guesses those that may all become output                        `useful`
schedule()  takes them into the plan if budget and free blocks allow                     `allocate`
update()    sets the request back to the last guess that was accepted                    `settle`

A request with a step in flight has guesses that nobody knows yet, behind as many tokens as that step may accept. It is
planned for the most that both can be (StepPlan.ahead): `computed + in flight` is then the furthest place. Which it was
is known when the step before has been taken in                                          `complete`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from minivllm.kv.base import KVManager
from minivllm.plan import StepPlan
from minivllm.request import Request, before_an_end
from minivllm.scheduler.limits import Limits


class Drafts:
    def __init__(self, kv: KVManager, limits: Limits, lookahead: int, num_ahead: int):
        """lookahead: KV slots behind a request's tokens that a proposer of drafts writes to. num_ahead: drafts that it
        may bring to a step behind one in flight."""
        self.kv = kv
        self.limits = limits
        self.lookahead = lookahead
        self.num_ahead = num_ahead
        self.are_possible = bool(lookahead or num_ahead)

    def allocate(self, plan: StepPlan, req: Request, new_tokens: int, most: int) -> Sequence[int] | None:
        """Room for new_tokens, for req's drafts (both at most `most` tokens) and for what the proposer writes behind
        them; the drafts are then in the plan. None if that is not free: nobody is preempted for a guess."""
        start = req.num_computed_tokens + req.num_in_flight
        if start >= len(req.token_ids):
            return self._allocate_ahead(plan, req, start, most)
        if start + new_tokens < len(req.token_ids):
            return None  # a prompt's chunk
        drafts = req.drafts[: max(0, most - new_tokens)]
        end = len(req.token_ids) + len(drafts)
        lookahead = max(0, min(self.lookahead, req.num_final_slots(self.limits.max_model_len) - end))
        blocks = self.kv.allocate(req, new_tokens + len(drafts), lookahead)
        if blocks is not None and drafts:
            plan.drafts[req.id] = drafts
        return blocks

    def _allocate_ahead(self, plan: StepPlan, req: Request, start: int, most: int) -> Sequence[int] | None:
        """start: the furthest place of the request's newest token."""
        behind = req.num_final_slots(self.limits.max_model_len) - start - 1
        num_drafts = max(0, min(self.num_ahead, most - 1, behind))
        lookahead = max(0, min(self.lookahead, behind - num_drafts))
        blocks = self.kv.allocate(req, 1 + num_drafts, lookahead)
        plan.ahead[req.id] = 0 if blocks is None else num_drafts
        return blocks

    def complete(self, plan: StepPlan, requests: Mapping[str, Request], dropped: Collection[str]) -> None:
        """Before the output is taken in: the plan becomes what was computed (spec_decode/ahead.py), but for requests
        that want nothing of it."""
        for req_id in [req_id for req_id in plan.ahead if req_id not in dropped]:
            req = requests[req_id]
            drafts = req.drafts[: plan.ahead.pop(req_id)]
            num_tokens = 1 + len(drafts)
            req.num_in_flight -= plan.num_tokens[req_id] - num_tokens
            plan.start[req_id], plan.num_tokens[req_id] = req.num_computed_tokens, num_tokens
            if drafts:
                plan.drafts[req_id] = drafts
                plan.stats.num_drafted += len(drafts)

    def settle(self, plan: StepPlan, req: Request, tokens: list[int]) -> None:
        """K and V of rejected drafts are as good as never computed; their slots are written again."""
        num_drafts = len(plan.drafts.get(req.id, ()))
        if num_drafts:
            num_accepted = len(tokens) - 1
            assert 0 <= num_accepted <= num_drafts, f"{len(tokens)} tokens out of {num_drafts} drafts"
            req.num_computed_tokens -= num_drafts - num_accepted
            plan.stats.num_accepted += num_accepted

    def useful(self, req: Request, drafts: Sequence[int]) -> list[int]:
        """Drafts that may all become output with one more token behind them: none beyond the longest length, none
        that would end the request. So whoever accepts drafts need not know what ends one."""
        params, longest = req.params, self.limits.max_model_len
        last = min(req.num_prompt_tokens + (params.max_tokens or longest), longest) - 1
        drafts = list(drafts[: max(0, last - len(req.token_ids))])
        return before_an_end(drafts, params.end_token_ids) if drafts else drafts

    def check(self, req: Request) -> None:
        assert not req.drafts or req.num_tokens + len(req.drafts) < self.limits.max_model_len
