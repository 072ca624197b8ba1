"""An audit line for each administrative act, tried or done: who, what, and what came of it.

who       the key's name (serve/keys.py); "" where the server asks for no key
act       method and path
what      that the request was about, such as an adapter and its folder
result    done, refused or failed, and the status
id        of the request: its line in the log has the rest
"""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.requests import Request

from minivllm import logs
from minivllm.serve import request_log

LONGEST = 200  # characters of what a client has written

logger = logging.getLogger("minivllm.serve.audit")


def note(request: Request, **what: str) -> None:
    """What the request is about. Callers say it before they act."""
    request.state.audit = {name: value[:LONGEST] for name, value in what.items()}


def tell(request: Request, status: int) -> None:
    scope, state = request.scope, request.scope["state"]
    request_log.name(scope)
    result = "done" if status < 400 else "refused" if status < 500 else "failed"
    fields: dict[str, Any] = {
        "who": state.get("key", ""),
        "act": f"{scope['method']} {request_log.path_of(scope)}",
        "what": state.get("audit", {}),
        "result": result,
        "status": status,
        "client": (scope.get("client") or ("",))[0],
        "id": state["request_id"],
    }
    logs.event(logger, "audit", as_text(fields), fields)


def as_text(fields: dict[str, Any]) -> str:
    """As JSON, where a client has written it: no line can be forged."""
    parts = [f"{fields['act']} by {fields['who'] or 'unknown'}: {fields['result']} ({fields['status']})"]
    parts += [f"{name} {json.dumps(value)}" for name, value in fields["what"].items()]
    return ", ".join([*parts, f"client {fields['client']}", f"id {fields['id']}"])
