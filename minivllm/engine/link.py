"""Links: how a front end reaches its engine core, in a thread of this process or in a process of its own.

    front end (event loop)                          core
    send(Add | Abort | Close)  ---- commands ---->  StepLoop
    receive(message)           <---- messages ----  Report a step, Refused, Ended

In one process nothing is copied, but the step loop and the front end (tokenising, detokenising, HTTP) share Python's
lock: ThreadLink. In a process of its own (vLLM V1's design) the core never waits for them, and its death is something
that the front end can outlive: SocketLink (socket_link.py), ProcessLink where that front end is also its parent
(process_link.py), and RouterLink over several of them (router.py).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from minivllm.engine.build import Engine
from minivllm.engine.compilations import Compilations
from minivllm.engine.grammar_trials import GrammarTrials
from minivllm.engine.messages import Close, Command, Facts, Message
from minivllm.engine.step_loop import StepLoop
from minivllm.engine.watchdog import Body

Receive = Callable[[Message], None]


class Link(Protocol):
    facts: Facts

    def start(self, receive: Receive) -> None:
        """From now on receive(message) is called for each message, in threads of the link's own."""
        ...

    def send(self, command: Command) -> None: ...

    def close(self) -> None:
        """End the core; returns once it has ended. A core that has ended already is no error."""
        ...

    @property
    def is_running(self) -> bool: ...


def facts_of(engine: Engine) -> Facts:
    return Facts(
        engine.config,
        list(engine.decisions),
        engine.max_model_len,
        engine.model_name,
        str(engine.tokenizer_dir),
        engine.info,
        list(engine.adapters.loaded.values()),
    )


def step_loop(
    engine: Engine,
    take: Callable[[float | None], Command | None],
    post: Callable[[Message], None],
    body: Body | None = None,
) -> StepLoop:
    timeout = engine.config.engine.step_timeout
    compilations = Compilations(engine.grammars, partial(GrammarTrials, engine.grammars))
    return StepLoop(engine.core, engine.calls, take, post, timeout, compilations, body)


class ThreadLink:
    """The core in a thread. Commands are objects in a queue."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.core = engine.core
        self.facts = facts_of(engine)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: StepLoop | None = None

    def start(self, receive: Receive) -> None:
        self._loop = step_loop(self.engine, self._take, receive)
        self._thread = threading.Thread(target=self._loop.run, name="minivllm-step", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def close(self) -> None:
        if self._thread is None:
            self.core.shutdown()
            return
        if self._thread.is_alive():
            self._inbox.put(Close())
            self._thread.join()
        self._loop.close()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _take(self, patience: float | None) -> Command | None:
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(patience != 0, patience)
        return None
