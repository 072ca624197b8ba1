"""What every scheduler shares: the queues, admission, preemption, and the bookkeeping after a step.

A scheduler decides only `schedule()`: which tokens run next. It never looks at a clock (time is an argument), a device
or a token's meaning, and two runs over the same calls make the same plans.

    add -> waiting --schedule()--> running --update()--> finished
              ^------ preempt ------'                    abort() leaves from either list

schedule() may be called again before update() has taken in what the plans before gave (engine/core.py says how often).
It then counts on what is in flight: each request goes on where its last plan will have brought it, behind a token that
is perhaps not known yet, up to its longest length. Only update() makes tokens and K and V out of these counts, so that
nothing of a step in flight is ever reported or published. What a request's end shows to have been too much, and what a
request that is preempted or aborted had in flight, is dropped when it lands; preempted, it computes that again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from minivllm.errors import BadRequest, NeverFits
from minivllm.kv.base import KVManager
from minivllm.plan import Delta, Join, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.admission import Admission, AdmitAll
from minivllm.scheduler.policy import FCFS, Policy

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # requests in a step
    max_num_batched_tokens: int  # tokens in a step: the budget
    max_model_len: int  # tokens of a request, output included
    kv_capacity: int  # tokens that the whole KV pool holds


class Scheduler(Protocol):
    def add(self, req: Request) -> None:
        """Raises NeverFits for a request that no amount of waiting can serve."""
        ...

    def abort(self, req_id: str) -> None:
        """Forget the request, wherever it is. An unknown id is no error: it may have finished a moment ago."""
        ...

    def schedule(self, now: float) -> StepPlan:
        """The next step. Plans that update() has not seen are in flight, and are counted on."""
        ...

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        """Take in what the step produced; plans in their order. The only writer of num_computed_tokens, except for
        preemption's reset."""
        ...

    def check(self) -> None: ...


class SchedulerBase:
    """All of a Scheduler but schedule()."""

    def __init__(
        self,
        kv: KVManager,
        limits: Limits,
        policy: Policy | None = None,
        chunked_prefill: bool = True,
        admission: Admission | None = None,
        lookahead: int = 0,
    ):
        self.kv = kv
        self.limits = limits
        self.policy = policy or FCFS()
        self.chunked_prefill = chunked_prefill
        self.admission = admission or AdmitAll()
        self.lookahead = lookahead  # KV slots behind a request's tokens that a proposer of drafts writes to
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in service order
        self.waiting: list[Request] = []  # in reverse service order: the next one is at the end
        self._leaves: list[str] = []  # rows that the workers may drop
        self._joins: dict[str, tuple[Join, list[int]]] = {}  # forked since the last plan: who, and its blocks
        self._in_flight: dict[int, StepPlan] = {}  # by step: plans that update() has not seen yet
        self._dropped: dict[int, set[str]] = {}  # by step in flight: requests that want nothing of it any more
        self._num_added = 0
        self._num_steps = 0

    # --- entering and leaving

    def add(self, req: Request) -> None:
        if req.id in self.requests:
            raise BadRequest(f'request id "{req.id}" is in use', "request_id")
        self._check_fits(req)
        req.order = self.policy.order(req, self._num_added)
        self._num_added += 1
        self.requests[req.id] = req
        self.enqueue(req)

    def abort(self, req_id: str) -> None:
        req = self.requests.get(req_id)
        if req is None:
            return
        if _remove(self.running, req):
            self._retire(req)
        else:
            self.waiting.remove(req)
            self.kv.free(req)
            del self.requests[req_id]

    def _retire(self, req: Request) -> None:
        """The end of a request that has left `running`."""
        self._drop_in_flight(req)
        self.kv.free(req)
        self._leave(req)
        del self.requests[req.id]

    def _leave(self, req: Request) -> None:
        """The workers may drop its row, unless they have not even heard of it."""
        if self._joins.pop(req.id, None) is None:
            self._leaves.append(req.id)

    def _check_fits(self, req: Request) -> None:
        limits, prompt = self.limits, req.num_prompt_tokens
        if prompt == 0:
            raise BadRequest("the prompt is empty", "prompt")
        if prompt >= limits.max_model_len:
            raise NeverFits(
                f"the prompt has {prompt} tokens, which leaves no room for output: "
                f"max_model_len is {limits.max_model_len} tokens",
                "prompt",
            )
        longest = req.num_final_slots(limits.max_model_len)
        if longest > limits.kv_capacity:
            raise NeverFits(
                f"prompt and output may reach {longest} tokens; the KV pool holds {limits.kv_capacity}. "
                "Lower max_tokens or give the pool more blocks (kv.num_blocks, kv.memory)",
                "max_tokens",
            )
        if not self.chunked_prefill and longest > limits.max_num_batched_tokens:
            raise NeverFits(
                f"prompt and output may reach {longest} tokens, which one step must be able to recompute; "
                f"without chunked prefill a step takes {limits.max_num_batched_tokens}. "
                "Raise scheduler.max_num_batched_tokens or turn scheduler.chunked_prefill on",
                "max_tokens",
            )

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        """Go on from running requests as others, (parent's id, child) each; then abort `ends`.

        children: with all their tokens, and an order of their own. One starts from as much of its parent's KV as
        `kv.fork` gives; if that is nothing, or there is no place for it, it waits and is admitted like a new request.
        """
        num_places = self.limits.max_num_seqs - len(self.running) + len(ends)
        for parent_id, child in forks:
            self.requests[child.id] = child
            parent = self.requests.get(parent_id)
            num_found = self.kv.fork(parent, child) if parent is not None and parent.num_computed_tokens else 0
            blocks = self.kv.allocate(child, 0) if num_found and num_places > 0 else None
            if blocks is None:
                self.kv.free(child)
                self.enqueue(child)
                continue
            num_places -= 1
            child.num_computed_tokens = num_found
            insort(self.running, child, key=_order)
            self._joins[child.id] = _join(child), list(blocks)
        for req_id in ends:
            self.abort(req_id)

    def enqueue(self, req: Request) -> None:
        """To its place in the queue."""
        insort(self.waiting, req, key=lambda r: _Reversed(r.order))

    # --- planning, for schedule()

    def preempt(self, req: Request) -> None:
        """Take a running request's blocks away. It goes back to its place in the queue."""
        removed = _remove(self.running, req)
        assert removed, f"{req.id} is not running"
        self._drop_in_flight(req)
        self.kv.free(req, keep=req.id not in self._joins)  # of a fork there is no KV yet, only a copy to be made
        self._leave(req)
        req.num_computed_tokens = 0
        req.drafts = []
        req.num_preemptions += 1
        self.enqueue(req)

    def _drop_in_flight(self, req: Request) -> None:
        if req.num_in_flight:
            req.num_in_flight = 0
            for step, plan in self._in_flight.items():
                if req.id in plan.num_tokens:
                    self._dropped.setdefault(step, set()).add(req.id)

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        running, allocate, lookahead, drafts = self.running, self.kv.allocate, self.lookahead, plan.drafts
        i = 0
        while budget and i < len(running):  # preemption shortens the list at its end
            req = running[i]
            start = req.num_computed_tokens + req.num_in_flight
            new_tokens = min(len(req.token_ids) - start, budget)
            if new_tokens <= 0:  # all that is known is planned: what comes next is being sampled
                if start >= req.num_final_slots(self.limits.max_model_len):
                    i += 1
                    continue  # and is the last one
                new_tokens = 1
            blocks = None
            if req.drafts or lookahead:  # drafts leave every other running request a token of the budget
                blocks = self._allocate_ahead(plan, req, new_tokens, budget - (len(running) - i - 1))
            if blocks is None:
                blocks = allocate(req, new_tokens)
            if blocks is None:
                blocks = self._make_room(plan, req, new_tokens)
                if blocks is None:
                    break
            if drafts:
                new_tokens += len(drafts.get(req.id, ()))
            plan.num_tokens[req.id] = new_tokens
            plan.start[req.id] = start
            req.num_in_flight += new_tokens
            if blocks:
                plan.new_blocks[req.id] = list(blocks)
            budget -= new_tokens
            i += 1
        return budget

    def _allocate_ahead(self, plan: StepPlan, req: Request, new_tokens: int, most: int) -> Sequence[int] | None:
        """Room for new_tokens, for req's drafts (both at most `most` tokens) and for what the proposer writes behind
        them; the drafts are then in the plan. None if that is not free: nobody is preempted for a guess."""
        if req.num_computed_tokens + new_tokens < len(req.token_ids):
            return None  # a prompt's chunk
        drafts = req.drafts[: max(0, most - new_tokens)]
        end = len(req.token_ids) + len(drafts)
        lookahead = max(0, min(self.lookahead, req.num_final_slots(self.limits.max_model_len) - end))
        blocks = self.kv.allocate(req, new_tokens + len(drafts), lookahead)
        if blocks is not None and drafts:
            plan.drafts[req.id] = drafts
        return blocks

    def _make_room(self, plan: StepPlan, req: Request, new_tokens: int) -> Sequence[int] | None:
        """Preempt from the end of `running` until req's tokens fit. None if req itself had to go."""
        while True:
            victims = self._victims()
            for victim in victims:
                self.preempt(victim)
                # A relative may be in the plan.
                for column in (plan.num_tokens, plan.start, plan.new_blocks, plan.drafts):
                    column.pop(victim.id, None)
            plan.stats.num_preempted += len(victims)
            if req in victims:
                return None
            if (blocks := self.kv.allocate(req, new_tokens)) is not None:
                return blocks

    def _victims(self) -> list[Request]:
        """Who is preempted next."""
        return self.running[-1:]

    def _new_plan(self) -> StepPlan:
        plan = StepPlan(step=self._num_steps)
        self._num_steps += 1
        return plan

    def _try_admit(self, plan: StepPlan, req: Request, num_found: int, new_tokens: int) -> bool:
        """Move a waiting request to `running` and into the plan, if there is room. num_found: what lookup() said."""
        if self.running and not self.admission.admits(req, new_tokens, self.running, self.kv.usage):
            return False
        blocks = self.kv.allocate(req, new_tokens)
        if blocks is None:
            return False
        if self.waiting[-1] is req:
            self.waiting.pop()
        else:
            self.waiting.remove(req)
        insort(self.running, req, key=_order)
        if req.num_preemptions == 0:
            req.num_cached_tokens = num_found
        plan.stats.prefix_queries += req.num_tokens
        plan.stats.prefix_hits += num_found
        plan.joins.append(_join(req))
        plan.num_tokens[req.id] = new_tokens
        plan.start[req.id] = num_found
        req.num_in_flight = num_found + new_tokens  # what was found is taken for computed by update() too
        plan.new_blocks[req.id] = list(blocks)
        return True

    def _finish_plan(self, plan: StepPlan) -> StepPlan:
        limits, usage = self.limits, self.kv.usage
        plan.leaves, self._leaves = self._leaves, []
        for req_id, (join, blocks) in self._joins.items():
            plan.joins.append(join)
            plan.new_blocks[req_id] = blocks + plan.new_blocks.get(req_id, [])
        self._joins.clear()
        self.kv.moves.drain(plan)
        total = plan.total_tokens
        stats = plan.stats  # its other fields were counted while planning
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.num_free_blocks, stats.num_cached_blocks = usage.num_free, usage.num_cached
        stats.num_total_blocks = usage.num_total
        stats.num_used_slots = sum(plan.start.values()) + total
        stats.num_drafted = sum(map(len, plan.drafts.values()))
        assert total <= limits.max_num_batched_tokens, "the step's token budget is exceeded"
        assert len(self.running) <= limits.max_num_seqs, "more requests run than may"
        assert plan.num_tokens.keys() == plan.start.keys()
        plan.num_in_flight = len(self._in_flight)
        self._in_flight[plan.step] = plan
        return plan

    # --- after the step

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas: list[Delta] = []
        finished: list[Request] = []
        requests, start, kv, speculates = self.requests, plan.start, self.kv, bool(plan.drafts or out.drafts)
        self._in_flight.pop(plan.step)
        dropped = self._dropped.pop(plan.step, ())
        if out.is_lost:
            self._take_back(plan, [req_id for req_id in plan.num_tokens if req_id not in dropped])
            return deltas
        if out.is_failed:
            self._take_back(plan, ())
        for req_id, num_new in plan.num_tokens.items():
            if req_id in dropped:
                continue
            req = requests[req_id]
            if req_id in out.errors:  # before commit: what it computed is not to be shared
                deltas.append(_delta(req, finish_reason="error", error=out.errors[req_id]))
                finished.append(req)
                continue
            end = start[req_id] + num_new
            req.num_in_flight -= end - req.num_computed_tokens
            req.num_computed_tokens = end
            tokens = out.tokens.get(req_id)
            if speculates:
                self._settle_drafts(plan, req, tokens)
            delta = self._take_tokens(req, tokens, out) if tokens else None
            if speculates or req.drafts:
                req.drafts = self._useful(req, out.drafts.get(req_id, ()))
            if req_id in out.prompt_logprobs:
                delta = delta or _delta(req)
                delta.prompt_logprobs = _unreported(req, start[req_id], out.prompt_logprobs[req_id])
            kv.commit(req)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    finished.append(req)
        if finished:
            gone = {req.id for req in finished}
            self.running = [req for req in self.running if req.id not in gone]
            for req in finished:
                self._retire(req)
        return deltas

    def _take_back(self, plan: StepPlan, req_ids: Sequence[str]) -> None:
        """Nothing of a plan has run: `req_ids`, and whoever was to enter with no token to compute, begin anew."""
        self._leaves += plan.leaves  # perhaps nobody has heard of them, and leaving twice is harmless
        only_joined = [join.req_id for join in plan.joins if join.req_id not in plan.num_tokens]
        for req_id in (*req_ids, *only_joined):
            req = self.requests.get(req_id)
            if req is not None and req in self.running:
                self.preempt(req)

    def _take_tokens(self, req: Request, tokens: list[int], out: StepOutput) -> Delta:
        """Append what was sampled, up to and including a token that ends the request."""
        delta = _delta(req, num_cached_tokens=req.num_cached_tokens)
        for token in tokens:
            req.token_ids.append(token)
            delta.token_ids.append(token)
            delta.finish_reason, delta.stop_reason = self._end(req, token)
            if delta.finish_reason is not None:
                break
        if req.id in out.logprobs:
            delta.logprobs = out.logprobs[req.id][: len(delta.token_ids)]
        return delta

    def _settle_drafts(self, plan: StepPlan, req: Request, tokens: list[int]) -> None:
        """K and V of rejected drafts are as good as never computed; their slots are written again."""
        num_drafts = len(plan.drafts.get(req.id, ()))
        if num_drafts:
            num_accepted = len(tokens) - 1
            assert 0 <= num_accepted <= num_drafts, f"{len(tokens)} tokens out of {num_drafts} drafts"
            req.num_computed_tokens -= num_drafts - num_accepted
            plan.stats.num_accepted += num_accepted

    def _useful(self, req: Request, drafts: Sequence[int]) -> list[int]:
        """Drafts that may all become output with one more token behind them: none beyond the longest length, none
        that would end the request. So whoever accepts drafts need not know what ends one."""
        params, longest = req.params, self.limits.max_model_len
        last = min(req.num_prompt_tokens + (params.max_tokens or longest), longest) - 1
        drafts = list(drafts[: max(0, last - len(req.token_ids))])
        if drafts and (stops := {*params.eos_token_ids, *params.stop_token_ids}):
            return drafts[: next((i for i, token in enumerate(drafts) if token in stops), len(drafts))]
        return drafts

    def _end(self, req: Request, token: int) -> tuple[str | None, int | None]:
        """(finish_reason, stop_reason) once `token` is the request's newest; (None, None) while it goes on."""
        params, num_tokens = req.params, len(req.token_ids)
        num_output = num_tokens - req.num_prompt_tokens
        if num_output >= params.min_tokens:
            if token in params.eos_token_ids:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        if num_output == params.max_tokens or num_tokens >= self.limits.max_model_len:
            return "length", None
        return None, None

    # --- invariants

    def check(self) -> None:
        self.kv.check()
        running, waiting = [r.order for r in self.running], [r.order for r in self.waiting]
        assert running == sorted(running) and waiting == sorted(waiting, reverse=True), "a queue is out of order"
        assert len(running) + len(waiting) == len(self.requests), "a request is in no queue, or in two"
        assert {r.id for r in (*self.running, *self.waiting)} == self.requests.keys()
        for req in self.running:
            assert 0 <= req.num_computed_tokens < req.num_tokens <= self.limits.max_model_len
            ends = [
                plan.start[req.id] + plan.num_tokens[req.id]
                for step, plan in self._in_flight.items()
                if req.id in plan.num_tokens and req.id not in self._dropped.get(step, ())
            ]
            assert req.num_computed_tokens + req.num_in_flight == max([req.num_computed_tokens, *ends])
            assert not req.drafts or req.num_tokens + len(req.drafts) < self.limits.max_model_len
        assert all(req.num_computed_tokens == req.num_in_flight == 0 and not req.drafts for req in self.waiting)
        if not self.running:
            assert self.kv.usage.num_free == self.kv.usage.num_total, "blocks in use though no request runs"


def _join(req: Request) -> Join:
    return Join(req.id, list(req.token_ids), req.num_prompt_tokens, req.params, req.adapter)


def _delta(req: Request, **changed: Any) -> Delta:
    return Delta(req.id, [], arrival_time=req.arrival_time, **changed)


class _Reversed:
    """Orders keys backwards."""

    __slots__ = ("key",)

    def __init__(self, key: tuple):
        self.key = key

    def __lt__(self, other: _Reversed) -> bool:
        return other.key < self.key


def _remove(ordered: list[Request], req: Request) -> bool:
    """Take req out of a list in service order. False if it is not there."""
    i = bisect_left(ordered, req.order, key=_order)
    if i < len(ordered) and ordered[i] is req:
        del ordered[i]
        return True
    return False


def _unreported(req: Request, start: int, chunk: list) -> list:
    """The part of a chunk's prompt log-probabilities that no earlier step reported (a preemption recomputes them)."""
    new = chunk[req.num_prompt_logprobs - start :]
    req.num_prompt_logprobs += len(new)
    return new
