"""A bucket for each client: `burst` at once, then `rate` a second, of requests or of tokens (serve/limits.py).

A client is an API key, or where there are none an address (of IPv6 its /64, which is what one customer is given). A
bucket that nobody has taken from for burst / rate seconds is full, and so is one that nobody knows: the table of them
(ledger.py) may forget it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from minivllm.serve.ledger import Bucket, Buckets, OwnBuckets

PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0}
ROUNDING = 1e-9  # a client that waited exactly as long as it was told may come in


class RateLimit(NamedTuple):
    rate: float  # requests, or tokens, a second
    burst: int  # of them at once

    def __str__(self) -> str:
        return f"{60 * self.rate:g}/min"


def parse(text: str, burst: int | None = None) -> RateLimit:
    """ "60/min" -> one a second, 60 at once (or `burst`). Raises ValueError, saying what is allowed."""
    number, slash, period = text.partition("/")
    if not (slash and period in PERIODS and number.isdecimal() and int(number) > 0):
        raise ValueError(f"a limit is a number, /, and one of {', '.join(PERIODS)}, such as 60/min; got {text}")
    if burst is not None and burst < 1:
        raise ValueError(f"a burst is 1 request at least, got {burst}")
    return RateLimit(int(number) / PERIODS[period], burst or int(number))


def name_of(key: str | None, address: str) -> str:
    """Of a client: whose requests are counted together. key: its name."""
    return f"key {key}" if key else client_of(address)


def client_of(address: str) -> str:
    if ":" not in address:
        return address
    import ipaddress  # `serve --help` reads this file too

    try:
        host = ipaddress.IPv6Address(address)
    except ValueError:  # a proxy's header may say anything
        return address
    return str(host.ipv4_mapped or ipaddress.IPv6Network((host, 64), strict=False))


class RateLimiter:
    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic, buckets: Buckets | None = None):
        """buckets: None: of this limiter alone."""
        self.limit, self._clock, self._buckets = limit, clock, buckets or OwnBuckets()

    def take(self, client: str, amount: int = 1) -> float:
        """0 if the client may have so many, which are then taken; else the seconds until it may. More than `burst` are
        never to be had."""
        with self._buckets.alone():
            left = self.left(client)
            allowed = left >= amount - ROUNDING
            self._keep(client, left - amount * allowed)
        return 0.0 if allowed else (amount - left) / self.limit.rate

    def change(self, client: str, amount: float) -> None:
        """Give so many back; or have the client owe them, if they are below 0."""
        with self._buckets.alone():
            self._keep(client, min(float(self.limit.burst), self.left(client) + amount))

    def left(self, client: str) -> float:
        rate, burst = self.limit
        now = self._clock()
        left, since = self._buckets.get(client) or (float(burst), now)
        return min(float(burst), left + (now - since) * rate)

    def _keep(self, client: str, left: float) -> None:
        self._buckets.put(client, Bucket(left, self._clock()))
