"""StepLoop: what an engine core does all day, in whichever thread or process it lives. Commands in, messages out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from minivllm.engine.core import EngineCore
from minivllm.engine.messages import (
    Abort,
    Add,
    Call,
    Command,
    Ended,
    Failure,
    Message,
    Refused,
    Report,
    Returned,
    Stalled,
)
from minivllm.engine.watchdog import Watchdog
from minivllm.errors import BadRequest, EngineDead
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest

logger = logging.getLogger("minivllm")


class Reporter:
    """An Observer that remembers the last step."""

    def __init__(self, core: EngineCore):
        self._core = core
        self.report: Report | None = None

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_add(self, req: EngineRequest, step: int) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def close(self) -> None: ...

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: dict[str, float]) -> None:
        joined = [join.req_id for join in plan.joins]
        self.report = Report(deltas, self._core.stats, joined, plan.total_tokens, times)


class StepLoop:
    def __init__(
        self,
        core: EngineCore,
        calls: Mapping[str, Callable[..., Any]],
        take: Callable[[bool], Command | None],
        post: Callable[[Message], None],
        step_timeout: float = 0.0,
    ) -> None:
        """calls: what a front end may ask for by name. take(block): the next command; None if there is none and block
        is False. post: to the front end; from the loop's thread and, if a step outlasts step_timeout (seconds; 0: no
        limit), from another one."""
        self._core = core
        self._calls = calls
        self._take = take
        self._post = post
        self._reporter = Reporter(core)
        core.observers.append(self._reporter)
        self._watchdog = Watchdog(step_timeout, lambda: core.plan, self._stalled)

    def run(self) -> None:
        """Until Close, or until a step raises what no step can survive. The last message is Ended."""
        error: Exception = EngineDead("the engine was shut down")
        try:
            while self._obey():
                if not self._core.is_settled:
                    self._watchdog.begin()
                    self._core.step()
                    self._watchdog.end()
                    if self._reporter.report is not None:
                        self._post(self._reporter.report)
        except Exception as failure:
            logger.exception("the step loop has died")
            error = EngineDead(f"the step loop has died: {type(failure).__name__}: {failure}")
        self._watchdog.close()
        self._post(Ended(Failure.of(error)))
        self._core.shutdown()

    def _stalled(self, seconds: float, what: str) -> None:
        self._core.stats.num_stalled += 1
        self._post(Stalled(seconds, what))

    def _obey(self) -> bool:
        """Carry out what has arrived, waiting if there is nothing else to do. False: close."""
        while (command := self._take(self._core.is_settled)) is not None:
            if isinstance(command, Add):
                self._add(command.request)
            elif isinstance(command, Abort):
                self._core.abort(command.req_ids)
            elif isinstance(command, Call):
                self._post(self._answer(command))
            else:
                return False
        return True

    def _answer(self, call: Call) -> Returned:
        try:
            return Returned(call.id, msgspec.to_builtins(self._calls[call.name](*call.args)))
        except Exception as error:
            return Returned(call.id, None, Failure.of(error))

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except BadRequest as error:  # the front end checks the same bounds; this is for what it cannot know
            self._post(Refused(request.id, Failure.of(error)))
