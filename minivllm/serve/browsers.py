"""Which pages of a browser may use the server. Without keys, that a page can reach it is all that it takes.

By what it calls the server (DNS rebinding): a page of evil.example whose name comes to mean 127.0.0.1 is of the same
origin as the server there, for all that its browser knows. But the Host header says evil.example. So a server on
loopback answers to names that nobody else can give it: localhost and what is below it (RFC 6761), IP addresses, --host
and each --allowed-host. Elsewhere, where a name in the DNS is what a server is for, --allowed-host does the same.
Ollama (CVE-2024-28224) and Jupyter check the same header. HTTP/1.0 has none, and no browser speaks it. Of gRPC there
is nothing to check: browsers speak HTTP/2 over TLS alone, where the certificate has to have the name.

By whose page asks: one of another site may send what a link or an image could, though it never reads the answer
(CORS). What is below /debug makes the engine work and holds places, so browsers' Sec-Fetch-Site (W3C, Fetch Metadata)
has to say that it is the server's own page, or nobody's; or else the page's origin is a --cors-origin. So it must for a
form (forms.py), which a page may send to anybody. Any other POST needs no such check: what it sends has to be called
JSON (connection.py), and to say so a page needs CORS's leave.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from starlette.types import Scope

from minivllm.serve.errors import ApiError

HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::\d*)?")  # an IPv6 address, or what else; and a port
FOREIGN = (b"cross-site", b"same-site")  # the latter: another port of this machine
OWN = "/debug"
LONGEST_NAME = 100  # of those that are quoted
MOST_KNOWN = 64  # hosts that need no second look


class Browsers:
    def __init__(self, names: Iterable[str] | None = None, origins: Collection[str] = ()):
        """names: that the server answers to, beside localhost and addresses, as hosts.py reads them; None: any.
        origins: as --cors-origin."""
        self._names = None if names is None else frozenset(names)
        self._origins = origins
        self._is_ours = lru_cache(MOST_KNOWN)(self._is_ours)

    def refusal(self, scope: Scope) -> ApiError | None:
        if self._names is not None and (host := _header(scope, b"host")) is not None and not self._is_ours(host):
            return unknown_host(host)
        if scope["path"].startswith(OWN) and _header(scope, b"sec-fetch-site") in FOREIGN and not self._named(scope):
            return foreign_page()
        if _is_form(scope) and _is_foreign(scope) and not self._named(scope):
            return foreign_form()
        return None

    def _is_ours(self, host: bytes) -> bool:
        if (found := HOST.fullmatch(host.decode("latin-1").lower())) is None:
            return False
        name = (found[1] or found[2]).removesuffix(".")
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        above = {f"*{name[i:]}" for i, letter in enumerate(name[:LONGEST_NAME]) if letter == "."}
        return is_address(name) or not above.isdisjoint(self._names)

    def _named(self, scope: Scope) -> bool:
        origin = _header(scope, b"origin")
        return origin is not None and ("*" in self._origins or origin.decode("latin-1") in self._origins)


def _is_form(scope: Scope) -> bool:
    return (_header(scope, b"content-type") or b"").strip().lower().startswith(b"multipart/")


def _is_foreign(scope: Scope) -> bool:
    """A browser that does not say where its page is from may still name its origin."""
    site = _header(scope, b"sec-fetch-site")
    return site in FOREIGN or (site is None and _header(scope, b"origin") is not None)


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def unknown_host(host: bytes) -> ApiError:
    name = host.decode("latin-1")[:LONGEST_NAME]
    advice = "if that is its name, start it with --allowed-host NAME; a proxy may also send localhost as the host"
    return ApiError(403, f'this server is not called "{name}": {advice}', code="host_not_allowed")


def foreign_page() -> ApiError:
    why = "a page of another site may not look at this; --cors-origin admits those of an origin"
    return ApiError(403, why, code="foreign_page")


def foreign_form() -> ApiError:
    why = "a page of another site may not send forms here; --cors-origin admits those of an origin"
    return ApiError(403, why, code="foreign_page")
