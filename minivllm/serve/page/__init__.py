"""The page at /: a chat with the model, and the engine as it runs. Files of this package, as they are: no build step,
nothing from another host.

The browser may load and call what this server serves, and nothing else (POLICY); no script or style is written into the
HTML, and scripts may make no HTML out of text. A file is asked for again each time and answered with 304 while it is
the same, so that a new version of the server never meets an old page.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class File(NamedTuple):
    data: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> File:
        data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        return cls(data, {**HEADERS, "content-type": TYPES[path.suffix], "etag": etag})


def routes() -> list[Route]:
    files = {path.name: File.read(path) for path in FOLDER.iterdir() if path.suffix in TYPES}

    async def index(request: Request) -> Response:
        return answer(request, files["index.html"])

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return answer(request, found)

    return [Route("/", index, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]


def answer(request: Request, file: File) -> Response:
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.headers["etag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.data, headers=file.headers)
