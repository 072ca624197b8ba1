"""Around every endpoint: the API keys, limits on headers and on how often one asks, and a count of responses by status.

`scope["state"]` gets the name of the key that a request was let in with (`key`), and the salt that keeps its blocks of
the prefix cache apart from those of other keys (`tenant`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.engine.metrics import Metrics
from minivllm.serve import errors
from minivllm.serve.access import MAX_HEADER_BYTES
from minivllm.serve.rate_limit import RateLimiter, client_of

WRONG_KEY = (
    'this server was started with --api-key: send it as the header "Authorization: Bearer <key>", or as x-api-key'
)


class Keys:
    """API keys, of which only hashes are kept. Comparing takes the same time whichever key is right or how nearly: all
    hashes are compared, each in constant time (`hmac.compare_digest`), and those of keys of any length are equally
    long."""

    def __init__(self, keys: Iterable[str] = (), isolated: bool = True, secret: bytes | None = None):
        """isolated: each of several keys has its own part of the prefix cache. secret: what servers that share an
        engine share; None: of this object alone."""
        self._hashes = list(dict.fromkeys(_hash(key.encode()) for key in keys))
        self._isolated = isolated and len(self._hashes) > 1
        self._secret = os.urandom(16) if secret is None else secret

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def accept(self, key: bytes) -> bool:
        given = _hash(key)
        return sum(hmac.compare_digest(given, known) for known in self._hashes) > 0

    @staticmethod
    def name(key: bytes) -> str:
        """What a key is called in the log: enough to tell keys apart, too little to find one by."""
        return _hash(key).hex()[:8]

    def tenant(self, key: bytes) -> str:
        """The beginning of the cache_salt of every request with this key; "": all keys share one cache. Of one length,
        so that no cache_salt of a request can make one key's salt into another's; of this process alone, so that a
        recorded trace says nothing about a key."""
        return hmac.new(self._secret, _hash(key), hashlib.sha256).hexdigest()[:32] if self._isolated else ""


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: Metrics,
        paths: Mapping[Callable, str],
        limiter: RateLimiter | None = None,
    ):
        """paths: of each handler. limiter: None, and everybody may ask as often as they like."""
        self.app, self.keys, self.metrics, self.paths, self.limiter = app, keys, metrics, paths, limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        refusal = self._refusal(scope)
        app = self.app if refusal is None else errors.response(refusal, scope["path"])
        try:
            await app(scope, receive, counted)
        except Exception:
            self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        path = self.paths.get(scope.get("endpoint"), "other")  # not the raw path: anyone could make up new labels
        self.metrics.on_response(scope["method"], path, status)

    def _refusal(self, scope: Scope) -> errors.ApiError | None:
        # h11's own limit is on headers that come in pieces, whose end it has to wait for.
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return errors.ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes", "headers_too_large")
        names = {name for name, _ in scope["headers"]}
        if b"transfer-encoding" in names and b"content-length" in names:  # a proxy may see another request than we do
            return errors.ambiguous_length()
        if not self._allowed(scope):
            return errors.ApiError(401, WRONG_KEY, "invalid_api_key")
        wait = self._wait(scope)
        return errors.rate_limited(wait) if wait else None

    def _wait(self, scope: Scope) -> float:
        """Seconds until the client may have what it asks for. What makes no work is free."""
        if self.limiter is None or scope["method"] != "POST":
            return 0.0
        key = scope.get("state", {}).get("key")
        return self.limiter.take(f"key {key}" if key else client_of((scope.get("client") or ("",))[0]))

    def _allowed(self, scope: Scope) -> bool:
        """All of /v1 and /debug needs a key, and beside it whatever makes the server work; looking at it does not."""
        if not self.keys or (scope["method"] in ("GET", "HEAD") and not scope["path"].startswith(("/v1", "/debug"))):
            return True
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not self.keys.accept(key):
            return False
        scope.setdefault("state", {}).update(key=self.keys.name(key), tenant=self.keys.tenant(key))
        return True
