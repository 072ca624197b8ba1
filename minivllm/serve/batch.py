"""Offline runs of OpenAI's batch files: one request a line in, one answer a line out, in the order of their ending.

The output file is the only state. A line is appended whole once its answer is there, so after a kill a run goes on
where it was: an unfinished last line is cut off, and requests whose custom_id is in the file are skipped. Lines reach
the disk (fsync) once a second: a crash of the machine, unlike one of the process, can cost the last second's.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from minivllm.errors import BadRequest, EngineDead, UserError
from minivllm.serve import bodies, chat, completions, errors, protocol, responses, responses_protocol
from minivllm.serve.generation import Service, answer
from minivllm.serve.response_shelf import NOTHING_KEPT, refuse_state

SYNC_SECONDS = 1.0
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.?)*"?|[][{}]', re.DOTALL)  # texts whole, and brackets


class Line(Struct, forbid_unknown_fields=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Reply(Struct):
    status_code: int
    request_id: str
    body: Any


class LineError(Struct):
    code: str
    message: str


class Result(Struct, kw_only=True):
    id: str
    custom_id: str
    response: Reply | None = None
    error: LineError | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.response is None or self.response.status_code >= 400


class Identified(Struct):
    """All that must be right of a line before anything runs."""

    custom_id: str


# ------------------------------------------------------------------------------------------------------------ the files


def scan(path: Path) -> dict[str, int]:
    """custom_id -> line number. Raises UserError for lines whose answers could not be told apart."""
    found: dict[str, int] = {}
    for number, data in lines(path):
        try:
            custom_id = id_of(data)
        except UNREADABLE as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if custom_id in found:
            raise UserError(f'{path}, line {number}: custom_id "{custom_id}" is that of line {found[custom_id]} too')
        found[custom_id] = number
    return found


def id_of(data: bytes) -> str:
    """custom_id of a line, also of one whose body is nested deeper than can be read: that is its own error."""
    try:
        return msgspec.json.decode(data, type=Identified).custom_id
    except RecursionError:
        return msgspec.json.decode(_flat(data), type=Identified).custom_id


def _flat(data: bytes) -> bytes:
    """A JSON object with null for the lists and objects in it, found by counting brackets outside of texts."""
    kept, depth, start = [], 0, 0
    for token in _TOKENS.finditer(data):
        if token[0][:1] in b"[{":
            depth += 1
            if depth == 2:
                kept.append(data[start : token.start()])
        elif token[0][:1] in b"]}":
            if depth == 2:
                kept.append(b"null")
                start = token.end()
            depth -= 1
    return b"".join(kept) + data[start:]


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                if data.strip():
                    yield number, data
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


class Output:
    """The file of results, held by one run at a time. `done`: the custom_ids that it has."""

    def __init__(self, path: Path):
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise UserError(f"{path}: another run is writing it") from None
        self._path = path
        self.done: set[str] = set()
        self.num_failed = 0
        self._synced = time.monotonic()
        try:
            self._take_up(path)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, result: Result) -> None:
        """Raises UserError if the disk is full: then nothing of it is there."""
        end = os.fstat(self._fd).st_size
        try:
            self._write(msgspec.json.encode(result) + b"\n")
        except OSError as error:
            os.ftruncate(self._fd, end)
            raise self._failed(error) from None
        self.done.add(result.custom_id)
        self.num_failed += result.failed
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from None
        self._synced = time.monotonic()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def _failed(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path}: {error.strerror}. It has all answers so far: the same command goes on from there"
        )

    def _take_up(self, path: Path) -> None:
        end = 0
        for number, data in lines(path):
            if not data.endswith(b"\n"):
                os.ftruncate(self._fd, end)  # the run before was killed while writing it
                break
            try:
                result = msgspec.json.decode(data, type=Result)
            except UNREADABLE as error:
                raise UserError(f"{path}, line {number}, is no result of a batch: {error}") from None
            self.done.add(result.custom_id)
            self.num_failed += result.failed
            end += len(data)


# -------------------------------------------------------------------------------------------------------------- the run


async def run(
    source: Path, output: Output, service: Service, concurrency: int, tick: Callable[[int], None] = lambda tokens: None
) -> None:
    """Answer the lines of `source` that `output` lacks, `concurrency` at a time. tick: called after each answer with
    the tokens it generated. Raises EngineDead; what is in `output` by then stays."""
    pending = lines(source)  # read as the run goes on: a file may be larger than memory

    async def work() -> None:
        for _, data in pending:
            if id_of(data) not in output.done:
                result, tokens = await one(data, service)
                output.append(result)
                tick(tokens)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def one(data: bytes, service: Service) -> tuple[Result, int]:
    """The result of one line, and how many tokens it has generated."""
    result = Result(id=f"batch_req_{uuid.uuid4().hex}", custom_id=id_of(data))
    try:
        line = msgspec.json.decode(data, type=Line)
        if line.method != "POST" or line.url not in URLS:
            raise msgspec.ValidationError(f"only POST of {', '.join(URLS)}, not {line.method} {line.url}")
    except UNREADABLE as error:
        result.error = LineError("invalid_line", str(error))
        return result, 0
    try:
        made = await URLS[line.url](bytes(line.body), service)
    except EngineDead:
        raise
    except Exception as error:
        told = errors.as_api_error(error)
        if told.status == 500 and told is not error:
            errors.logger.exception("custom_id %s failed", line.custom_id)
        result.response = Reply(told.status, result.id, msgspec.Raw(errors.body(told)))
        return result, 0
    result.response = Reply(200, made.id, made)
    return result, getattr(made.usage, "completion_tokens", None) or getattr(made.usage, "output_tokens", 0)


def generating(
    url: str, kind: type[protocol.Sampling], prepare: Callable[..., Any]
) -> Callable[..., Awaitable[Struct]]:
    async def made(data: bytes, service: Service) -> Struct:
        body = checked(data, url, kind, service)
        job, shape = prepare(body, service)
        bodies.tell(job.ignored, service.told, url)
        return await answer(job, shape)

    return made


async def response(data: bytes, service: Service) -> Struct:
    body = checked(data, "/v1/responses", responses_protocol.ResponsesRequest, service)
    refuse_state(body)
    if body.store:
        bodies.tell({"store": NOTHING_KEPT}, service.told, "/v1/responses")
    return await responses.prepare(body, service).answer()


def checked(data: bytes, url: str, kind: type, service: Service) -> Any:
    ignored: bodies.Ignored = {}
    body = bodies.parse(data, kind, ignored)
    bodies.tell(ignored, service.told, url)
    service.check_model(body.model)
    if body.stream:
        raise BadRequest("stream does not go with a batch", "stream")
    if body.stream_options is not None:
        raise BadRequest("stream_options does not go with a batch", "stream_options")
    return body


URLS: dict[str, Callable[[bytes, Service], Awaitable[Any]]] = {
    "/v1/chat/completions": generating("/v1/chat/completions", protocol.ChatRequest, chat.prepare),
    "/v1/completions": generating("/v1/completions", protocol.CompletionRequest, completions.prepare),
    "/v1/responses": response,
}


def is_same_run(asked: dict[str, int], output: Output, path: Path) -> None:
    """Raises UserError if the output holds answers to something else: it is another batch's."""
    if strangers := sorted(output.done - asked.keys()):
        what = f'{path} has an answer to custom_id "{strangers[0]}", which the input lacks'
        raise UserError(f"{what}: it belongs to another batch. Name another output file.")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Output]:
    output = Output(path)
    try:
        yield output
    finally:
        output.close()
