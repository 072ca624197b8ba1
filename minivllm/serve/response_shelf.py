"""What a server keeps of /v1/responses: the store, off the event loop, and the runs whose clients need not stay.

A run is one response with background=true. It takes its place in the queue before its client is answered, like any
other request, and its row in the store is live until it ends; then the row is changed first, and whoever follows its
events told after. Whoever cancels or deletes it at another server of the same store changes the row, which is looked at
as long as there are runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from minivllm.errors import BadRequest
from minivllm.serve import bodies, errors
from minivllm.serve.deadline import Deadline
from minivllm.serve.fair_threads import FairThreads
from minivllm.serve.off_loop import done_by, serves
from minivllm.serve.response_store import PART, Changed, NotKept, Record, ResponseStore, Seen, TooLarge, TooLong
from minivllm.serve.responses import Writer, encoded
from minivllm.serve.responses_protocol import InputItem, InputItemsQuery, ItemList, ResponseError, ResponsesRequest

R = TypeVar("R")

LOOK_SECONDS = 0.5  # how often it is looked whether another server has stopped a run, or ended one that is followed
NOTHING_KEPT = "nothing is stored here; send the whole conversation as input"
CANCELLED = "the response was cancelled"
FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # OpenAI's codes, by status
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9a-f]+")  # responses.item_id

logger = logging.getLogger("minivllm.serve")


class NoShelf:
    """Of a server that keeps nothing."""

    def keeps(self, body: ResponsesRequest, request: Request) -> bool:
        """Names as ignored that it is asked to."""
        refuse_state(body)
        if body.store:
            bodies.note(request, {"store": NOTHING_KEPT})
        return False

    async def earlier(self, id: str | None, owner: str, max_bytes: int) -> list[InputItem]:
        if id is not None:
            raise BadRequest(f"previous_response_id is not supported: {NOTHING_KEPT}", "previous_response_id")
        return []

    async def items(self, wanted: Mapping[str, str], owner: str, max_bytes: int) -> NoReturn:
        (_, where), *_ = wanted.items()
        raise BadRequest(
            f"{where}: nothing is stored here that item_reference could mean. Send the item itself.", where
        )

    async def seen(self, id: str, owner: str) -> NoReturn:
        raise errors.ApiError(404, f'no response "{id}": {NOTHING_KEPT}', code="nothing_stored")

    delete = is_background = answer = seen

    async def page(self, id: str, owner: str, query: InputItemsQuery, max_bytes: int) -> NoReturn:
        await self.seen(id, owner)

    async def close(self) -> None:
        pass


def refuse_state(body: ResponsesRequest) -> None:
    """Where nothing is kept."""
    for name in ("previous_response_id", "background"):
        if getattr(body, name):
            raise BadRequest(f"{name} is not supported: {NOTHING_KEPT}. Leave it out.", name)


class Asked(NamedTuple):
    """What is kept of a request."""

    owner: str
    items: bytes
    previous: str | None
    streamed: bool


class Run:
    def __init__(self, writer: Writer, streamed: bool):
        self.writer, self.streamed = writer, streamed
        self.task: asyncio.Task | None = None
        self.timer: asyncio.Task | None = None  # of its deadline, if it has one
        self.events: list[bytes] = []  # each at its sequence_number; none if it was not asked for a stream
        self.is_ending = self.is_over = False
        self.stopped = ("failed", "")  # the status that it has once it is stopped, and why
        self._news = asyncio.Event()

    def tell(self, *events: bytes) -> None:
        if self.streamed:
            self.events += events
        self._news.set()
        self._news = asyncio.Event()

    def stop(self, status: str, why: str) -> None:
        if not self.is_ending:
            self.is_ending, self.stopped = True, (status, why)
            self.task.cancel()

    async def stop_at(self, deadline: Deadline) -> None:
        await deadline.passes()
        self.stop("failed", str(deadline.error()))

    async def follow(self, number: int) -> AsyncIterator[bytes]:
        """The events from this number on, those to come too."""
        while number < len(self.events) or not self.is_over:
            if number == len(self.events):
                await self._news.wait()
            else:
                yield self.events[number]
                number += 1

    def end_stopped(self) -> list[bytes]:
        """The events of an end that comes from outside."""
        writer, (status, why) = self.writer, self.stopped
        closed = [encoded(event) for event in writer.items.close("incomplete")]
        writer.response.status = status
        if status == "cancelled":
            return [*closed, writer.error(errors.ApiError(400, why, code="response_cancelled"))]
        return [*closed, *self.end_failed(ResponseError("server_error", why))]

    def end_failed(self, error: ResponseError) -> list[bytes]:
        self.writer.response.status, self.writer.response.error = "failed", error
        return [self.writer.told("failed")]


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch, by the system's clock as it is now: when that jumps, nothing becomes older at once."""
    ticks = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the former goes on while the machine sleeps
    begin = time.time() - time.clock_gettime(ticks)
    return lambda: begin + time.clock_gettime(ticks)


class Shelf:
    def __init__(self, store: ResponseStore):
        self.store, self._now = store, steady_clock()
        self.runs: dict[str, Run] = {}
        self._threads = FairThreads(2, "responses")  # SQLite waits for the disk, and for other servers
        self._watcher: asyncio.Task | None = None

    async def close(self) -> None:
        """Ends all runs, which are then found failed."""
        runs = list(self.runs.values())
        for run in runs:
            run.stop("failed", "the server was stopped before this response was complete")
        await asyncio.gather(*(run.task for run in runs), return_exceptions=True)
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.to_thread(self.store.close)

    async def _do(self, work: Callable[..., R], *args: Any) -> R:
        """work: a method of the store, or one that calls it."""
        return await done_by(self._threads, serves.get(), 1, lambda: work(*args))

    # --- a new response

    def keeps(self, body: ResponsesRequest, request: Request) -> bool:
        if body.background and body.store is False:
            raise BadRequest("background needs store=true: its answer is read from there", "background")
        return body.store is not False

    async def earlier(self, id: str | None, owner: str, max_bytes: int) -> list[InputItem]:
        """What comes before the input of a request that goes on from response `id`."""
        if id is None:
            return []
        items, status = await self._do(self._earlier, id, owner, max_bytes, self._now())
        if status in ("queued", "in_progress"):
            why = f'"{id}" is {status}; wait until it is complete'
            raise errors.ApiError(400, f"previous_response_id: {why}", "response_not_complete", "previous_response_id")
        return items

    def _earlier(self, id: str, owner: str, max_bytes: int, now: float) -> tuple[list[InputItem], str]:
        items: list[InputItem] = []
        for turn in self._conversation(id, owner, max_bytes, now):
            end = msgspec.json.decode(turn.response, type=Ending)
            items += [*msgspec.json.decode(turn.items, type=list[InputItem]), *end.output]
        return items, end.status

    def _conversation(self, id: str, owner: str, max_bytes: int, now: float) -> list[Record]:
        with self._telling(id):
            return self.store.conversation(id, self.store.owner(owner), max_bytes, now)

    @contextmanager
    def _telling(self, id: str) -> Iterator[None]:
        """What a conversation cannot be read for, as ApiErrors."""
        try:
            yield
        except NotKept as error:
            raise not_kept(id, error.args[0]) from None
        except TooLong as error:
            why = f'the conversation of "{id}" has {error}; send what matters of it as input'
            raise errors.ApiError(400, why, "conversation_too_long", "previous_response_id") from None

    async def keep(self, writer: Writer, asked: Asked) -> None:
        """A response that is whole. If that fails, it says that it is not stored."""
        try:
            await self._do(self.store.put, self._record(writer, asked), self._now())
        except (sqlite3.Error, TooLarge) as error:
            logger.error("response %s is not kept: %s", writer.response.id, repr(error))
            writer.response.store = False

    def _record(self, writer: Writer, asked: Asked, **fields: Any) -> Record:
        response, owner = writer.response, self.store.owner(asked.owner)
        return Record(response.id, owner, asked.items, msgspec.json.encode(response), asked.previous, **fields)

    # --- in the background

    async def start(self, writer: Writer, asked: Asked) -> Run:
        """Raises ApiError 429 if too many wait."""
        writer.job.reserve()
        try:
            writer.response.status = "queued"
            run = Run(writer, asked.streamed)
            run.tell(writer.told("created"), writer.told("queued"))
            writer.opening = ("in_progress",)
            live = {"server": self.store.server, "events": b"" if asked.streamed else None}
            await self._do(self.store.put, self._record(writer, asked, **live), self._now())
        except TooLarge:
            writer.job.release()
            raise BadRequest("input is larger than all that may be kept (--store-max-bytes)", "input") from None
        except BaseException:
            writer.job.release()
            raise
        self.runs[writer.response.id] = run
        without_client = contextvars.Context()  # of off_loop: who waits for it, and on whose account
        run.task = asyncio.create_task(self._work(run), context=without_client)
        if (deadline := writer.job.deadline) is not None:
            run.timer = asyncio.create_task(run.stop_at(deadline))
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), context=without_client)
        return run

    async def _work(self, run: Run) -> None:
        response, ending, begun = run.writer.response, [], False
        try:
            async with aclosing(run.writer.events()) as events:
                async for event in events:
                    if response.status != "in_progress":
                        ending.append(event)  # told once it is kept
                        continue
                    if not begun:
                        begun = True
                        await self._do(self.store.progress, response.id, msgspec.json.encode(response))
                    run.tell(event)
        except asyncio.CancelledError:
            ending = run.end_stopped()
        except Exception as error:
            ending = run.end_failed(as_response_error(error, response.id))
        finally:
            run.writer.job.release()
        await self._finish(run, ending)

    async def _finish(self, run: Run, ending: list[bytes]) -> None:
        run.is_ending, response = True, run.writer.response
        if run.timer is not None:
            run.timer.cancel()
        events = b"".join([*run.events, *ending]) if run.streamed else None
        try:
            await self._do(self.store.finish, response.id, msgspec.json.encode(response), events, self._now())
        except sqlite3.Error:
            logger.exception("the end of response %s is not kept", response.id)
        del self.runs[response.id]
        run.is_over = True
        run.tell(*ending)

    async def _watch(self) -> None:
        """For what other servers do with the runs of this one."""
        while self.runs:
            await asyncio.sleep(LOOK_SECONDS)
            ids = set(self.runs)
            try:
                mine = await self._do(self.store.mine)
            except sqlite3.Error:
                logger.exception("the store of responses cannot be read")
                continue
            for id in ids - mine:
                if (run := self.runs.get(id)) is not None:
                    run.stop("cancelled", CANCELLED)

    # --- a response that is kept

    async def seen(self, id: str, owner: str) -> Seen:
        """Raises ApiError 404."""
        owner, is_lost = self.store.owner(owner), id not in self.runs
        seen = await self._do(self.store.seen, id, owner, self._now())
        if seen is not None and is_lost and seen.server == self.store.server:  # its end could not be kept
            error = msgspec.to_builtins(ResponseError("server_error", "what came of this response could not be kept"))
            await self._do(self.store.stop, id, owner, "failed", error, self._now())
            seen = await self._do(self.store.seen, id, owner, self._now())
        if seen is None:
            raise not_here(id)
        return seen

    async def answer(self, id: str, owner: str) -> tuple[int, AsyncIterator[bytes]]:
        """The response as it is now: how many bytes, and these in parts. Raises ApiError 404."""
        while True:
            seen = await self.seen(id, owner)
            try:
                first = await self._do(self.store.part, seen, "response", 0)
            except Changed:
                continue  # it changes a few times in its life, and is gone at last
            return seen.num_response, self._parts(seen, "response", first)

    async def _parts(self, seen: Seen, column: Literal["response", "events"], first: bytes) -> AsyncIterator[bytes]:
        """Read as they are wanted. first: of them. Raises ApiError 409 if what is read changes meanwhile: a live one
        has ended, or one was deleted."""
        length = seen.num_response if column == "response" else seen.num_events or 0
        yield first
        try:
            for begin in range(len(first), length, PART):
                yield await self._do(self.store.part, seen, column, begin)
        except Changed:
            raise errors.ApiError(409, f'"{seen.id}" has just changed; ask again', code="response_changed") from None

    async def is_background(self, id: str, owner: str) -> bool:
        await self.seen(id, owner)
        return await self._do(self._is_background, id, self.store.owner(owner), self._now())

    def _is_background(self, id: str, owner: str, now: float) -> bool:
        record = self.store.get(id, owner, now)
        return record is not None and msgspec.json.decode(record.response, type=Background).background

    async def page(self, id: str, owner: str, query: InputItemsQuery, max_bytes: int) -> ItemList:
        """Of all that it answers: also what came before its own input, answers included. Raises ApiError, and
        BadRequest."""
        await self.seen(id, owner)
        return await self._do(self._page, id, owner, query, max_bytes, self._now())

    def _page(self, id: str, owner: str, query: InputItemsQuery, max_bytes: int, now: float) -> ItemList:
        asked = query.after, query.limit, query.order == "desc", max_bytes, now
        try:
            with self._telling(id):
                shown, has_more = self.store.page(id, self.store.owner(owner), *asked)
        except ValueError:
            raise BadRequest(f'after: "{query.after}" is the id of no item of this response', "after") from None
        first, last = (msgspec.json.decode(shown[i], type=Item).id if shown else None for i in (0, -1))
        return ItemList([msgspec.Raw(item) for item in shown], first, last, has_more)

    async def items(self, wanted: Mapping[str, str], owner: str, max_bytes: int) -> dict[str, InputItem]:
        """By id. wanted: the places of the request where they are, by id. Their responses may not have more bytes than
        a request that sends them. Raises ApiError, naming the place of one that is not there."""
        return await self._do(self._items, wanted, owner, max_bytes, self._now())

    def _items(self, wanted: Mapping[str, str], owner: str, max_bytes: int, now: float) -> dict[str, InputItem]:
        found: dict[str, dict[str, Any]] = {}
        read: set[str] = set()
        size = 0
        for id, where in wanted.items():
            if (parts := ITEM_ID.fullmatch(id)) and (response := f"resp_{parts[1]}") not in read:
                read.add(response)
                if (record := self.store.get(response, self.store.owner(owner), now)) is not None:
                    size += len(record.items) + len(record.response)
                    turn = [*msgspec.json.decode(record.items), *msgspec.json.decode(record.response)["output"]]
                    found |= {item["id"]: item for item in turn if item["id"] in wanted}
            if id not in found:
                raise errors.ApiError(400, f'{where}: no item "{id}" is kept here', "item_not_found", where)
            if size > max_bytes:
                why = f"the responses that hold these items have more than {max_bytes} bytes; send the items"
                raise errors.ApiError(400, f"{where}: {why}", "conversation_too_long", where)
        return msgspec.convert(found, dict[str, InputItem])

    async def delete(self, id: str, owner: str) -> None:
        """Raises ApiError 404."""
        await self.seen(id, owner)
        await self._do(self.store.delete, id, self.store.owner(owner))
        await self._stop(id)

    async def cancel(self, id: str, owner: str) -> None:
        """One that is over stays as it was."""
        await self.seen(id, owner)
        await self._stop(id)
        await self._do(self.store.stop, id, self.store.owner(owner), "cancelled", None, self._now())  # another server's

    async def _stop(self, id: str) -> None:
        if (run := self.runs.get(id)) is not None:
            run.stop("cancelled", CANCELLED)
            await asyncio.wait({run.task})

    async def events(self, id: str, owner: str, number: int) -> AsyncIterator[bytes]:
        """Of one that was made to be streamed, from this number on. Those of a run of another server come once it is
        over."""
        if (run := self.runs.get(id)) is not None:
            async with aclosing(run.follow(number)) as events:
                async for event in events:
                    yield event
            return
        while (seen := await self.seen(id, owner)).server is not None:
            await asyncio.sleep(LOOK_SECONDS)
        if not seen.num_events:
            record = await self._do(self.store.get, id, self.store.owner(owner), self._now())
            if record is None:
                raise not_here(id)
            yield untold_end(record, number)
            return
        is_empty = True
        first = await self._do(self.store.part, seen, "events", 0)
        async for part in behind(self._parts(seen, "events", first), number):
            is_empty = False
            yield part
        if is_empty:
            yield b": nothing more\n\n"  # something must come, for the answer to begin


async def behind(parts: AsyncIterator[bytes], number: int) -> AsyncIterator[bytes]:
    """What follows the first events, so many, of a text in parts that may be cut anywhere."""
    last = b""  # of the part before: an end of an event may lie on both sides of a cut
    async for part in parts:
        text, last = last + part, part[-1:]
        at = len(text) - len(part)
        while number and (end := text.find(b"\n\n", max(0, at - 1))) >= 0:
            number, at = number - 1, end + 2
        if number:
            continue
        if text[at:]:
            yield text[at:]
        last = b""


class Background(msgspec.Struct):
    """Of a response that is kept."""

    background: bool


class Item(msgspec.Struct):
    id: str


class Ending(msgspec.Struct):
    """Of a response that is kept."""

    output: list[InputItem]
    status: str


def not_here(id: str) -> errors.ApiError:
    return errors.ApiError(404, f'no response "{id}" is kept here', code="response_not_found")


def not_kept(id: str, missing: str) -> errors.ApiError:
    what = f'no response "{id}" is kept here'
    if missing != id:
        what = f'"{id}" goes on from "{missing}", which is kept no longer: it was deleted, or went with the oldest'
    return errors.ApiError(400, f"previous_response_id: {what}", "previous_response_not_found", "previous_response_id")


def as_response_error(error: Exception, id: str) -> ResponseError:
    told = errors.as_api_error(error)
    if told.status == 500 and told is not error:
        logger.exception("response %s failed", id)
    return ResponseError(FAILURES.get(told.status, "server_error"), errors.text_of(told))


def untold_end(record: Record, number: int) -> bytes:
    """The one event of a run whose server could tell nothing more: it was stopped by another, or has ended."""
    if msgspec.json.decode(record.response)["status"] == "cancelled":
        fields: dict[str, Any] = {"type": "error", "code": "response_cancelled", "message": CANCELLED, "param": None}
    else:
        fields = {"type": "response.failed", "response": msgspec.Raw(record.response)}
    data = msgspec.json.encode({**fields, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), data)
