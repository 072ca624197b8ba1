"""RouterLink: several engine cores as one (data parallelism). Each has all of the model, its own KV and its own steps.

    send(Add)   -> the replica that the policy chooses (routing.py); all sequences of a prompt go to the same one
    send(Abort) -> whoever has the request            send(Call) -> one replica, or all: answered once all have
    receive     <- what each replica says, one message at a time, with its number

A replica that ends takes along the requests that it had: each is refused with ReplicaDead. The others go on; what comes
next goes to them, and to the dead one again once it is back. As LinkClient(RouterLink(...)) it is an EngineClient, and
AsyncLLM takes it for any link.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import msgspec

from minivllm.engine.link import Link, Receive
from minivllm.engine.messages import (
    Abort,
    Adapters,
    Add,
    Call,
    Command,
    Ended,
    Facts,
    Failure,
    Message,
    Refused,
    Report,
    Returned,
)
from minivllm.engine.routing import Ledger, RoutingPolicy
from minivllm.errors import EngineDead, ReplicaDead
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter
from minivllm.request import EngineRequest


@dataclass(slots=True)
class Replica:
    link: Link
    adapters: list[Adapter]
    runs: bool = True
    ledger: Ledger = field(default_factory=Ledger)  # of our sequences there
    num_others: int = 0  # sequences of other front ends there, by its last report

    @property
    def live(self) -> dict[str, int]:
        return self.ledger.live


@dataclass(slots=True)
class Question:
    """A Call that some replicas have not answered yet."""

    call: Call  # as the front end made it
    missing: set[int]
    done: list[int] = field(default_factory=list)
    value: Any = None
    error: Failure | None = None


class RouterLink:
    def __init__(self, links: Sequence[Link], policy: RoutingPolicy, facts: Facts):
        """facts: what the front end shall know of the engine as a whole."""
        self.facts = facts
        self.replicas = [Replica(link, link.facts.adapters) for link in links]
        self._policy = policy
        self._lock = threading.Lock()  # of all below, and of `receive`: who counts there need not lock
        self._receive: Receive | None = None
        self._questions: dict[int, Question] = {}  # by the id of the calls that the replicas got
        self._call_ids = count(1)
        self._group: tuple[str, int] = ("", 0)  # the newest one, and its replica

    def start(self, receive: Receive) -> None:
        self._receive = receive
        for number, replica in enumerate(self.replicas):
            replica.link.start(partial(self._take, number))

    def send(self, command: Command) -> None:
        with self._lock:
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                self._abort(command.req_ids)
            elif isinstance(command, Call):
                self._ask(command)
            else:
                raise TypeError(f"a router does not take {type(command).__name__}")

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(lambda replica: replica.link.close(), self.replicas))

    @property
    def is_running(self) -> bool:
        return any(replica.link.is_running for replica in self.replicas)

    # --- commands

    def _add(self, command: Add) -> None:
        request = command.request
        number = self._place(request)
        if number is None:
            error = EngineDead("no replica of the engine runs")
            self._receive(Refused(request.id, Failure.of(error)))
            return
        replica = self.replicas[number]
        replica.ledger.add(command.sequence_ids, len(request.prompt_token_ids))  # more or less, of `others`
        replica.link.send(command)

    def _place(self, request: EngineRequest) -> int | None:
        if request.group and request.group == self._group[0] and self.replicas[self._group[1]].runs:
            return self._group[1]
        loads = [
            replica.ledger.load(number, replica.num_others)
            for number, replica in enumerate(self.replicas)
            if replica.runs
        ]
        if not loads:
            return None
        number = self._policy.choose(request, loads)
        self._group = (request.group, number)
        return number

    def _abort(self, req_ids: Sequence[str]) -> None:
        for replica in self.replicas:
            if theirs := [req_id for req_id in req_ids if replica.ledger.remove(req_id)]:
                replica.link.send(Abort(theirs))

    def _ask(self, call: Call) -> None:
        asked = [call.replica] if call.replica is not None else range(len(self.replicas))
        running = {number for number in asked if self.replicas[number].runs}
        if not running:
            error = Failure.of(ReplicaDead(f"replica {call.replica} of the engine does not run"))
            self._receive(Returned(call.id, None, error))
            return
        call_id = next(self._call_ids)
        self._questions[call_id] = Question(call, set(running))
        for number in sorted(running):
            self.replicas[number].link.send(Call(call_id, call.name, call.args))

    # --- messages, in the threads of the links

    def _take(self, number: int, message: Message) -> None:
        with self._lock:
            replica = self.replicas[number]
            if isinstance(message, Report):
                self._count(replica, message)
            elif isinstance(message, Refused):
                replica.ledger.remove(message.req_id)
            elif isinstance(message, Returned):
                self._answer(number, message)
                return
            elif isinstance(message, Adapters):
                replica.adapters = message.loaded
                self._receive(Adapters(self._common_adapters()))
                return
            elif isinstance(message, Facts):
                message = self._back(replica, message)
            elif isinstance(message, Ended):
                self._lose(number, message)
            if not isinstance(message, Refused):
                message.replica = number
            self._receive(message)

    def _count(self, replica: Replica, report: Report) -> None:
        for delta in report.deltas:
            if delta.finish_reason is not None:
                replica.ledger.remove(delta.req_id)
        replica.num_others = max(0, report.stats.num_running + report.stats.num_waiting - len(replica.live))

    def _answer(self, number: int, message: Returned) -> None:
        """To the front end, once all have answered: what one of them gave, or the first failure."""
        question = self._questions.get(message.id)
        if question is None:  # of _tell, whose answers nobody waits for
            return
        question.missing.discard(number)
        if message.error is None:
            question.value = message.value
            question.done.append(number)
        question.error = question.error or message.error
        if not question.missing:
            del self._questions[message.id]
            self._settle(question)

    def _settle(self, question: Question) -> None:
        call = question.call
        if question.error is not None and call.name == "load_lora":  # all or none
            for number in question.done:
                self._tell(self.replicas[number], "unload_lora", call.args[0])
        self._receive(Returned(call.id, question.value, question.error))

    def _tell(self, replica: Replica, name: str, *args: Any) -> None:
        replica.link.send(Call(next(self._call_ids), name, list(args)))

    def _lose(self, number: int, message: Ended) -> None:
        replica = self.replicas[number]
        lost = replica.ledger.clear()
        replica.runs, replica.num_others = False, 0
        self._policy.forget(number)
        error = Failure.of(ReplicaDead(f"replica {number} of the engine, which had this request: {message.error.text}"))
        for req_id in lost:
            self._receive(Refused(req_id, error))
        for call_id, question in list(self._questions.items()):
            if number in question.missing:
                question.missing.discard(number)  # what it has missed it catches up with when it is back
                if not question.missing:
                    del self._questions[call_id]
                    question.error = question.error or (None if question.done else error)
                    self._settle(question)

    def _back(self, replica: Replica, facts: Facts) -> Facts:
        """A replica runs again. It may have missed adapters that came and went meanwhile."""
        others = [other.adapters for other in self.replicas if other.runs]
        replica.runs, replica.adapters = True, facts.adapters
        if others:
            self._catch_up(replica, others[0])
        return msgspec.structs.replace(self.facts, adapters=self._common_adapters())

    def _catch_up(self, replica: Replica, wanted: Sequence[Adapter]) -> None:
        """Nobody waits for the answers: an adapter is common once all replicas say that they have it."""
        have, want = {a.name: a for a in replica.adapters}, {a.name: a for a in wanted}
        for name in have.keys() - want.keys():
            self._tell(replica, "unload_lora", name)
        for name in want.keys() - have.keys():
            asked = LoRARequest(name, want[name].int_id or 1, want[name].path)
            self._tell(replica, "ensure_lora", msgspec.to_builtins(asked))

    def _common_adapters(self) -> list[Adapter]:
        """Those that any replica that runs could serve."""
        first, *others = [replica.adapters for replica in self.replicas if replica.runs] or [[]]
        names = [{adapter.name for adapter in adapters} for adapters in others]
        return [adapter for adapter in first if all(adapter.name in known for known in names)]
