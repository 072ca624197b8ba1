"""BeamScheduler: beam search around any scheduler. The beams of a request are requests of their own.

Each beam takes its likeliest token, as any greedy request does, and reports the rivals of that token. When all beams of
a request have reported, the rules (beam_search.py) say which continuations live on. One that continues a beam with the
token it took is that beam, unchanged; any other is a fork of it, with another last token; a beam without a heir ends.

    beams   A  ... x          A goes on with x       (A's request)
            B  ... y    ->    A' = A with z for x    (forked from A: all of A's KV but that of its last token, which
                                                      is computed next anyway)
                              B ends

What a fork costs is up to the KV manager (`kv.fork`): its parent's blocks and one copied (vLLM V0), or what the prefix
cache has of it (vLLM V1, whose beams are new requests in each step). The scheduler inside sees requests that come and
go; the runner sees rows.

If a beam cannot run for lack of room, those that can go on as they began, and what they report waits for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.errors import NeverFits
from minivllm.plan import Delta, PositionLogprobs, StepOutput, StepPlan
from minivllm.request import Request, sequence_ids
from minivllm.scheduler.base import SchedulerBase
from minivllm.scheduler.beam_search import BeamSearch, FinishedBeam
from minivllm.scheduler.protocol import InnerScheduler


@dataclass(slots=True)
class Group:
    """One request with beams. ids[i] is the request that runs search.running[i]; reports[i] what it said so far."""

    root: Request
    search: BeamSearch
    ids: list[str]
    reports: list[deque[PositionLogprobs]] = field(default_factory=lambda: [deque()])
    num_forks: int = 0

    def take(self, delta: Delta) -> None:
        self.reports[self.ids.index(delta.req_id)].extend(delta.logprobs or ())

    def make_child(self, token_ids: Sequence[int]) -> Request:
        root, self.num_forks = self.root, self.num_forks + 1
        return Request(
            id=f"{root.id}~{self.num_forks}",
            params=root.params,
            token_ids=root.token_ids[: root.num_prompt_tokens] + list(token_ids),
            num_prompt_tokens=root.num_prompt_tokens,
            arrival_time=root.arrival_time,
            priority=root.priority,
            adapter=root.adapter,
            cache_salt=root.cache_salt,
            group=root.group,
            client=root.client,
            items=root.items,
            order=(*root.order, self.num_forks),
        )


class BeamScheduler:
    def __init__(self, inner: InnerScheduler, base: SchedulerBase):
        """base: the scheduler itself, which inner is or stands around; for whoever looks at it."""
        self.inner = inner
        self.base = base
        self.limits = base.limits
        self.groups: dict[str, Group] = {}  # by the request's id
        self._group_of: dict[str, Group] = {}  # by the id of a beam

    def add(self, req: Request) -> None:
        if req.beam is None:
            return self.inner.add(req)
        width, longest = req.beam.beam_width, req.num_final_slots(self.limits.max_model_len)
        if not self.base.fit_together([longest] * width):
            raise NeverFits(
                f"{width} beams may reach {longest} tokens each, more than fit into a KV pool of "
                f"{self.base.kv.usage.size}. Lower beam_width or max_tokens, or give the pool more blocks",
                "beam_width",
            )
        search = BeamSearch(req.beam, req.params.eos_token_ids, req.params.max_tokens or self.limits.max_model_len)
        req.params = req.params.replace(eos_token_ids=(), stop_token_ids=())  # an end is a candidate like others
        self.inner.add(req)
        self.groups[req.id] = self._group_of[req.id] = Group(req, search, [req.id])

    def abort(self, req_id: str) -> None:
        group = self.groups.get(req_id)
        if group is None:
            return self.inner.abort(req_id)
        for beam_id in group.ids:
            self.inner.abort(beam_id)
        self._forget(group)

    def schedule(self, now: float) -> StepPlan:
        return self.inner.schedule(now)

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas = self.inner.update(plan, out)
        if not self.groups:
            return deltas
        for_clients, touched, errors = [], {}, {}
        for delta in deltas:
            group = self._group_of.get(delta.req_id)
            if group is None:
                for_clients.append(delta)
                continue
            group.take(delta)
            touched[group.root.id] = group
            if delta.error is not None:
                errors[group.root.id] = delta.error
        for req_id, group in touched.items():
            if req_id in errors:
                for_clients += self._fail(group, errors[req_id])
            while all(group.reports) and not group.search.done:
                for_clients += self._advance(group)
        return for_clients

    def check(self) -> None:
        self.inner.check()
        assert self._group_of.keys() == {req_id for group in self.groups.values() for req_id in group.ids}
        for group in self.groups.values():
            assert len(group.ids) == len(group.reports) == len(group.search.running) > 0

    # --- inside

    def _advance(self, group: Group) -> list[Delta]:
        """All beams have reported a position: choose who lives on."""
        heads = [reports.popleft() for reports in group.reports]
        group.search.advance(heads)
        took = [head[0][0] for head in heads]
        ids, reports, forks = [], [], []
        for beam in group.search.running:
            parent_id = group.ids[beam.parent]
            if beam.token_ids[-1] == took[beam.parent]:
                ids.append(parent_id)
                reports.append(group.reports[beam.parent])
            else:
                child = group.make_child(beam.token_ids)
                forks.append((parent_id, child))
                ids.append(child.id)
                reports.append(deque())
        ends = [req_id for req_id in group.ids if req_id not in ids]
        self.inner.fork(forks, ends)
        for req_id in ends:
            del self._group_of[req_id]
        group.ids, group.reports = ids, reports
        self._group_of.update(dict.fromkeys(ids, group))
        if not group.search.done:
            return []
        del self.groups[group.root.id]
        return [
            _delta(req_id, finished, group)
            for req_id, finished in zip(self._output_ids(group), group.search.finished, strict=True)
        ]

    def _fail(self, group: Group, error: str) -> list[Delta]:
        self.abort(group.root.id)
        group.search.running = []
        arrival_time = group.root.arrival_time
        return [
            Delta(req_id, [], finish_reason="error", error=error, arrival_time=arrival_time)
            for req_id in self._output_ids(group)
        ]

    def _output_ids(self, group: Group) -> list[str]:
        return sequence_ids(group.root.group or group.root.id, group.search.params.beam_width)

    def _forget(self, group: Group) -> None:
        del self.groups[group.root.id]
        for req_id in group.ids:
            del self._group_of[req_id]


def _delta(req_id: str, finished: FinishedBeam, group: Group) -> Delta:
    """All of a beam at once: until the end nobody knows which beams are the best."""
    beam = finished.beam
    return Delta(
        req_id,
        list(beam.token_ids),
        finished.finish_reason,
        logprobs=[
            [(token, logprob, rank)] for token, (logprob, rank) in zip(beam.token_ids, beam.logprobs, strict=True)
        ],
        num_cached_tokens=group.root.num_cached_tokens,  # of the prompt; what a fork found is output too
        arrival_time=group.root.arrival_time,
    )
