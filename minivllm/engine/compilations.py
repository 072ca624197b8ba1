"""Compilations: the grammars of requests that have just arrived, made in threads beside the step loop.

A grammar takes milliseconds to seconds. It is compiled where the worker will look for it, once, whoever the front ends
are; meanwhile the request waits outside of the scheduler and everybody else's tokens go on. XGrammar gives the
interpreter's lock back while it compiles; the in-house automaton is Python, which takes turns with the steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.errors import BadRequest, MinivllmError
from minivllm.request import EngineRequest
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.params import StructuredParams

logger = logging.getLogger("minivllm")

NUM_THREADS = 2  # so that one grammar that takes long holds up no other


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar and those that wait for it. `failure`: why it cannot be."""

    params: StructuredParams
    waiting: list[EngineRequest] = field(default_factory=list)
    failure: Exception | None = None


class Compilations:
    """All calls are the step loop's."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._under_way: dict[object, Compilation] = {}
        self._todo: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def hold(self, request: EngineRequest) -> bool:
        """Whether the request has to wait; `ready` gives it back then. Those that wait for one grammar come together
        and in their order, so that the sequences of a prompt do."""
        params = request.params.structured
        if params is None:
            return False
        key = _key(params)
        if key not in self._under_way:  # else others wait for it, even if it is compiled by now: nobody overtakes them
            if self._compiler.has(params):
                return False
            self._under_way[key] = Compilation(params)
            self._todo.put(self._under_way[key])
            if len(self._threads) < NUM_THREADS:
                self._threads.append(threading.Thread(target=self._work, name="minivllm-grammar", daemon=True))
                self._threads[-1].start()
        self._under_way[key].waiting.append(request)
        return True

    def forget(self, req_ids: Iterable[str]) -> None:
        gone = set(req_ids)
        for compilation in self._under_way.values():
            compilation.waiting = [request for request in compilation.waiting if request.id not in gone]

    def ready(self) -> list[Compilation]:
        """Those that have ended since the last call."""
        ended = []
        while not self._done.empty():
            ended.append(self._done.get())
            del self._under_way[_key(ended[-1].params)]
        return ended

    def _work(self) -> None:
        while True:
            compilation = self._todo.get()
            try:
                self._compiler.compile(compilation.params)
            except BadRequest as error:
                compilation.failure = error
            except Exception as error:  # a defect that this grammar has found: the others go on
                logger.exception("a grammar cannot be compiled")
                compilation.failure = MinivllmError(f"{type(error).__name__}: {error}")
            self._done.put(compilation)


def _key(params: StructuredParams) -> object:
    """A failure names the request's field, which is no part of the grammar's own key."""
    return params.key, params.field
