"""What a client has sent, as a Struct of the protocol, and the policy for what this server does not act on:

    it would change the answer and cannot be honoured    a 400 with the reason (`refused` in protocol.py)
    hints and echoes, and fields that nobody knows       taken and named: in the answer's header x-minivllm-ignored, and
                                                         once each in the log (`hint`)

Clients of many servers send hints that one server may have no use for, and messages as another server wrote them; a 400
would stop them for nothing. `--unknown-fields refuse` is for who wants typing errors found.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, inspect
from starlette.requests import Request

from minivllm.errors import BadRequest
from minivllm.registry import did_you_mean
from minivllm.serve import json_bounds
from minivllm.serve.connection import hint_at_type, read_body
from minivllm.serve.off_loop import UNBOUNDED, by_size, client_of
from minivllm.serve.protocol import RequestBody

T = TypeVar("T", bound=RequestBody)
R = TypeVar("R")

Ignored = dict[str, str]  # what was taken and not acted on, without numbers ("messages[].cache_control"), and why
UNKNOWN = "no field of this endpoint."
MOST_TOLD, LONGEST_NAME = 256, 64  # clients choose the names of unknown fields
MOST_IN_HEADER = 20

logger = logging.getLogger("minivllm.serve")


class NotJSON(BadRequest):
    """A body that cannot be read at all."""


async def taken(request: Request, kind: type[T]) -> T:
    """The request's body. Raises ApiError or BadRequest."""
    app = request.app.state
    ignored: Ignored | None = None if app.refuse_unknown else {}
    data = await read_body(request)
    try:
        body = await by_size(len(data), lambda: parse(data, kind, ignored), client_of(request.scope["state"]))
    except NotJSON as error:
        raise NotJSON(f"{error}{hint_at_type(request.headers)}") from None
    request.state.size = UNBOUNDED if getattr(body, "chat_template", None) else len(data)
    if ignored:
        note(request, ignored)
    return body


async def worked_out(request: Request, work: Callable[[], R]) -> R:
    """What is made of the request's body, beside the event loop if that is long."""
    return await by_size(request.state.size, work, client_of(request.scope["state"]))


def note(request: Request, ignored: Ignored) -> None:
    """For the answer's header, and the log."""
    request.state.ignored = [*getattr(request.state, "ignored", ()), *ignored]
    tell(ignored, request.app.state.service.told, request.url.path)


def queried(request: Request, kind: type[T]) -> T:
    """The query's parameters. Raises BadRequest."""
    return from_texts(request, request.query_params.multi_items(), kind)


def from_texts(request: Request, pairs: Iterable[tuple[str, str | bytes]], kind: type[T]) -> T:
    """Names and values that are text, or a form's files. A list is as many of one name, with [] behind it or not.
    Raises BadRequest."""
    fields, given, ignored = _known(kind), {}, {}
    for name, value in pairs:
        name = name.removesuffix("[]")
        if name in fields:
            given[name] = [*given.get(name, ()), value] if fields[name].items else value
        elif not request.app.state.refuse_unknown:
            if len(ignored) < MOST_TOLD:
                ignored[_printable(name)] = UNKNOWN + did_you_mean(name, sorted(fields))
        else:
            raise BadRequest(f'unknown parameter "{_printable(name)}".{did_you_mean(name, sorted(fields))}', name)
    try:
        found = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as e:
        raise _bad_field(str(e), kind) from None
    _look_through(found, "", ignored)
    note(request, ignored)
    return found


def tell(ignored: Ignored, told: set[tuple[str, str]], path: str) -> None:
    """One line in the log for each field, the first time that it comes."""
    for name, why in ignored.items():
        if (path, name) not in told and len(told) < MOST_TOLD:
            told.add((path, name))
            logger.warning('%s: "%s" is ignored: %s', path, name, why)


def header(names: list[str]) -> bytes:
    """For x-minivllm-ignored."""
    shown = ", ".join(names[:MOST_IN_HEADER])
    return (f"{shown}, ..." if len(names) > MOST_IN_HEADER else shown).encode("ascii", "replace")


def parse(data: bytes, kind: type[T], ignored: Ignored | None = None) -> T:
    """ignored: filled with what is not acted on; None: unknown fields are refused. Raises BadRequest, naming the field,
    for anything that the protocol does not admit."""
    json_bounds.check(data)
    try:
        try:
            body = _decoder(kind).decode(data)
        except msgspec.ValidationError as e:
            if ignored is None or "unknown field" not in str(e):
                raise
            body = _without_unknown(msgspec.json.decode(data), kind, ignored)
    except msgspec.ValidationError as e:
        raise _bad_field(str(e), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise NotJSON(f"the body is not valid JSON: {e}") from None
    _look_through(body, "", {} if ignored is None else ignored)
    return body


def _without_unknown(data: Any, kind: type[T], ignored: Ignored) -> T:
    _drop_unknown(data, _Options((), ((None, None, kind),)), "", ignored)
    return msgspec.convert(data, kind)


class _Options(NamedTuple):
    """What JSON of a field may be, as far as there are fields inside: lists of something, and Structs."""

    items: tuple[_Options, ...]
    structs: tuple[tuple[str | None, Any, type[Struct]], ...]  # the field and the value that tell it from others


def _drop_unknown(data: Any, options: _Options, path: str, ignored: Ignored) -> None:
    """Take out of JSON data what the type has no field for."""
    if isinstance(data, list):
        for items in options.items[:1]:
            for item in data:
                _drop_unknown(item, items, f"{path}[]", ignored)
    elif isinstance(data, dict):
        fitting = (kind for field, tag, kind in options.structs if field is None or data.get(field) == tag)
        if (kind := next(fitting, None)) is None:
            return
        fields = _known(kind)
        for name in list(data):
            full = f"{path}.{name}".lstrip(".")
            if name in fields:
                _drop_unknown(data[name], fields[name], full, ignored)
            else:
                del data[name]
                if len(ignored) < MOST_TOLD and (told := _printable(full)) not in ignored:
                    ignored[told] = UNKNOWN + did_you_mean(name, sorted(fields))


@functools.cache
def _known(kind: type[Struct]) -> dict[str, _Options]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    tag = {} if info.tag_field is None else {info.tag_field: _Options((), ())}
    return tag | {field.encode_name: _options(field.type) for field in info.fields}


def _options(kind: inspect.Type) -> _Options:
    if isinstance(kind, inspect.Metadata):
        return _options(kind.type)
    if isinstance(kind, inspect.UnionType):
        parts = [_options(part) for part in kind.types]
        return _Options(*(sum((part[i] for part in parts), ()) for i in range(2)))
    if isinstance(kind, inspect.ListType):
        return _Options((_options(kind.item_type),), ())
    if isinstance(kind, inspect.StructType):
        return _Options((), ((kind.tag_field, kind.tag, kind.cls),))
    return _Options((), ())


def _printable(name: str) -> str:
    """Of a name that a client chose: it goes into a header and the log."""
    name = re.sub(r"[^\w.\[\]-]", "?", name, flags=re.ASCII)
    return (name or "?") if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "..."


# --------------------------------------------------------------------------------------------- fields that are known


def _look_through(body: Struct, path: str, ignored: Ignored) -> None:
    """Refuse what is not supported; note what is not acted on. path: with the numbers of items."""
    for attribute, field, about in _fields(type(body)):
        value = getattr(body, attribute)
        if value is None:
            continue
        if "refused" in about and value not in about["no_ops"]:
            name = f"{path}{field}"
            raise BadRequest(f"{name} is not supported: {about['refused']}. Leave it out.", name)
        if "hint" in about and value not in about["no_ops"]:
            ignored[re.sub(r"\[\d+\]", "[]", f"{path}{field}")] = about["hint"]
        for inner_path, inner in _structs_in(value, f"{path}{field}"):
            _look_through(inner, f"{inner_path}.", ignored)


def _structs_in(value: Any, name: str) -> Iterator[tuple[str, Struct]]:
    if isinstance(value, Struct):
        yield name, value
    elif isinstance(value, list) and any(issubclass(kind, Struct) for kind in set(map(type, value))):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Struct))


@functools.cache
def _fields(kind: type[Struct]) -> tuple[tuple[str, str, dict[str, Any]], ...]:
    """Each field, its name on the wire, and what protocol.py says of it: looking that up takes longer than decoding a
    request."""
    return tuple((field.name, field.encode_name, _about(field)) for field in msgspec.structs.fields(kind))


def _about(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    metas = getattr(field.type, "__metadata__", ())
    return next((meta.extra for meta in metas if meta.extra and "no_ops" in meta.extra), {})


def _bad_field(text: str, kind: type[Struct]) -> BadRequest:
    """msgspec's 'Expected `float`, got `str` - at `$.temperature`' as a BadRequest with its param."""
    what, _, where = text.partition(" - at ")
    where = where.rpartition("`$")[2].strip("`.")
    if "unknown field" not in what:
        missing = what.split("`")[1] if "missing required" in what else ""
        field = ".".join(filter(None, [where, missing])) or None
        return BadRequest(f"{where or 'the body'}: {what.replace('`', '')}", field)
    name = what.split("`")[1]
    known = {f for struct in ([kind] if not where else RequestBody.__subclasses__()) for f in struct.__struct_fields__}
    full = f"{where}.{name}".strip(".")
    return BadRequest(f'unknown field "{full}".{did_you_mean(name, sorted(known))}', full)


_decoder = functools.cache(msgspec.json.Decoder)  # by type
