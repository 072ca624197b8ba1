"""The client seam: how an offline front end (LLM) drives an engine core, step by step or from afar."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from minivllm.engine.build import Engine
from minivllm.engine.core import EngineStats
from minivllm.engine.link import Link
from minivllm.engine.messages import Abort, Add, Call, Ended, Message, Refused, Report, Returned
from minivllm.engine.replica_stats import SummedStats
from minivllm.plan import Delta
from minivllm.request import EngineRequest


class EngineClient(Protocol):
    """Where a front end reaches its engine core, in this process or another."""

    stats: EngineStats  # as of the last poll

    def add(self, req: EngineRequest) -> None:
        """Raises BadRequest for what can never run, at once or at a later poll()."""
        ...

    def abort(self, req_ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are no error."""
        ...

    def poll(self, timeout: float | None) -> list[Delta]:
        """What has changed; [] if nothing did within timeout seconds (None: as long as it takes)."""
        ...

    def call(self, name: str, *args: Any) -> Any:
        """One of the engine's `calls`; its result as plain data."""
        ...

    def close(self) -> None:
        """End the engine core."""
        ...


class InprocClient:
    """The core in this process and thread: polling it is what makes it step."""

    def __init__(self, engine: Engine):
        self.core = engine.core
        self.calls = engine.calls
        self.stats = engine.core.stats
        self._grammars = engine.grammars

    def add(self, req: EngineRequest) -> None:
        """Raises BadRequest for what can never run, a grammar that cannot be compiled among it."""
        if req.params.structured is not None:
            self._grammars.compile(req.params.structured)
        self.core.add(req)

    def abort(self, req_ids: Sequence[str]) -> None:
        self.core.abort(req_ids)

    def poll(self, timeout: float | None = None) -> list[Delta]:
        while self.core.has_work:
            if deltas := self.core.step():
                return deltas
            if timeout is not None:
                break
        return []

    def call(self, name: str, *args: Any) -> Any:
        return msgspec.to_builtins(self.calls[name](*args))

    def close(self) -> None:
        self.core.shutdown()


class LinkClient:
    """The core elsewhere: it steps by itself, and polling only takes what it has sent."""

    def __init__(self, link: Link):
        self._summed = SummedStats(link.facts.config.engine.replicas)
        self.stats: EngineStats = self._summed
        self._link = link
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._num_calls = 0
        link.start(self._messages.put)

    def add(self, req: EngineRequest) -> None:
        self._link.send(Add(req))

    def abort(self, req_ids: Sequence[str]) -> None:
        self._link.send(Abort(list(req_ids)))

    def call(self, name: str, *args: Any) -> Any:
        """Only while no request runs: what else arrives meanwhile is dropped."""
        self._num_calls += 1
        self._link.send(Call(self._num_calls, name, [msgspec.to_builtins(arg) for arg in args]))
        while True:
            message = self._messages.get()
            if isinstance(message, Returned) and message.error is None:
                return message.value
            self._take(message)

    def poll(self, timeout: float | None = None) -> list[Delta]:
        """Raises what the core refused a request with, and EngineDead once it has ended."""
        while True:
            try:
                message = self._messages.get(timeout=timeout)
            except queue.Empty:
                return []
            self._take(message)
            if isinstance(message, Report) and message.deltas:
                return message.deltas

    def _take(self, message: Message) -> None:
        """What else may come: a stall, which the core has logged, and news of adapters and of a core that is back."""
        if isinstance(message, Report):
            self._summed.take_part(message.replica, message.stats)
        elif isinstance(message, Refused | Ended | Returned):
            raise message.error.exception()

    def close(self) -> None:
        self._link.close()
