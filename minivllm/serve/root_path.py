"""`serve --root-path /PREFIX`: behind a proxy that serves this server below a path of its own.

Such proxies cut the prefix off or pass it on; both work (vLLM's option, which is FastAPI's, does the same). It is gone
before anything else looks at a path, so that what needs a key needs it with the prefix, too.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

IS_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


class RootPath:
    def __init__(self, app: ASGIApp, prefix: str):
        """prefix: IS_PREFIX."""
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self.prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self.prefix) or "/"}
        await self.app(scope, receive, send)
