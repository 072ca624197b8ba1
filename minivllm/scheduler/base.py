"""What every scheduler shares: the queues, admission, preemption, and the bookkeeping after a step.

A scheduler decides only `schedule()`: which tokens run next. It never looks at a clock (time is an argument), a device
or a token's meaning, and two runs over the same calls make the same plans.

    add -> waiting --schedule()--> running --update()--> finished
              ^------ preempt ------'                    abort() leaves from any list
           held until the next plan is made

schedule() may be called again before update() has taken in what the plans before gave (engine/core.py says how often).
It then counts on what is in flight: each request goes on where its last plan will have brought it, behind a token that
is perhaps not known yet, up to its longest length. Only update() makes tokens and K and V out of these counts, so that
nothing of a step in flight is ever reported or published. What a request's end shows to have been too much, and what a
request that is preempted or aborted had in flight, is dropped when it lands; preempted, it computes that again.

Its parts: limits.py (who can never be served), in_flight.py, drafts.py, finish.py (tokens become deltas and ends),
membership.py (whom the workers hear of), items.py (what
stands in prompts in the place of tokens, and comes and goes with these). None knows of the others, or of the queues.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from minivllm.errors import BadRequest
from minivllm.kv.base import KVManager
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.admission import Admission, AdmitAll
from minivllm.scheduler.drafts import Drafts
from minivllm.scheduler.finish import failed, take_prompt_logprobs, take_tokens, take_vector
from minivllm.scheduler.in_flight import InFlight
from minivllm.scheduler.items import HeldItems
from minivllm.scheduler.limits import Limits
from minivllm.scheduler.membership import Membership
from minivllm.scheduler.policy import FCFS, Policy

_order = attrgetter("order")


class SchedulerBase:
    """All of an InnerScheduler but schedule()."""

    def __init__(
        self,
        kv: KVManager,
        limits: Limits,
        policy: Policy | None = None,
        chunked_prefill: bool = True,
        admission: Admission | None = None,
        lookahead: int = 0,
        num_drafts_ahead: int = 0,
    ):
        self.kv = kv
        self.limits = limits
        self.policy = policy or FCFS()
        self.chunked_prefill = chunked_prefill
        self.admission = admission or AdmitAll()
        self.drafts = Drafts(kv, limits, lookahead, num_drafts_ahead)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in service order
        self.waiting: list[Request] = []  # in reverse service order: the next one is at the end
        self._held: list[Request] = []  # taken out of `waiting` until the next plan is made
        self._num_preempted = 0  # since the last plan
        self.items = HeldItems(limits.max_new_items, limits.max_items)
        self.members = Membership(self.items)
        self.in_flight = InFlight()
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
            (self._held if req in self._held else self.waiting).remove(req)
            self.kv.free(req)
            del self.requests[req_id]

    def _retire(self, req: Request) -> None:
        """The end of a request that has left `running`."""
        self.in_flight.drop(req)
        self.kv.free(req)
        self.members.leave(req.id)
        del self.requests[req.id]

    def fit_together(self, lengths: Iterable[int]) -> bool:
        """Whether requests of so many slots can all be here at their worst moments, and alone. If not, and they are
        preempted together, they are so for ever."""
        return sum(map(self.kv.most_blocks, lengths)) <= self.kv.usage.num_total

    def _check_fits(self, req: Request) -> None:
        self.limits.check_fits(req, self.chunked_prefill)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        num_places = self.limits.max_num_seqs - sum(req.id not in ends for req in self.running)
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
            self.members.join(child, blocks)
        for req_id in ends:
            self.abort(req_id)

    def hold(self, req_ids: Iterable[str]) -> None:
        held = set(req_ids)
        self._preempt_all([req for req in reversed(self.running) if req.id in held])
        self._held += [req for req in self.waiting if req.id in held]
        self.waiting = [req for req in self.waiting if req.id not in held]

    def let_in(self, req: Request, at_cost_of: Sequence[Request] = ()) -> None:
        if not self.items.is_within_step(req):
            return  # it waits for the next step, whoever gives way
        victims = iter(at_cost_of)
        while not self._gets_in(req) and (victim := next(victims, None)) is not None:
            self._preempt_all([victim])

    def _gets_in(self, req: Request) -> bool:
        """Where a prompt may not be cut, room is all that it gets: schedule() will admit it."""
        usage, num_new = self.kv.usage, req.num_tokens - self.kv.lookup(req)
        if len(self.running) >= self.limits.max_num_seqs or not self.items.has_room(req):
            return False
        if not self.chunked_prefill or req.num_preemptions:
            return usage.num_free * usage.block_size >= num_new * usage.num_groups
        if not self.admission.admits(req, 1, self.running, usage):
            return False
        if (blocks := self.kv.allocate(req, 1)) is None:
            return False
        self.waiting.remove(req)
        req.num_computed_tokens = req.num_cached_tokens = req.num_tokens - num_new
        insort(self.running, req, key=_order)
        self.members.join(req, blocks)
        return True

    def reorder(self, orders: Mapping[str, tuple]) -> None:
        for req_id, order in orders.items():
            self.requests[req_id].order = order
        self.waiting.sort(key=_order, reverse=True)

    def enqueue(self, req: Request) -> None:
        """To its place in the queue."""
        insort(self.waiting, req, key=lambda r: _Reversed(r.order))

    # --- planning, for schedule()

    def preempt(self, req: Request) -> None:
        """Take a running request's blocks away. It goes back to its place in the queue."""
        removed = _remove(self.running, req)
        assert removed, f"{req.id} is not running"
        self.in_flight.drop(req)
        self.kv.free(req, keep=not self.members.is_unheard_of(req.id))  # else it has no KV yet, only copies to make
        self.members.leave(req.id)
        req.num_computed_tokens = 0
        req.drafts = []
        req.num_preemptions += 1
        self.enqueue(req)

    def _preempt_all(self, victims: Sequence[Request]) -> None:
        """Between two plans."""
        for victim in victims:
            self.preempt(victim)
        self._num_preempted += len(victims)

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        running, allocate, spares = self.running, self.kv.allocate, self.policy.spares_running
        may_draft, drafts, ahead = self.drafts.are_possible, plan.drafts, plan.ahead
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
            if spares and new_tokens > 1:
                new_tokens = min(new_tokens, max(1, budget - (len(running) - i - 1)))
            blocks = None
            if req.drafts or may_draft:  # drafts leave every other running request a token of the budget
                blocks = self.drafts.allocate(plan, req, new_tokens, budget - (len(running) - i - 1))
            if blocks is None:
                blocks = allocate(req, new_tokens)
            if blocks is None:
                blocks = self._make_room(plan, req, new_tokens)
                if blocks is None:
                    break
            if drafts or ahead:
                new_tokens += len(drafts.get(req.id, ())) + ahead.get(req.id, 0)
            plan.num_tokens[req.id] = new_tokens
            plan.start[req.id] = start
            req.num_in_flight += new_tokens
            if blocks:
                plan.new_blocks[req.id] = list(blocks)
            budget -= new_tokens
            i += 1
        return budget

    def _make_room(self, plan: StepPlan, req: Request, new_tokens: int) -> Sequence[int] | None:
        """Preempt from the end of `running` until req's tokens fit. None if req itself had to go."""
        while True:
            victims = self._victims()
            for victim in victims:
                self.preempt(victim)
                # A relative may be in the plan.
                for column in (plan.num_tokens, plan.start, plan.new_blocks, plan.drafts, plan.ahead):
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
        if not (self.items.has_room(req) and self.items.is_within_step(req)):
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
        self.members.enter(plan, req)
        plan.num_tokens[req.id] = new_tokens
        plan.start[req.id] = num_found
        req.num_in_flight = num_found + new_tokens  # what was found is taken for computed by update() too
        plan.new_blocks[req.id] = list(blocks)
        return True

    def _finish_plan(self, plan: StepPlan) -> StepPlan:
        limits, usage = self.limits, self.kv.usage
        if self._held:
            self.waiting = sorted((*self.waiting, *self._held), key=_order, reverse=True)
            self._held = []
        self.members.drain(plan)
        self.kv.moves.drain(plan)
        total = plan.total_tokens
        stats = plan.stats  # its other fields were counted while planning
        stats.num_preempted += self._num_preempted
        self._num_preempted = 0
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.num_free_blocks, stats.num_cached_blocks = usage.num_free, usage.num_cached
        stats.num_total_blocks = usage.num_total
        stats.num_used_slots = sum(plan.start.values()) + total
        stats.num_drafted = sum(map(len, plan.drafts.values()))
        assert total <= limits.max_num_batched_tokens, "the step's token budget is exceeded"
        assert len(self.running) <= limits.max_num_seqs, "more requests run than may"
        assert plan.num_tokens.keys() == plan.start.keys()
        self.in_flight.add(plan)
        return plan

    # --- after the step

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas: list[Delta] = []
        finished: list[Request] = []
        requests, start, kv, longest = self.requests, plan.start, self.kv, self.limits.max_model_len
        dropped = self.in_flight.land(plan)
        if out.is_lost:
            self._take_back(plan, [req_id for req_id in plan.num_tokens if req_id not in dropped])
            return deltas
        if out.is_failed:
            self._take_back(plan, ())
        if plan.ahead:
            self.drafts.complete(plan, requests, dropped)
        speculates = bool(plan.drafts or out.drafts)
        for req_id, num_new in plan.num_tokens.items():
            if req_id in dropped:
                continue
            req = requests[req_id]
            if req_id in out.errors:  # before commit: what it computed is not to be shared
                deltas.append(failed(req, out.errors[req_id]))
                finished.append(req)
                continue
            end = start[req_id] + num_new
            req.num_in_flight -= end - req.num_computed_tokens
            req.num_computed_tokens = end
            tokens = out.tokens.get(req_id)
            if speculates:
                self.drafts.settle(plan, req, tokens)
            delta = take_tokens(req, tokens, out, longest) if tokens else None
            if speculates or req.drafts:
                req.drafts = self.drafts.useful(req, out.drafts.get(req_id, ()))
            if req_id in out.prompt_logprobs:
                delta = take_prompt_logprobs(req, delta, start[req_id], out.prompt_logprobs[req_id])
            kv.commit(req)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    finished.append(req)
        if out.pooled:
            pooled = [requests[req_id] for req_id in out.pooled if req_id not in dropped]
            deltas += [take_vector(req, out) for req in pooled]
            finished += pooled
        if finished:
            gone = {req.id for req in finished}
            self.running = [req for req in self.running if req.id not in gone]
            for req in finished:
                self._retire(req)
        return deltas

    def _take_back(self, plan: StepPlan, req_ids: Sequence[str]) -> None:
        """Nothing of a plan has run: `req_ids`, and whoever was to enter with no token to compute, begin anew."""
        self.members.take_back(plan)
        only_joined = [join.req_id for join in plan.joins if join.req_id not in plan.num_tokens]
        for req_id in (*req_ids, *only_joined):
            req = self.requests.get(req_id)
            if req is not None and req in self.running:
                self.preempt(req)

    # --- invariants

    def check(self) -> None:
        self.kv.check()
        self.items.check()
        running, waiting = [r.order for r in self.running], [r.order for r in self.waiting]
        assert running == sorted(running) and waiting == sorted(waiting, reverse=True), "a queue is out of order"
        all_queued = [r.id for r in (*self.running, *self.waiting, *self._held)]
        assert len(all_queued) == len(self.requests), "a request is in no queue, or in two"
        assert set(all_queued) == self.requests.keys()
        for req in self.running:
            assert 0 <= req.num_computed_tokens < req.num_tokens <= self.limits.max_model_len
            self.in_flight.check(req)
            self.drafts.check(req)
        assert all(req.num_computed_tokens == req.num_in_flight == 0 and not req.drafts for req in self.waiting)
        if not self.running:
            used = self.kv.usage.num_total - self.kv.usage.num_free
            assert used == self.kv.num_lent, "blocks in use though no request runs"


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
