"""AsyncLLM: the engine behind a server. The core steps in a thread or a process of its own (engine/link.py); the event
loop tokenises and detokenises.

    event loop                                        core
    generate() -- EngineRequest --> link.send  -----> core.add / core.abort
               <-- RequestOutput -- _deliver <------- deltas of each step

Only the event loop touches the front end and only the core's thread the core, so neither needs a lock. Grammars of
structured output are compiled in threads of their own: their compiler has its locks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from minivllm.engine.core import EngineStats
from minivllm.engine.frontend import Asked, EngineHandle, OutputKind, Prompt
from minivllm.engine.link import ProcessLink
from minivllm.engine.live import Look
from minivllm.engine.messages import Abort, Add, Call, Message, Refused, Report, Returned, Stalled
from minivllm.engine.output import RequestOutput
from minivllm.errors import BadRequest, EngineDead
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter
from minivllm.plan import Delta
from minivllm.request import BeamSearchParams, EngineRequest, SamplingParams

logger = logging.getLogger("minivllm")

RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)  # before each attempt to start a dead core's process again


class Watcher(Protocol):
    """Sees what goes in and what each step did: metrics, the live page."""

    def on_add(self, req: EngineRequest) -> None:
        """In the event loop."""

    def on_abort(self, req_ids: list[str]) -> None:
        """In the event loop. They may have ended already."""

    def on_report(self, report: Report) -> None:
        """In the thread that brings the core's messages."""


class AsyncLLM(EngineHandle):
    """Streams. Arguments: see EngineHandle. Use one event loop at a time; close with `await shutdown()`."""

    def _start(self) -> None:
        self.stats = EngineStats()
        self.stalled: str | None = None  # what a step does that runs longer than engine.step_timeout
        self.watchers: list[Watcher] = []
        self._calls: dict[int, asyncio.Future] = {}
        self._num_calls = 0
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: Exception | None = None
        self._closing = threading.Event()
        self._linking = threading.Lock()
        self._link.start(self._receive)

    # --- the event loop's side

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_kind: OutputKind = "cumulative",
        lora_request: Asked = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; the last one has finished=True. Leaving the iterator early aborts the request.

        output_kind: each output holds all text so far, only what is new, or ("final") there is only the last one; beams
        come all at once, at the end.
        Raises BadRequest before the first item, EngineDead if the step loop has ended.
        """
        if isinstance(params, SamplingParams) and params.structured is not None:
            await asyncio.to_thread(self._front.compile, params)
        if request_id in self._streams:
            raise BadRequest(f'request id "{request_id}" is in use', "request_id")
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        adapter = await self._adapter(lora_request)
        requests = self._front.requests(prompt, params, request_id, output_kind, priority, cache_salt, adapter)
        stream = self._streams[request_id] = asyncio.Queue()
        finished = False
        try:
            for request in requests:
                for watcher in self.watchers:
                    watcher.on_add(request)
                self._link.send(Add(request))
            while not finished:
                output = await stream.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            if not finished:
                self._abort(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request from outside its iterator, which then gets a last output with finish_reason "abort"."""
        stream = self._streams.get(request_id)
        if stream is not None:
            output = self._front.processor.aborted(request_id)
            self._abort(request_id)
            if output is not None:
                stream.put_nowait(output)

    async def load_lora(self, name: str, path: str) -> Adapter:
        """Load an adapter (PEFT's folder) between two steps, to be named by requests. Raises AdapterError."""
        self._know_loras(await self._call("load_lora", name, path))
        return self._loras[name]

    async def unload_lora(self, name: str) -> None:
        """New requests cannot name it from now on; those that live keep it. Raises UnknownAdapter."""
        self._know_loras(await self._call("unload_lora", name))

    async def recent_steps(self, num_steps: int) -> dict[str, Any]:
        """What the engine core did last (trace_recent.py: snapshot); nothing unless debug.recent_steps is set."""
        return await self._call("recent_steps", num_steps)

    async def look(self, after: int) -> Look:
        """How the engine core runs now, with the steps from number `after` on."""
        return msgspec.convert(await self._call("look", after), Look)

    @property
    def num_requests(self) -> int:
        """Those whose outputs are expected."""
        return len(self._front.processor)

    @property
    def is_running(self) -> bool:
        return self._dead is None and self._link.is_running

    async def shutdown(self) -> None:
        """End the engine core; streams still open raise EngineDead. Returns once it has ended."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """shutdown() for callers without an event loop."""
        self._closing.set()
        with self._linking:  # a restart may be on its way
            self._link.close()

    async def _adapter(self, asked: Asked) -> str:
        """The name of a request's adapter, "" for none; a LoRARequest's is loaded if it is not."""
        if not isinstance(asked, LoRARequest):
            return self._loaded(asked)
        self._know_loras(await self._call("ensure_lora", asked))
        return asked.lora_name

    async def _call(self, name: str, *args: Any) -> Any:
        """One of the engine's `calls`, made between two steps; its result as plain data."""
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        self._num_calls += 1
        answer = self._calls[self._num_calls] = self._loop.create_future()
        self._link.send(Call(self._num_calls, name, [msgspec.to_builtins(arg) for arg in args]))
        return await answer

    def _check_alive(self) -> None:
        if not self.is_running:
            raise EngineDead("the engine has stopped") from self._dead

    def _abort(self, request_id: str) -> None:
        self._abort_in_core(self._front.processor.abort(request_id))

    def _abort_in_core(self, req_ids: list[str]) -> None:
        self._link.send(Abort(req_ids))
        for watcher in self.watchers:
            watcher.on_abort(req_ids)

    def _deliver(self, deltas: list[Delta]) -> None:
        outputs, aborts = self._front.process(deltas)
        if aborts:
            self._abort_in_core(aborts)
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)

    def _refuse(self, req_id: str, error: Exception) -> None:
        request_id = self._front.processor.parent_of(req_id)
        if request_id is not None and (stream := self._streams.get(request_id)) is not None:
            stream.put_nowait(error)

    def _fail_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
        for call_id in list(self._calls):
            self._settle(call_id, None, error)

    def _settle(self, call_id: int, value: Any, error: Exception | None) -> None:
        answer = self._calls.pop(call_id)
        if answer.done():  # whoever asked has gone
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    # --- the link's side

    def _receive(self, message: Message) -> None:
        if isinstance(message, Report):
            self.stats.take(message.stats)
            self.stalled = None
            for watcher in self.watchers:
                watcher.on_report(message)
            if message.deltas:
                self._post(self._deliver, message.deltas)
        elif isinstance(message, Stalled):
            self.stalled = message.plan
            self.stats.num_stalled += 1  # as the core has: the next report brings its count
        elif isinstance(message, Refused):
            self._post(self._refuse, message.req_id, message.error.exception())
        elif isinstance(message, Returned):
            error = None if message.error is None else message.error.exception()
            self._post(self._settle, message.id, message.value, error)
        else:
            self._dead = message.error.exception()
            self.stats.on_end()  # else whoever admits requests by these would wait for a report that never comes
            self._post(self._fail_all, self._dead)
            if isinstance(self._link, ProcessLink) and self.config.engine.restart and not self._closing.is_set():
                threading.Thread(target=self._restart, name="minivllm-restart", daemon=True).start()

    def _restart(self) -> None:
        """Build the engine again in a new process, with the adapters that it had; tried until it works."""
        logger.error("%s: starting it again", self._dead)
        loras = {adapter.name: adapter.path for adapter in self._loras.values()}
        config = self.config.override({"lora.adapters": loras})
        for delay in itertools.chain(RESTART_SECONDS, itertools.repeat(RESTART_SECONDS[-1])):
            if self._closing.wait(delay):
                return
            try:
                link = ProcessLink(config)
            except Exception as error:
                logger.error("the engine does not start: %s", error)
                continue
            with self._linking:
                self._link.close()
                self._link, self._dead, self.stalled = link, None, None
                link.start(self._receive)
                if self._closing.is_set():
                    link.close()
            logger.info("the engine is ready again")
            return

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
