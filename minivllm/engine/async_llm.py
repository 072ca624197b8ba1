"""AsyncLLM: the engine behind a server. One thread steps the core; the event loop tokenises and detokenises.

    event loop                                     step thread
    generate() -- EngineRequest --> inbox  ------> core.add / core.abort
               <-- RequestOutput -- _deliver <---- deltas of each step

Only the step thread touches the core and only the event loop touches the front end, so neither needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from minivllm.engine.frontend import Asked, EngineHandle, OutputKind, Prompt
from minivllm.engine.output import RequestOutput
from minivllm.errors import BadRequest, EngineDead
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter
from minivllm.plan import Delta
from minivllm.request import EngineRequest, SamplingParams

logger = logging.getLogger("minivllm")

T = TypeVar("T")


class AsyncLLM(EngineHandle):
    """Streams. Arguments: see EngineHandle. Use one event loop at a time; close with `await shutdown()`."""

    def _start(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._asked: set[asyncio.Future] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="minivllm-step", daemon=True)
        self._thread.start()

    # --- the event loop's side

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_kind: OutputKind = "cumulative",
        lora_request: Asked = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; the last one has finished=True. Leaving the iterator early aborts the request.

        output_kind: each output holds all text so far, only what is new, or ("final") there is only the last one.
        Raises BadRequest before the first item, EngineDead if the step loop has ended.
        """
        if request_id in self._streams:
            raise BadRequest(f'request id "{request_id}" is in use', "request_id")
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        is_new = isinstance(lora_request, LoRARequest)  # a name needs no step thread: it is looked up on arrival
        adapter = await self._ask(self._name_of, lora_request) if is_new else self._name_of(lora_request)
        requests = self._front.requests(prompt, params, request_id, output_kind, priority, cache_salt, adapter)
        stream = self._streams[request_id] = asyncio.Queue()
        finished = False
        try:
            for request in requests:
                self._inbox.put(lambda request=request: self._add(request, request_id))
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
        return await self._ask(self._adapters.load, name, path)

    async def unload_lora(self, name: str) -> None:
        """New requests cannot name it from now on; those that live keep it. Raises UnknownAdapter."""
        await self._ask(self._adapters.unload, name)

    @property
    def is_running(self) -> bool:
        return self._dead is None and self._thread.is_alive()

    async def shutdown(self) -> None:
        """End the step thread; streams still open raise EngineDead. Returns once the thread has ended."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """shutdown() for callers without an event loop."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    async def _ask(self, function: Callable[..., T], *args: Any) -> T:
        """function(*args), run by the step thread between two steps."""
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        answer = self._loop.create_future()
        self._asked.add(answer)
        self._inbox.put(lambda: self._answer(answer, function, *args))
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    def _check_alive(self) -> None:
        if not self.is_running:
            raise EngineDead("the engine has stopped") from self._dead

    def _abort(self, request_id: str) -> None:
        children = self._front.processor.abort(request_id)
        self._inbox.put(lambda: self._core.abort(children))

    def _deliver(self, deltas: list[Delta]) -> None:
        outputs, aborts = self._front.process(deltas)
        if aborts:
            self._inbox.put(lambda: self._core.abort(aborts))
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.put_nowait(error)

    def _fail_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
        for answer in self._asked:
            _settle(answer, None, error)

    # --- the step thread's side

    def _run(self) -> None:
        try:
            while self._take_commands():
                if not self._core.is_settled and (deltas := self._core.step()):
                    self._post(self._deliver, deltas)
            error: Exception = EngineDead("the engine was shut down")
        except Exception as failure:
            logger.exception("the step loop has died")
            error = EngineDead(f"the step loop has died: {type(failure).__name__}: {failure}")
        self._dead = error
        self._post(self._fail_all, error)
        self._core.shutdown()

    def _take_commands(self) -> bool:
        """Carry out what has arrived, waiting if there is nothing else to do. False: shut down."""
        while True:
            try:
                command = self._inbox.get(block=self._core.is_settled)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request: EngineRequest, request_id: str) -> None:
        try:
            self._core.add(request)
        except BadRequest as error:  # the front end checks the same bounds; this is for what it cannot know
            self._post(self._refuse, request_id, error)

    def _answer(self, answer: asyncio.Future, function: Callable[..., Any], *args: Any) -> None:
        try:
            result, error = function(*args), None
        except Exception as failure:
            result, error = None, failure
        self._post(_settle, answer, result, error)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


def _settle(answer: asyncio.Future, result: Any, error: Exception | None) -> None:
    if answer.done():  # whoever asked has gone
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
