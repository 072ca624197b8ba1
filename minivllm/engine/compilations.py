"""Compilations: the grammars of requests that have just arrived, made in threads beside the step loop.

A grammar takes milliseconds to seconds. It is compiled where the worker will look for it, once, whoever the front ends
are; meanwhile the request waits outside of the scheduler and everybody else's tokens go on. Clients take turns
(turns.py), and none has all threads, so that one's many schemas hold up no other's. Each thread has a child in which a
grammar must pass first (grammar_trials.py), and takes the next one when that child is ready. A grammar whose requests
have all been aborted is given up, also while it is being compiled.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minivllm.engine.grammar_trials import GrammarTrials
from minivllm.engine.turns import Turns
from minivllm.errors import BadRequest, MinivllmError
from minivllm.request import EngineRequest
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.params import StructuredParams
from minivllm.wanted import Unwanted

logger = logging.getLogger("minivllm")

NUM_THREADS = 3  # so that one grammar that takes long holds up no other of its client, and two no other client's


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar and those that wait for it. `failure`: why it cannot be."""

    params: StructuredParams
    waiting: list[EngineRequest] = field(default_factory=list)
    failure: Exception | None = None
    is_given_up: bool = False

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting)


class Compilations:
    """All calls are the step loop's."""

    def __init__(self, compiler: GrammarCompiler, make_trials: Callable[[], GrammarTrials]):
        self._compiler = compiler
        self._make_trials = make_trials
        self._under_way: dict[object, Compilation] = {}
        self._todo: Turns[Compilation | None] = Turns(NUM_THREADS)  # None: a thread ends
        self._done: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._trials: list[GrammarTrials] = []  # of each thread

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
        if key in self._under_way:  # others wait for it, even if it is compiled by now: nobody overtakes them
            self._under_way[key].waiting.append(request)
            return True
        if self._compiler.has(params):
            return False
        self._under_way[key] = Compilation(params, [request])
        self._todo.put(self._under_way[key], request.client)
        if len(self._trials) < min(NUM_THREADS, len(self._under_way)):
            self._trials.append(self._make_trials())
            threading.Thread(target=self._work, args=self._trials[-1:], name="minivllm-grammar", daemon=True).start()
        return True

    def forget(self, req_ids: Iterable[str]) -> None:
        gone = set(req_ids)
        for compilation in self._under_way.values():
            compilation.waiting = [request for request in compilation.waiting if request.id not in gone]

    def ready(self) -> list[Compilation]:
        """Those that have ended since the last call."""
        ended = []
        while not self._done.empty():
            compilation = self._done.get()
            if compilation.is_given_up and compilation.waiting:  # somebody came just then
                compilation.is_given_up = False
                self._todo.put(compilation, compilation.waiting[0].client)
            else:
                ended.append(compilation)
                del self._under_way[_key(compilation.params)]
        for compilation in ended:
            for request in compilation.waiting:
                self._compiler.has(request.params.structured)  # it is kept as long as each of them lives
        return ended

    def close(self) -> None:
        """Nothing is compiled any more."""
        for trials in self._trials:
            self._todo.put(None)
            trials.close()

    def _work(self, trials: GrammarTrials) -> None:
        while True:
            with contextlib.suppress(Exception):  # its compilation will say so
                trials.get_ready()
            compilation, client = self._todo.get()
            if compilation is not None:
                self._compile(compilation, trials)
                self._done.put(compilation)
            self._todo.done(client)
            if compilation is None:
                return

    def _compile(self, compilation: Compilation, trials: GrammarTrials) -> None:
        try:
            trials.compile(compilation.params, lambda: compilation.is_wanted)
        except Unwanted:
            compilation.is_given_up = True
        except BadRequest as error:
            compilation.failure = error
        except Exception as error:  # a defect that this grammar has found: the others go on
            logger.exception("a grammar cannot be compiled")
            compilation.failure = MinivllmError(f"{type(error).__name__}: {error}")


def _key(params: StructuredParams) -> object:
    """A failure names the request's field, which is no part of the grammar's own key."""
    return params.key, params.field
