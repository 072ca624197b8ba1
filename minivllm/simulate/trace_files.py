"""Traces in files: one request a line, CSV or JSON Lines, read lazily. What form a file has, its first line says.

    azure     TIMESTAMP,ContextTokens,GeneratedTokens: chats and code of a production service, November 2023 (Patel et
              al., "Splitwise", ISCA 2024; github.com/Azure/AzurePublicDataset, CC-BY-4.0), and what has its columns
    mooncake  {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}: requests of Kimi, whose
              blocks of 512 prompt tokens have the same id where they and all before them are equal (Qin et al.,
              "Mooncake", FAST 2025; github.com/kvcache-ai/Mooncake, Apache-2.0)
    plain     your own, CSV or JSON Lines: arrival (seconds), prompt_tokens, output_tokens and, if you like, pieces
              (names of the prompt's pieces, in CSV with spaces between) and piece_tokens (of each; 512)

A form is a Form: the columns by which it is known, and what a row of it asks. Nothing of the data is in the project.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minivllm.errors import TraceError
from minivllm.registry import Registry, did_you_mean
from minivllm.simulate.workload import TraceRequest

PIECE_TOKENS = 512
MOST_TOKENS = 100_000_000  # of a prompt or an answer; a larger number is a mistake
MOST_SECONDS = 1e12  # from any moment on, in thirty thousand years
MOST_CHARS = 2**24  # of a line: it names a million pieces


class Broken(Exception):
    """What is wrong with a line, without saying which."""


class Row:
    """A line's values by column; text where the file is CSV."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def tokens(self, name: str, default: int | None = None) -> int:
        number = _count(value := self._get(name, default))
        if number is None or not 1 <= number <= MOST_TOKENS:
            raise Broken(f"{name} must be an integer from 1 to {MOST_TOKENS:,}, got {_shown(value)}")
        return number

    def seconds(self, name: str) -> float:
        value = self._get(name)
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= MOST_SECONDS:
            raise Broken(f"{name} must be a number, got {_shown(value)}")
        return number

    def moment(self, name: str) -> float:
        """Seconds, of a date and time; UTC if it names no zone."""
        value = self._get(name)
        try:
            found = datetime.fromisoformat(value)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        except (TypeError, ValueError, OverflowError):
            raise Broken(f"{name} must be a date and time, got {_shown(value)}") from None

    def names(self, name: str) -> tuple[int, ...]:
        value = self._get(name, ())
        parts = value.split() if isinstance(value, str) else value if isinstance(value, list | tuple) else [None]
        found = tuple(number for part in parts if (number := _count(part)) is not None and 0 <= number < 2**64)
        if len(found) < len(parts):
            raise Broken(f"{name} must be a list of integers from 0, got {_shown(value)}")
        return found

    def _get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name, default)
        if value is None or (value == "" and default is None):
            raise Broken(f"no {name}")
        return default if value == "" else value


class Form(NamedTuple):
    columns: tuple[str, ...]  # that each line has
    others: tuple[str, ...] | None  # that it may have; None: any, which are not looked at
    request: Callable[[Row], TraceRequest]  # arrivals from any moment on. Raises Broken


def _azure(row: Row) -> TraceRequest:
    return TraceRequest(row.moment("TIMESTAMP"), row.tokens("ContextTokens"), row.tokens("GeneratedTokens"))


def _mooncake(row: Row) -> TraceRequest:
    num_prompt, names = row.tokens("input_length"), row.names("hash_ids")
    if len(names) > -(-num_prompt // PIECE_TOKENS):
        raise Broken(f"hash_ids names {len(names)} blocks of {PIECE_TOKENS} tokens, more than {num_prompt}")
    arrival = row.seconds("timestamp") / 1000
    return TraceRequest(arrival, num_prompt, row.tokens("output_length"), names, PIECE_TOKENS)


def _plain(row: Row) -> TraceRequest:
    lengths = row.tokens("prompt_tokens"), row.tokens("output_tokens")
    pieces = row.names("pieces"), row.tokens("piece_tokens", PIECE_TOKENS)
    return TraceRequest(row.seconds("arrival"), *lengths, *pieces)


AZURE = Form(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), None, _azure)
MOONCAKE = Form(("timestamp", "input_length", "output_length", "hash_ids"), None, _mooncake)
PLAIN = Form(("arrival", "prompt_tokens", "output_tokens"), ("pieces", "piece_tokens"), _plain)

FORMS: Registry = Registry(
    "the form of a trace",
    {name: f"minivllm.simulate.trace_files:{name.upper()}" for name in ("azure", "mooncake", "plain")},
)


def read_trace(path: str | Path) -> Iterator[TraceRequest]:
    """In order of arrival, the first at 0. Raises TraceError, a sentence with file and line, on coming to what is
    wrong."""
    begin = last = None
    for number, request in _requests(path):
        begin = request.arrival if begin is None else begin
        if last is not None and request.arrival < last:
            raise TraceError(f"{path}, line {number}: it arrives before the line above it. Sort the file by arrival")
        last = request.arrival
        yield replace(request, arrival=last - begin)
    if begin is None:
        raise TraceError(f"{path}: no request in it")


def write_trace(requests: Iterable[TraceRequest], path: str | Path) -> int:
    """A plain file, JSON Lines. Returns how many requests it has. Raises TraceError."""
    count = 0
    try:
        with open(path, "wb") as file:
            for request in requests:
                file.write(msgspec.json.encode(_object_of(request)) + b"\n")
                count += 1
    except OSError as e:
        raise TraceError(f"cannot write the trace {path}: {e.strerror}") from None
    return count


def _object_of(request: TraceRequest) -> dict[str, Any]:
    lengths = {"prompt_tokens": request.num_prompt, "output_tokens": request.num_output}
    shared = {"pieces": request.pieces, "piece_tokens": request.piece_tokens} if request.pieces else {}
    return {"arrival": round(request.arrival, 6), **lengths, **shared}


def _requests(path: str | Path) -> Iterator[tuple[int, TraceRequest]]:
    """With the number of the line."""
    parse: Callable[[str], Row] | None = None
    form: Form | None = None
    for number, line in _lines(path):
        try:
            if parse is None and not line.startswith("{"):
                columns = _cells(line)
                parse, form = _cells_under(columns), _form_of(columns)
                continue
            parse = parse or _members
            row = parse(line)
            form = form or _form_of(row.values)
            _check_columns(form, row)
            yield number, form.request(row)
        except Broken as e:
            raise TraceError(f"{path}, line {number}: {e}") from None


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """From 1, without those that are empty."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_CHARS), ""), 1):
                if len(line) == MOST_CHARS:
                    raise TraceError(f"{path}, line {number}: it has over {MOST_CHARS:,} characters")
                if line := line.strip():
                    yield number, line
    except OSError as e:
        raise TraceError(f"cannot read the trace {path}: {e.strerror}") from None


def _members(line: str) -> Row:
    try:
        return Row(msgspec.json.decode(line, type=dict))
    except (msgspec.DecodeError, RecursionError) as e:
        raise Broken(f"no JSON object ({e})") from None


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as e:
        raise Broken(f"no line of CSV ({e})") from None


def _cells_under(columns: Sequence[str]) -> Callable[[str], Row]:
    for i, name in enumerate(columns):
        if name in columns[:i]:
            raise Broken(f"the column {_shown(name)} is there twice")

    def parse(line: str) -> Row:
        cells = _cells(line)
        if len(cells) != len(columns):
            raise Broken(f"{len(cells)} values, and {len(columns)} columns")
        return Row(dict(zip(columns, cells, strict=True)))

    return parse


def _form_of(columns: Iterable[str]) -> Form:
    found = set(columns)
    for name in FORMS.names():
        if found.issuperset(FORMS.get(name).columns):
            return FORMS.get(name)
    known = "; ".join(f"{name} ({', '.join(FORMS.get(name).columns)})" for name in FORMS.names())
    raise Broken(f"no known trace has the columns {_shown(', '.join(columns))}. Known: {known}")


def _check_columns(form: Form, row: Row) -> None:
    if form.others is not None and len(row.values) > len(form.columns):
        known = (*form.columns, *form.others)
        for name in row.values:
            if name not in known:
                raise Broken(f"no column {_shown(name)}.{did_you_mean(name, known)} Columns: {', '.join(known)}")


def _count(value: Any) -> int | None:
    """Of an integer, or of its digits."""
    if isinstance(value, str) and len(value) < 30 and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
