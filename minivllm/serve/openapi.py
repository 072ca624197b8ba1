"""The OpenAPI 3.1 document, made of the endpoint table and the protocol's Structs: it cannot disagree with the code."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

import msgspec

import minivllm
from minivllm.serve.errors import shape_of

if TYPE_CHECKING:
    from minivllm.serve.endpoint import Endpoint


@functools.lru_cache(8)
def encoded(endpoints: tuple[Endpoint, ...], root_path: str) -> bytes:
    """The document as JSON. Making it takes 0.2 CPU seconds, so a server does it once, before it takes requests."""
    return msgspec.json.encode(document(endpoints, root_path))


def document(endpoints: Sequence[Endpoint], root_path: str = "") -> dict[str, Any]:
    """root_path: that a proxy serves the paths below."""
    schemas = Schemas(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minivllm", "version": minivllm.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a key is needed only if the server was started with one
    }


class Schemas:
    """Of all types that the endpoints take and give."""

    def __init__(self, endpoints: Sequence[Endpoint]):
        asked = [kind for e in endpoints for kind in (e.answers, e.takes, e.streams, shape_of(e.path).of)]
        kinds = sorted({own for kind in asked if kind is not None for own in _alternatives(kind)}, key=str)
        found, self.components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        self._of = dict(zip(kinds, found, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        parts = [self._of[own] for own in _alternatives(kind)]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def of_events(self, kind: Any) -> dict[str, Any]:
        """Of each server-sent event. Streams in OpenAI's form end with one that is no JSON."""
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": self.of(kind)}
        return {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
            "required": ["data"],
        }


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _operation(endpoint: Endpoint, path: str, schemas: Schemas) -> dict[str, Any]:
    content = {"application/json": {"schema": schemas.of(endpoint.answers)}} if endpoint.answers else {}
    if endpoint.streams:
        made = schemas.of_events if endpoint.stream_type == "text/event-stream" else schemas.of
        content[endpoint.stream_type] = {"schema": made(endpoint.streams)}
    error = {"schema": schemas.of(shape_of(endpoint.path).of)}
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__.strip("_"),
        "summary": endpoint.what,
        "responses": {
            "200": {"description": endpoint.what, "content": content},
            "default": {"description": "Any error", "content": {"application/json": error}},
        },
    }
    if endpoint.takes:
        taken = {endpoint.takes_type: {"schema": schemas.of(endpoint.takes)}}
        operation["requestBody"] = {"required": True, "content": taken}
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.asks:
        operation.setdefault("parameters", []).extend(_query(endpoint.asks))
    return operation


def _query(kind: type) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components([kind])
    fields = components[kind.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]
