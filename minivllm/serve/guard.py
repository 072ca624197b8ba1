"""Around every endpoint: the API keys, limits on headers and on how often one asks, and a count of responses by status.

`scope["state"]` gets the name of the key that a request was let in with (`key`), the salt that keeps its blocks of the
prefix cache apart from those of other keys (`tenant`), whose share of the engine it takes (`client`), and whose the
responses are that it may find (`owner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.engine.metrics import Metrics
from minivllm.serve import errors, off_loop, strict
from minivllm.serve.browsers import Browsers
from minivllm.serve.connection import watched
from minivllm.serve.deadline import HEADER as TIMEOUT
from minivllm.serve.deadline import Deadlines
from minivllm.serve.keys import ADMITS, Keys
from minivllm.serve.ledger import Ledger
from minivllm.serve.limits import Limits
from minivllm.serve.memory import Memory
from minivllm.serve.rate_limit import name_of

WRONG_KEY = (
    'this server was started with --api-key: send it as the header "Authorization: Bearer <key>", or as x-api-key'
)


# Paths that need a key also to look at: which models there are, their templates, who is served. Health does not.
BEHIND_KEYS = ("/v1", "/v2", "/debug", "/api", "/props", "/slots", "/tokenizer_info", "/info")


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: Metrics,
        paths: Mapping[Callable, str],
        limits: Limits,
        deadlines: Deadlines,
        browsers: Browsers,
        ledger: Ledger,
        most_bodies: int,
    ):
        """paths: of each handler. most_bodies: bytes of all that are not answered yet."""
        self.ledger, self.most_bodies = ledger, most_bodies
        self.app, self.keys, self.metrics, self.paths = app, keys, metrics, paths
        self.limits, self.deadlines, self.browsers = limits, deadlines, browsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
                message = self._with_limits(scope, message)
            await send(message)

        off_loop.attending.set(lambda work: watched(work, receive, scope))
        refusal = self._refusal(scope)
        state = scope.setdefault("state", {})
        off_loop.serves.set(state.get("client", ""))
        state["memory"] = memory = Memory(self.ledger, state.get("client", ""), self.most_bodies)
        app = self.app if refusal is None else errors.response(refusal, scope["path"])
        try:
            await app(scope, receive, counted)
        except Exception:
            self._count(scope, 500)
            raise
        finally:
            memory.end()

    def _count(self, scope: Scope, status: int) -> None:
        path = self.paths.get(scope.get("endpoint"), "other")  # not the raw path: anyone could make up new labels
        self.metrics.on_response(scope["method"], path, status)

    def _refusal(self, scope: Scope) -> errors.ApiError | None:
        if not scope["http_version"].startswith("1."):  # h11 takes any digit
            return errors.unknown_version(scope["http_version"])
        # h11's own limit is on headers that come in pieces, whose end it has to wait for.
        if sum(len(name) + len(value) for name, value in scope["headers"]) > strict.MAX_HEADER_BYTES:
            what = f"the headers are larger than {strict.MAX_HEADER_BYTES} bytes"
            return errors.ApiError(431, what, "headers_too_large")
        names = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" in names and b"content-length" in names:  # a proxy may see another request than we do
            return errors.ambiguous_length()
        if (refusal := self.browsers.refusal(scope)) is not None:
            return refusal
        if (refusal := self._check_key(scope)) is not None:
            return refusal
        state = scope.setdefault("state", {})
        client = name_of(state.get("owner"), (scope.get("client") or ("",))[0])
        state["client"] = self.keys.share_of(client)
        if scope["method"] not in ("POST", "DELETE"):
            return None  # what makes no work is free; of those that do, an endpoint says so (endpoint.py)
        state["counts"] = True
        try:
            self.limits.count_request(state["client"])
            asked = next((value for name, value in scope["headers"] if name == TIMEOUT.encode()), None)
            state["deadline"] = self.deadlines.of(None if asked is None else asked.decode("latin-1"))
        except errors.ApiError as refusal:
            return refusal
        return None

    def _with_limits(self, scope: Scope, message: Message) -> Message:
        """With what is left to the client, if its request counts."""
        state = scope.get("state", {})
        told = self.limits.headers(state["client"]) if state.get("counts") else []
        return {**message, "headers": [*message.get("headers", ()), *told]} if told else message

    def _check_key(self, scope: Scope) -> errors.ApiError | None:
        """What makes the server work needs a key; looking at it does not, but for BEHIND_KEYS, and for what roles.py
        says of some."""
        if not self.keys or (scope["method"] in ("GET", "HEAD") and not scope["path"].startswith(BEHIND_KEYS)):
            return None
        try:
            check(scope, self.keys, "use")
        except errors.ApiError as refusal:
            return refusal
        return None


def check(scope: Scope, keys: Keys, role: str) -> None:
    """Whose request it is becomes known. Raises ApiError 401 without a key, 403 for one that is not of this role."""
    headers, state = dict(scope["headers"]), scope.setdefault("state", {})
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    key = keys.accept(given if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b""))
    if key is None:
        raise errors.ApiError(401, WRONG_KEY, "invalid_api_key")
    state |= {"key": keys.name(key), "tenant": keys.tenant(key), "owner": key.owner}
    if role not in ADMITS[key.role]:
        raise errors.other_role(role)
