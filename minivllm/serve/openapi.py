"""The OpenAPI 3.1 document, made of the endpoint table and the protocol's Structs: it cannot disagree with the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import minivllm
from minivllm.serve.protocol import ErrorBody

if TYPE_CHECKING:
    from minivllm.serve.endpoint import Endpoint


def document(endpoints: Sequence[Endpoint], root_path: str = "") -> dict[str, Any]:
    """root_path: that a proxy serves the paths below."""
    types = {t for e in endpoints for t in (e.answers, e.takes, e.streams) if t is not None} | {ErrorBody}
    _, components = msgspec.json.schema_components(
        sorted(types, key=lambda t: t.__name__), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minivllm", "version": minivllm.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # a key is needed only if the server was started with one
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    content = {"application/json": _schema(endpoint.answers)} if endpoint.answers else {}
    if endpoint.streams:
        content[endpoint.stream_type] = _schema(endpoint.streams)
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__.strip("_"),
        "summary": endpoint.what,
        "responses": {
            "200": {"description": endpoint.what, "content": content},
            "default": {"description": "Any error", "content": {"application/json": _schema(ErrorBody)}},
        },
    }
    if endpoint.takes:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(endpoint.takes)}}
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


def _schema(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
