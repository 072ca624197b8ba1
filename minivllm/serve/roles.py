"""What only some keys may do: around an endpoint's handler, so that no way to write its path leads past it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.serve import audit, errors
from minivllm.serve.guard import check

Handler = Callable[[Request], Awaitable[ASGIApp]]


def reserved(role: str, handler: Handler) -> Handler:
    """The handler, for callers with a key of this role, if it is neither `anyone`, who needs none, nor
    `use`: all have shown one of that (guard.py)."""
    return handler if role in ("anyone", "use") else {"metrics": for_metrics, "admin": for_admins}[role](handler)


def for_metrics(handler: Handler) -> Handler:
    """Everybody may look, until there is a key for it."""

    @wraps(handler)
    async def checked(request: Request) -> ASGIApp:
        if (keys := request.app.state.keys).has_role("metrics"):
            check(request.scope, keys, "metrics")
        return await handler(request)

    return checked


def for_admins(handler: Handler) -> Handler:
    """Each try has a line in the audit log."""

    @wraps(handler)
    async def checked(request: Request) -> ASGIApp:
        try:
            if keys := request.app.state.keys:
                check(request.scope, keys, "admin")
            response = await handler(request)
        except Exception as error:
            audit.tell(request, errors.as_api_error(error).status)
            raise
        audit.tell(request, response.status_code)
        return response

    return checked
