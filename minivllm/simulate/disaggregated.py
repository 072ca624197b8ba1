"""Disaggregated: a cluster in which some replicas compute prompts, and others go on from their K and V.

    arrival ---router---> prefill core: prompt, first token ---> decode core's queue --- wire ---> decode core: the rest
                                          keeps the blocks until they are sent | room for them there comes first

As DistServe has it (Zhong et al., OSDI 2024): a prompt's K and V stay where they were made until the decode replica has
room, and are then pulled, all layers at once. One transfer at a time leaves a replica, and one enters; each of its
devices sends or takes its part. Devices compute meanwhile as if nothing moved. What the first token costs a decode
replica is nothing: it was said where the prompt was computed, and comes along.

Both kinds of core are engines as any other. What differs is their KV manager (kv/handover.py).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from minivllm.errors import EngineDead
from minivllm.kv.handover import ReceivingKV, SendingKV
from minivllm.plan import Delta
from minivllm.request import EngineRequest, Request
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cluster import Cluster, Core, Replica, Router
from minivllm.simulate.events import Order
from minivllm.simulate.figures import Figures
from minivllm.simulate.prompts import Prompts, params_of
from minivllm.simulate.wire import Wire
from minivllm.simulate.workload import TraceRequest


class Sides(NamedTuple):
    """Of the two kinds of replica: prompts', then answers'."""

    prefill: Sequence[tuple[Core, VirtualClock]]
    decode: Sequence[tuple[Core, VirtualClock]]


class Hall(NamedTuple):
    """What lies between them."""

    router: Router  # among the decode replicas, once a prompt is computed
    wire: Wire
    wire_of: Sequence[int]  # of each replica, prompts' first: cores of one pipeline share theirs
    bytes_per_token: float  # of K and V, of the device that sends or takes the most
    sending: Sequence[SendingKV]  # of each prefill replica
    receiving: Sequence[ReceivingKV]  # of each decode replica
    fits: Callable[[Request], None]  # raises BadRequest for what no decode replica can ever hold
    max_model_len: int  # of those


@dataclass(slots=True, eq=False)
class Handover:
    request: EngineRequest  # with its first token
    sender: Replica
    since: float  # when that was there


class Transfers:
    """What was sent, in the order of its sending."""

    def __init__(self) -> None:
        self.waited, self.seconds, self.num_tokens = array("d"), array("d"), array("q")

    def add(self, waited: float, seconds: float, num_tokens: int) -> None:
        self.waited.append(waited)
        self.seconds.append(seconds)
        self.num_tokens.append(num_tokens)

    def summary(self, bytes_per_token: float) -> dict[str, Any]:
        found: dict[str, Any] = {"num": len(self.seconds), "bytes_a_device": sum(self.num_tokens) * bytes_per_token}
        for name in ("waited", "seconds") if self.seconds else ():
            values = np.array(getattr(self, name))
            found[name] = {"mean": float(values.mean()), "p99": float(np.percentile(values, 99))}
        return found


class Disaggregated(Cluster):
    def __init__(self, sides: Sides, router: Router, hall: Hall, prompts: Prompts, link_seconds: float = 0.0):
        super().__init__([*sides.prefill, *sides.decode], router, prompts, link_seconds)
        self._hall = hall
        self._num_prefill = len(sides.prefill)
        self._requests: dict[str, EngineRequest] = {}  # whose prompts are not computed yet
        self._queues: dict[int, deque[Handover]] = {
            replica.number: deque() for replica in self.replicas[self._num_prefill :]
        }
        self._free_at = [0.0] * (max(hall.wire_of) + 1)  # each wire
        self._transfers = Transfers()

    def run(self, requests: Iterable[TraceRequest], gives_up: bool = False) -> Figures:
        figures = super().run(requests, gives_up)
        if figures.num_live and not figures.gave_up:
            raise EngineDead(f"{figures.num_live} requests were never served: neither side has room for the other's")
        figures.also["kv_transfers"] = self._transfers.summary(self._hall.bytes_per_token) | {
            "given_up": sum(kv.num_given_up for kv in self._hall.receiving)
        }
        return figures

    @property
    def _decoding(self) -> Sequence[Replica]:
        return self.replicas[self._num_prefill :]

    def sides(self) -> dict[str, Sequence[Replica]]:
        return {"prefill": self.replicas[: self._num_prefill], "decode": self._decoding}

    def _prefix_cores(self) -> Iterable[Core]:
        """What a decode core looks up was sent there."""
        return (replica.core for replica in self.replicas[: self._num_prefill])

    # ------------------------------------------------------------------------------------------------------- prompts

    def _place(self, request: EngineRequest) -> None:
        self._requests[request.id] = request
        super()._place(replace(request, params=params_of(1)))

    def _add(self, replica: Replica, request: EngineRequest) -> None:
        if (whole := self._requests.get(request.id)) is not None:
            try:
                self._hall.fits(Request.make(whole))
                super()._add(replica, request)
            except Exception:
                del self._requests[request.id]
                raise
        else:
            super()._add(replica, request)

    def _rests(self, replica: Replica) -> bool:
        """A prefill core whose blocks all wait to be sent has nothing to do until they are."""
        if super()._rests(replica):
            return True
        plan = replica.core.plan
        stuck = replica.number < self._num_prefill and plan is not None and not plan.num_tokens
        return stuck and self._sending(replica).waits

    def _tell(self, replica: Replica, deltas: list[Delta], end: float) -> list[str]:
        if replica.number >= self._num_prefill:
            return super()._tell(replica, deltas, end)
        going = {delta.req_id: delta.token_ids[-1] for delta in deltas if self._goes_on(delta)}
        said = [replace(delta, finish_reason=None) if delta.req_id in going else delta for delta in deltas]
        for req_id in super()._tell(replica, said, end):
            del self._requests[req_id]
            self._sending(replica).sent(req_id)
        for req_id, token in going.items():
            self._events.at(end, Order.HANDOVER, self._hand_over, replica, req_id, token)
        return [delta.req_id for delta in deltas if delta.finish_reason is not None]

    def _goes_on(self, delta: Delta) -> bool:
        request = self._requests[delta.req_id]
        has_room = len(request.prompt_token_ids) + 1 < self._hall.max_model_len
        return delta.finish_reason is not None and request.params.max_tokens != 1 and has_room

    # ------------------------------------------------------------------------------------------------------ in between

    def _hand_over(self, sender: Replica, req_id: str, token: int) -> None:
        request = self._requests.pop(req_id)
        assert request.params.max_tokens is not None
        rest = params_of(request.params.max_tokens - 1)
        request = replace(request, prompt_token_ids=[*request.prompt_token_ids, token], params=rest)
        receiver = self._decoding[self._hall.router.place(request)]
        self._queues[receiver.number].append(Handover(request, sender, self._events.now))
        if not receiver.runs:  # else it looks between two steps
            self._pull(receiver)

    def _pull(self, receiver: Replica) -> None:
        """What there is room for, in the order of its coming. A block is left to each request that runs, and who was
        preempted comes first."""
        queue, kv, stats = self._queues[receiver.number], self._receiving(receiver), receiver.core.stats
        while queue and not stats.num_waiting:
            num_tokens = kv.reserve(Request.make(queue[0].request), spare=stats.num_running)
            if num_tokens is None:
                return
            self._send(queue.popleft(), receiver, num_tokens)

    def _send(self, handover: Handover, receiver: Replica, num_tokens: int) -> None:
        now, sender = self._events.now, handover.sender
        seconds = self._hall.wire.seconds(num_tokens * self._hall.bytes_per_token)
        out, into = (self._hall.wire_of[replica.number] for replica in (sender, receiver))
        begin = max(now, self._free_at[out], self._free_at[into])
        end = self._free_at[out] = self._free_at[into] = begin + seconds
        self._transfers.add(begin - handover.since, seconds, num_tokens)
        self._events.at(end, Order.DELIVERY, self._sent, handover, receiver)

    def _sent(self, handover: Handover, receiver: Replica) -> None:
        self._sending(handover.sender).sent(handover.request.id)
        self._wake(handover.sender)
        self._deliver(receiver, handover.request)

    # --------------------------------------------------------------------------------------------------------- answers

    def _go_on(self, replica: Replica) -> None:
        if replica.number >= self._num_prefill:
            self._pull(replica)
        super()._go_on(replica)

    def _report(self, replica: int, ended: list[str]) -> None:
        if replica < self._num_prefill:
            super()._report(replica, ended)
            return
        for req_id in ended:
            self._hall.router.forget(replica - self._num_prefill, req_id)

    # ----------------------------------------------------------------------------------------------------------- parts

    def _sending(self, replica: Replica) -> SendingKV:
        return self._hall.sending[replica.number]

    def _receiving(self, replica: Replica) -> ReceivingKV:
        return self._hall.receiving[replica.number - self._num_prefill]
