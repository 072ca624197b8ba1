"""`serve --trusted-proxy`: whose X-Forwarded-For and X-Forwarded-Proto are believed. Nobody's, unless named.

A proxy adds to the right of X-Forwarded-For whom it was asked by; what stands to the left of that, anybody may have
written. So the client is the rightmost address that is no trusted proxy's (as in nginx's real_ip_recursive, and uvicorn
with its own option, which believes loopback by default). An address is read as the proxies of the field write it: bare,
with a port, in brackets, with a zone. What is none ends the search: the client is then who was found last, never a text
that somebody chose.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

UNIX = "unix"
MOST_HOPS = 32  # that are looked at
SCHEMES = (b"http", b"https")


class TrustedProxies:
    def __init__(self, given: Sequence[str] = ()):
        """given: addresses, networks, and UNIX for whoever connects to a socket in the file system. Raises
        ValueError."""
        self._networks = [ipaddress.ip_network(text) for text in given if text != UNIX]
        self._unix = UNIX in given

    def __bool__(self) -> bool:
        return self._unix or bool(self._networks)

    def trusts(self, address: str) -> bool:
        """address: "" of a socket in the file system."""
        if not address:
            return self._unix
        parsed = address_of(address)
        return any(parsed in network for network in self._networks)

    def client(self, peer: str, forwarded: Iterable[str]) -> str:
        """Who asked the proxies for what `peer` sends. forwarded: the values of X-Forwarded-For, in their order."""
        hops = ",".join(forwarded).rsplit(",", MOST_HOPS)[-MOST_HOPS:]
        while hops and self.trusts(peer):
            if (before := address_of(hops.pop())) is None:
                break
            peer = str(before)
        return peer


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """What a proxy has written as an address; None: it is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


class Forwarded:
    """Around everything else: the scope's client and scheme are those that the proxies tell of."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies):
        self.app, self.proxies = app, proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.proxies.trusts(peer := (scope.get("client") or ("",))[0]):
            forwarded = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
            client = self.proxies.client(peer, forwarded)
            scope = {**scope, "client": (client, 0) if client else None, "scheme": _scheme(scope)}
        await self.app(scope, receive, send)


def _scheme(scope: Scope) -> str:
    """That of the proxy's own client: the last value."""
    told = [value for name, value in scope["headers"] if name == b"x-forwarded-proto"]
    last = told[-1].rpartition(b",")[2].strip().lower() if told else b""
    return last.decode() if last in SCHEMES else scope["scheme"]
