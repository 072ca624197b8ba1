"""StepLoop: what an engine core does all day, in whichever thread or process it lives. Commands in, messages out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from minivllm.engine.compilations import Compilations
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
    Resumed,
    Returned,
    Stalled,
)
from minivllm.engine.watchdog import Body, Watchdog
from minivllm.errors import BadRequest, EngineDead
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest

COMPILING_SECONDS = 0.002  # how long an idle loop waits for a command while a grammar is being compiled

logger = logging.getLogger("minivllm")


class Reporter:
    """An Observer that writes down each step."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._reports: list[Report] = []

    def take(self) -> list[Report]:
        """Those since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_add(self, req: EngineRequest, step: int) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def close(self) -> None: ...

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: dict[str, float]) -> None:
        joined = [join.req_id for join in plan.joins]
        self._reports.append(Report(deltas, self._core.stats, joined, plan.total_tokens, times))


class StepLoop:
    def __init__(
        self,
        core: EngineCore,
        calls: Mapping[str, Callable[..., Any]],
        take: Callable[[float | None], Command | None],
        post: Callable[[Message], None],
        step_timeout: float = 0.0,
        compilations: Compilations | None = None,
        body: Body | None = None,
    ) -> None:
        """calls: what a front end may ask for by name. take(patience): the next command; None if none comes within so
        many seconds (None: as long as it takes). post: to the front end; from the loop's thread and, if a step or a
        command outlasts step_timeout (seconds; 0: no limit), from another one. compilations: None if no request has a
        grammar. body: the core's process, if it has one of its own."""
        self._core = core
        self._calls = calls
        self._take = take
        self._post = post
        self._compilations = compilations
        self._reporter = Reporter(core)
        core.observers.append(self._reporter)
        self._watchdog = Watchdog(step_timeout, lambda: core.plan, self._stalled, body)

    def run(self) -> None:
        """Until Close, or until a step raises what no step can survive. The last message is Ended."""
        error: Exception = EngineDead("the engine was shut down")
        try:
            while self._obey():
                if not self._core.is_settled:
                    self._watchdog.begin()
                    self._core.step()
                    self._end()
                    for report in self._reporter.take():
                        self._post(report)
        except Exception as failure:
            logger.exception("the step loop has died")
            error = EngineDead(f"the step loop has died: {type(failure).__name__}: {failure}")
        self._watchdog.close()
        self._post(Ended(Failure.of(error)))
        self._core.shutdown()

    @contextmanager
    def _watched(self, call: str) -> Iterator[None]:
        """What is done for a command, and posts nothing meanwhile."""
        self._watchdog.begin(call)
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        if self._watchdog.end():
            self._post(Resumed())

    def close(self) -> None:
        """Once `run` has returned: end the children that it has started. They end with this process anyway."""
        if self._compilations is not None:
            self._compilations.close()

    def _stalled(self, seconds: float, what: str) -> None:
        self._core.stats.num_stalled += 1
        self._post(Stalled(seconds, what))

    def _obey(self) -> bool:
        """Carry out what has arrived, waiting if there is nothing else to do. False: close."""
        self._add_compiled()
        while (command := self._take(self._patience())) is not None:
            if isinstance(command, Add):
                for request in command.requests:
                    if self._compilations is None or not self._compilations.hold(request):
                        self._add(request)
            elif isinstance(command, Abort):
                self._abort(command.req_ids)
            elif isinstance(command, Call):
                self._post(self._answer(command))
            else:
                return False
        return True

    def _patience(self) -> float | None:
        if not self._core.is_settled:
            return 0
        return COMPILING_SECONDS if self._compilations is not None and self._compilations.is_busy else None

    def _abort(self, req_ids: list[str]) -> None:
        with self._watched("abort"):
            self._core.abort(req_ids)
        if self._compilations is not None:
            self._compilations.forget(req_ids)

    def _add_compiled(self) -> None:
        for compilation in self._compilations.ready() if self._compilations is not None else ():
            for request in compilation.waiting:
                if compilation.failure is None:
                    self._add(request)
                else:
                    self._post(Refused(request.id, Failure.of(compilation.failure)))

    def _answer(self, call: Call) -> Returned:
        try:
            with self._watched(call.name):
                return Returned(call.id, msgspec.to_builtins(self._calls[call.name](*call.args)))
        except Exception as error:
            return Returned(call.id, None, Failure.of(error))

    def _add(self, request: EngineRequest) -> None:
        try:
            with self._watched("add"):
                self._core.add(request)
        except BadRequest as error:  # the front end checks the same bounds; this is for what it cannot know
            self._post(Refused(request.id, Failure.of(error)))
