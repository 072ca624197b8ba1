"""The client seam: how a front end (LLM, AsyncLLM, server) reaches an engine core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minivllm.engine.core import EngineCore
from minivllm.plan import Delta
from minivllm.request import EngineRequest


class EngineClient(Protocol):
    def add(self, req: EngineRequest) -> None: ...

    def abort(self, req_ids: Sequence[str]) -> None: ...

    def poll(self, timeout: float | None) -> list[Delta]:
        """What has changed; [] if nothing did within timeout seconds (None: as long as it takes)."""
        ...


class InprocClient:
    """The core in this process and thread: polling it is what makes it step."""

    def __init__(self, core: EngineCore):
        self.core = core

    def add(self, req: EngineRequest) -> None:
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
