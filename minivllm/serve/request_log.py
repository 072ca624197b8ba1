"""Around everything: each HTTP request has an id, which its answer bears, and one line in the log once it has ended.

    id       X-Request-Id as the client gave it, if it is one (IS_ID); else the id of the answer's body, or a new one
    answer   of the body, which the engine's own messages name; where it is not the id
    method, path, status, seconds, client
    key      its name, or some digits that stand for it until the server ends (serve/keys.py), never the key
    tokens_in, tokens_out   of a request that reached the engine; out: as many as were sent

An answer names what of its request was taken and not acted on (bodies.py): x-minivllm-ignored.

Nothing of a prompt or an answer is logged, no header and no query string. The path stays percent-encoded, so that it
cannot forge a line.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm import logs
from minivllm.serve import bodies

IS_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
LONGEST_PATH = 200

logger = logging.getLogger("minivllm.serve.requests")


class RequestLog:
    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        begin, status = time.perf_counter(), 500

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                name(scope, next((value for key, value in headers if key.lower() == b"x-request-id"), b""))
                headers = [(key, value) for key, value in headers if key.lower() != b"x-request-id"]
                headers.append((b"x-request-id", state["request_id"].encode()))
                if ignored := state.get("ignored"):
                    headers.append((b"x-minivllm-ignored", bodies.header(ignored)))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            name(scope)  # an answer that never began: errors.on_error tells the client
            fields = described(scope, status, time.perf_counter() - begin)
            logs.event(logger, "http_request", as_text(fields), fields)


def name(scope: Scope, answer_id: bytes = b"") -> None:
    """Give the request its id, if it has none yet."""
    if "request_id" not in scope["state"]:
        given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
        chosen = given if IS_ID.fullmatch(given) else answer_id or b"req-" + uuid.uuid4().hex.encode()
        scope["state"]["request_id"] = chosen.decode()


def described(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    state = scope["state"]
    fields: dict[str, Any] = {
        "id": state["request_id"],
        "method": scope["method"],
        "path": path_of(scope),
        "status": status,
        "seconds": round(seconds, 4),
        "client": (scope.get("client") or ("",))[0],
    }
    if "key" in state:
        fields["key"] = state["key"]
    if (job := state.get("job")) is not None:
        if job.id != fields["id"]:
            fields["answer"] = job.id
        fields["tokens_in"] = sum(len(prompt.token_ids) for prompt in job.prompts)
        fields["tokens_out"] = job.usage.completion_tokens
    return fields


def path_of(scope: Scope) -> str:
    path = scope.get("raw_path") or scope["path"].encode()
    return path.partition(b"?")[0].decode("ascii", "backslashreplace")[:LONGEST_PATH]


def as_text(fields: dict[str, Any]) -> str:
    """ "POST /v1/completions 200 0.123 s, 5 tokens in, 16 out, id cmpl-.." """
    parts = ["{method} {path} {status} {seconds:.3f} s".format(**fields)]
    if "tokens_in" in fields:
        parts.append("{tokens_in} tokens in, {tokens_out} out".format(**fields))
    parts += [f"{name} {fields[name]}" for name in ("client", "key", "id", "answer") if fields.get(name)]
    return ", ".join(parts)
