"""AsyncPooler: a PoolingEngine behind a server. The counterpart of AsyncLLM, whose names it has.

    event loop                                     thread
    pool() -- PoolingRequest --> _commands ------> core.add / core.abort
           <-- Pooled ---------- _settle <-------- what a step has done

The thread takes whatever has arrived while the last step ran, so requests that come together run together. Only the
event loop touches the futures and only the thread the core, so neither needs a lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.engine.frontend import make_config
from minivllm.engine.messages import Report
from minivllm.engine.pooling import PoolingEngine
from minivllm.engine.pooling_core import Pooled, PoolingRequest
from minivllm.errors import EngineDead, MinivllmError
from minivllm.pooling.text import Text

if TYPE_CHECKING:
    import numpy as np

    from minivllm.engine.async_llm import Watcher

logger = logging.getLogger("minivllm")

Command = PoolingRequest | list[str] | None  # take it; forget these; end


class AsyncPooler:
    """Arguments: see EngineHandle. Use one event loop at a time; close with `await shutdown()`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        preset: str = "v1",
        overrides: Mapping[str, Any] | None = None,
        **vllm_names: Any,
    ):
        self.engine = engine = PoolingEngine(make_config(model, preset, overrides, vllm_names))
        self.task, self.config, self.decisions, self.info = engine.task, engine.config, engine.decisions, engine.info
        self.max_model_len, self.model_name, self.tokenizer = engine.max_model_len, engine.model_name, engine.tokenizer
        self.stats = engine.core.stats
        self.watchers: list[Watcher] = []
        self.dead_replicas: set[int] = set()  # there is one engine, and it lives or is dead
        self.stalled: str | None = None  # nothing watches: a step has a budget of tokens and no KV to wait for
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[np.ndarray]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count()
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="minivllm-pooler", daemon=True)
        self._thread.start()

    # --- the event loop's side

    async def pool(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """The vector of each. Being cancelled takes those back that still wait.

        Raises EngineDead if the engine has ended, MinivllmError if one of them failed.
        """
        self._loop = asyncio.get_running_loop()
        requests = [PoolingRequest(str(next(self._ids)), text) for text in texts]
        futures = [self._loop.create_future() for _ in requests]
        self._waiting.update((request.id, future) for request, future in zip(requests, futures, strict=True))
        try:
            if self._dead is not None:
                raise EngineDead("the engine has stopped") from self._dead
            for request in requests:
                for watcher in self.watchers:
                    watcher.on_add(request)
                self._commands.put(request)
            return await asyncio.gather(*futures)
        finally:
            self._forget([request.id for request in requests])

    def list_loras(self) -> list[Any]:
        return []

    @property
    def is_running(self) -> bool:
        return self._dead is None

    async def shutdown(self) -> None:
        """Returns once the thread has ended; calls still open raise EngineDead."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """shutdown() for callers without an event loop."""
        self._commands.put(None)
        self._thread.join()

    def _forget(self, req_ids: list[str]) -> None:
        left = [req_id for req_id in req_ids if self._waiting.pop(req_id, None) is not None]
        if left:
            self._commands.put(left)
            for watcher in self.watchers:
                watcher.on_abort(left)

    def _settle(self, done: list[Pooled]) -> None:
        for pooled in done:
            future = self._waiting.pop(pooled.id, None)
            if future is None or future.done():  # whoever asked has gone
                continue
            if pooled.vector is None:
                future.set_exception(MinivllmError(pooled.error))
            else:
                future.set_result(pooled.vector)

    def _fail_all(self, error: Exception) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    # --- the thread's side

    def _run(self) -> None:
        error: Exception = EngineDead("the engine was shut down")
        try:
            while self._obey():
                self._step()
        except Exception as failure:
            logger.exception("the step loop has died")
            error = EngineDead(f"the step loop has died: {type(failure).__name__}: {failure}")
        self._dead = error
        self._post(self._fail_all, error)

    def _obey(self) -> bool:
        """Take what has arrived, waiting if there is nothing else to do. False: end."""
        core, block = self.engine.core, not self.engine.core.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, PoolingRequest):
                core.add(command)
            else:
                core.abort(command)
            block = False

    def _step(self) -> None:
        if not self.engine.core.has_work:  # what came was taken back
            return
        step = self.engine.core.step()
        joined = [done.id for done in step.done]
        report = Report([], self.stats, joined, step.total_tokens, {"execute": step.milliseconds})
        for watcher in self.watchers:
            watcher.on_report(report)
        self._post(self._settle, step.done)

    def _post(self, function: Any, *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
