"""GrammarTrials: what a client wants its output to look like, compiled in a child first (structured/trial.py).

A schema, an expression or a grammar is a program that strangers write for compilers that others wrote. The child has
limits of time and memory; one that goes over them is killed and replaced, and its request is a 400 that names the
limit. What nobody waits for any more is killed as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from minivllm.sandbox import Limits, Sandbox, TooMuch
from minivllm.structured import trial
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.ordinary import is_ordinary
from minivllm.structured.params import StructuredParams
from minivllm.wanted import Unwanted

# Time: ordinary schemas take milliseconds, large ones with a large vocabulary seconds. Memory: what XGrammar keeps of a
# large schema is megabytes.
LIMITS = Limits(seconds=10.0, megabytes=1024)


class GrammarTrials:
    """One child and what it does, for one thread. The first specification that needs it starts it (ordinary.py)."""

    def __init__(self, compiler: GrammarCompiler, limits: Limits = LIMITS):
        self._compiler, self._limits = compiler, limits
        self._sandbox: Sandbox | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of the sandbox's making and its end

    @property
    def pid(self) -> int | None:
        """Of the child, if there is one."""
        return None if self._sandbox is None else self._sandbox.pid

    def get_ready(self) -> None:
        """For one that was killed, have another child ready."""
        if self._sandbox is not None:
            self._sandbox.start()

    def compile(self, params: StructuredParams, is_wanted: Callable[[], bool]) -> None:
        """Into the compiler, for all who ask it then. Raises BadRequest; Unwanted if is_wanted says so meanwhile."""

        def choose(bare: StructuredParams) -> tuple[str, bytes]:
            known = self._compiler.translate_by_library(bare) if is_ordinary(bare) else None
            return known or self._choose(bare, is_wanted)

        self._compiler.compile(params, choose)

    def _choose(self, params: StructuredParams, is_wanted: Callable[[], bool]) -> tuple[str, bytes]:
        sandbox = self._made_sandbox()
        try:
            return trial.answer_of(sandbox.run(msgspec.msgpack.encode(params), is_wanted))
        except TooMuch as error:
            raise params.error(f"{params.kind}: compiling it {error}") from None
        except UnicodeEncodeError:
            raise params.no_text() from None

    def _made_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            setup = trial.setup_of(self._compiler)
            with self._lock:
                if self._is_closed:
                    raise Unwanted("the engine ends")
                self._sandbox = Sandbox("minivllm.structured.trial", setup, self._limits)
            # What will build here loads its libraries while the child does.
            threading.Thread(target=self._compiler.load, name="minivllm-grammar-load", daemon=True).start()
        return self._sandbox

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        if self._sandbox is not None:
            self._sandbox.close()
