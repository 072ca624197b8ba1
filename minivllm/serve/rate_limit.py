"""A token bucket for each client: `burst` requests at once, then `rate` a second.

A client is an API key, or where there are none an address (of IPv6 its /64, which is what one customer is given). A
bucket that nobody has taken from for burst / rate seconds is full, and so is one that nobody knows: the table may
forget it. It holds MAX_CLIENTS; beyond, it forgets whoever came longest ago.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

MAX_CLIENTS = 10_000
PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0}
ROUNDING = 1e-9  # a client that waited exactly as long as it was told may come in


class RateLimit(NamedTuple):
    rate: float  # requests a second
    burst: int  # requests at once


def parse(text: str, burst: int | None = None) -> RateLimit:
    """ "60/min" -> one a second, 60 at once (or `burst`). Raises ValueError, saying what is allowed."""
    number, slash, period = text.partition("/")
    if not (slash and period in PERIODS and number.isdecimal() and int(number) > 0):
        raise ValueError(f"a limit is a number, /, and one of {', '.join(PERIODS)}, such as 60/min; got {text}")
    if burst is not None and burst < 1:
        raise ValueError(f"a burst is 1 request at least, got {burst}")
    return RateLimit(int(number) / PERIODS[period], burst or int(number))


def client_of(address: str) -> str:
    if ":" not in address:
        return address
    import ipaddress  # `serve --help` reads this file too

    host = ipaddress.IPv6Address(address)
    return str(host.ipv4_mapped or ipaddress.IPv6Network((host, 64), strict=False))


class RateLimiter:
    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic, max_clients: int = MAX_CLIENTS):
        self.limit, self._clock, self._max_clients = limit, clock, max_clients
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (requests left, when)

    def take(self, client: str) -> float:
        """0 if the client may make a request, which then counts; else the seconds until it may."""
        rate, burst = self.limit
        now = self._clock()
        left, since = self._buckets.pop(client, (float(burst), now))
        left = min(float(burst), left + (now - since) * rate)
        allowed = left >= 1 - ROUNDING
        self._buckets[client] = (left - allowed, now)
        if len(self._buckets) > self._max_clients:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / rate
