"""A body that is a form with a file (multipart/form-data, RFC 7578): what OpenAI's endpoints for sound take.

Such a body needs no leave of a browser to be sent from a page of any site (CORS), so browsers.py looks at where it
comes from.
"""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from minivllm.errors import BadRequest
from minivllm.serve import errors
from minivllm.serve.bodies import from_texts
from minivllm.serve.connection import media_type, read_all
from minivllm.serve.off_loop import by_size, client_of
from minivllm.serve.protocol import RequestBody

T = TypeVar("T", bound=RequestBody)

FORM = "multipart/form-data"
MOST_PARTS = 256
Parts = list[tuple[str, str | bytes]]  # names and values: bytes, of a file


async def taken_form(request: Request, kind: type[T]) -> T:
    """The request's body; a field of bytes is a file. Raises ApiError or BadRequest."""
    if (sent := media_type(request.headers)) != FORM:
        told = f"the body must be {FORM}, not {sent[:100] or 'untold'}; curl sends it with -F"
        raise errors.ApiError(415, told, code="unsupported_media_type")
    data, header = await read_all(request), request.headers["content-type"]
    work = lambda: from_texts(request, parse(data, header), kind)  # noqa: E731
    return await by_size(len(data), work, client_of(request.scope["state"]))


def parse(data: bytes, header: str) -> Parts:
    """header: the content type, with the boundary. Raises BadRequest."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import Field, File, FormParser, parse_options_header

    found: Parts = []

    def add(name: bytes | None, value: str | bytes) -> None:
        if len(found) >= MOST_PARTS:
            raise BadRequest(f"the form has more than {MOST_PARTS} parts")
        found.append((_text(name), value))

    def on_field(field: Field) -> None:
        add(field.field_name, _text(field.value))

    def on_file(file: File) -> None:
        file.file_object.seek(0)
        add(file.field_name, file.file_object.read())

    boundary = parse_options_header(header)[1].get(b"boundary")
    if not boundary:
        raise BadRequest(f"the content type {FORM} names no boundary between its parts")
    try:
        parser = FormParser(FORM, on_field, on_file, boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": len(data) + 1})
        parser.write(data)
        parser.finalize()
    except (FormParserError, UnicodeDecodeError, ValueError) as e:
        raise BadRequest(f"the body is no form: {e}") from None
    return found


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8")
