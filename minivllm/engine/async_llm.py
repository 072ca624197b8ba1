"""AsyncLLM: the engine behind a server. The core steps in a thread or a process of its own (engine/link.py); the event
loop tokenises and detokenises.

    event loop                                        core
    generate() -- EngineRequest --> link.send  -----> core.add / core.abort
               <-- RequestOutput -- _deliver <------- deltas of each step

Only the event loop touches the front end and only the core's thread the core, so neither needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from minivllm.engine.detokenizer import AnswerFinder
from minivllm.engine.frontend import Asked, EngineHandle, OutputKind, Prompt
from minivllm.engine.link import Link
from minivllm.engine.live import Look
from minivllm.engine.messages import (
    Abort,
    Adapters,
    Add,
    Call,
    Ended,
    Facts,
    Message,
    Refused,
    Report,
    Resumed,
    Returned,
    Stalled,
)
from minivllm.engine.output import Named, RequestMetrics, RequestOutput
from minivllm.engine.pooled import PooledOutput
from minivllm.engine.replica_stats import SummedStats
from minivllm.errors import BadRequest, EngineDead
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter
from minivllm.plan import Delta
from minivllm.pooling.text import Text
from minivllm.request import AS_IT_IS, BeamSearchParams, EngineRequest, PoolingParams, SamplingParams

if TYPE_CHECKING:
    import numpy as np

AT_ONCE = 256  # texts of a request that are counted before it is others' turn


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

    @classmethod
    def over(cls, link: Link, front_end: int = 0) -> AsyncLLM:
        """An engine that others share. front_end: this one's number."""
        engine = cls.__new__(cls)
        engine._use(link, front_end)
        return engine

    def _start(self) -> None:
        self.stats = SummedStats(self.config.engine.replicas)
        self.dead_replicas: set[int] = set()
        self._stalls: dict[int, str] = {}  # by replica: what a step or call does that outlasts engine.step_timeout
        self.watchers: list[Watcher] = []
        self._calls: dict[int, asyncio.Future] = {}
        self._num_calls = 0
        self._streams: dict[str, asyncio.Queue[RequestOutput | PooledOutput | Exception]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: Exception | None = None
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
        client: str = "",
        on_start: Callable[[RequestMetrics], None] = lambda metrics: None,
        find_answer: Callable[[], AnswerFinder] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come; the last one has finished=True. Leaving the iterator early aborts the request.

        output_kind: each output holds all text so far, only what is new, or ("final") there is only the last one; beams
        come all at once, at the end. client: whose share of the engine it takes, where scheduler.policy is fair.
        on_start: is given the request's metrics, which count what is made, whether it is read or not. find_answer: for
        a model that thinks, what finds the answer in one output's text, so that stops and min_tokens are about it.
        Raises BadRequest before the first item, EngineDead if the step loop has ended.
        """
        if request_id in self._streams:
            raise BadRequest(f'request id "{request_id}" is in use', "request_id")
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        adapter = await self._adapter(lora_request)
        asked = priority, cache_salt, adapter, client, find_answer
        requests = self._front.requests(prompt, params, request_id, output_kind, *asked)
        on_start(self._front.processor.metrics_of(request_id))
        stream = self._streams[request_id] = asyncio.Queue()
        finished = False
        try:
            for request in requests:
                for watcher in self.watchers:
                    watcher.on_add(request)
            self._link.send(Add.together(requests))
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

    async def pool(
        self, texts: Sequence[Text], request_id: str, *, asked: PoolingParams = AS_IT_IS, client: str = ""
    ) -> list[np.ndarray]:
        """The vector of each. Being cancelled aborts them. asked: of all of them.

        Raises EngineDead if the step loop has ended, OutOfMemory or MinivllmError if a text failed."""
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        requests = self.texts.pooling_requests(texts, request_id, asked, client)
        stream = self._streams[request_id] = asyncio.Queue()
        try:
            for i, request in enumerate(requests):
                for watcher in self.watchers:
                    watcher.on_add(request)
                if i % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
            number = self.config.engine.replicas
            for first, *others in filter(None, (requests[i::number] for i in range(number))):  # each has its part
                self._link.send(Add(first, others=others))
            output = await stream.get()
        finally:
            del self._streams[request_id]
            if left := self._front.processor.abort(request_id):
                self._abort_in_core(left)
        if isinstance(output, Exception):
            raise output
        return output.all_vectors()

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

    async def recent_steps(self, num_steps: int, replica: int = 0) -> dict[str, Any]:
        """What an engine core did last (trace_recent.py: snapshot); nothing unless debug.recent_steps is set."""
        return await self._call("recent_steps", num_steps, replica=replica)

    async def look(self, after: int, replica: int = 0) -> Look:
        """How an engine core runs now, with the steps from number `after` on."""
        return msgspec.convert(await self._call("look", after, replica=replica), Look)

    @property
    def num_requests(self) -> int:
        """Those whose outputs are expected."""
        return len(self._front.processor)

    @property
    def is_running(self) -> bool:
        return self._dead is None and self._link.is_running

    @property
    def stalled(self) -> str | None:
        """What a step or call does that runs longer than engine.step_timeout, in whichever replica."""
        return next(iter(list(self._stalls.values())), None)

    async def shutdown(self) -> None:
        """End the engine core; streams still open raise EngineDead. Returns once it has ended."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """shutdown() for callers without an event loop."""
        self._link.close()

    async def _adapter(self, asked: Asked) -> str:
        """The name of a request's adapter, "" for none; a LoRARequest's is loaded if it is not."""
        if not isinstance(asked, LoRARequest):
            return self._loaded(asked)
        self._know_loras(await self._call("ensure_lora", asked))
        return asked.lora_name

    async def _call(self, name: str, *args: Any, replica: int | None = None) -> Any:
        """One of the engine's `calls`, made between two steps; its result as plain data. replica: None for all."""
        self._loop = asyncio.get_running_loop()
        self._check_alive()
        self._num_calls += 1
        answer = self._calls[self._num_calls] = self._loop.create_future()
        self._link.send(Call(self._num_calls, name, [msgspec.to_builtins(arg) for arg in args], replica))
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

    def _deliver(self, deltas: list[Delta], named: Named) -> None:
        outputs, aborts = self._front.process(deltas, named)
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
        answer = self._calls.pop(call_id, None)
        if answer is None or answer.done():  # failed with the engine, or whoever asked has gone
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    # --- the link's side

    def _receive(self, message: Message) -> None:
        if isinstance(message, Report):
            self.stats.take_part(message.replica, message.stats)
            for watcher in self.watchers:
                watcher.on_report(message)
            self._front.processor.scheduled(message.joined, self._front.clock() - sum(message.times_ms.values()) / 1e3)
            if message.deltas:
                self._post(self._deliver, message.deltas, self._front.processor.named(message.deltas))
        elif isinstance(message, Stalled):
            self._stalls[message.replica] = message.plan
            self.stats.on_stall(message.replica)
        elif isinstance(message, Resumed):
            self._stalls.pop(message.replica, None)
        elif isinstance(message, Refused):
            self._post(self._refuse, message.req_id, message.error.exception())
        elif isinstance(message, Returned):
            error = None if message.error is None else message.error.exception()
            self._post(self._settle, message.id, message.value, error)
        elif isinstance(message, Adapters):
            self._loras = {adapter.name: adapter for adapter in message.loaded}
        elif isinstance(message, Facts):
            self._back(message)
        else:
            self._end(message)

    def _end(self, message: Ended) -> None:
        """A core is gone. Of several, its requests have been refused; of the last one's the others go with it."""
        self.dead_replicas.add(message.replica)
        self._stalls.pop(message.replica, None)
        self.stats.on_part_end(message.replica)  # else who admits by these would wait for a report that never comes
        if len(self.dead_replicas) == len(self.stats.parts):
            self._dead = message.error.exception()
            self._post(self._fail_all, self._dead)

    def _back(self, message: Facts) -> None:
        self.dead_replicas.discard(message.replica)
        self._loras = {adapter.name: adapter for adapter in message.adapters}
        self._dead = None

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
