"""What one client may have of the server: requests and tokens over time, and sequences at once.

Tokens are counted as OpenAI and Anthropic count them: a request's prompts and the longest answers that it may get are
taken from its client's bucket before it is let in, and what was not made goes back once it has ended. An answer without
max_tokens may go on to the end of the context; where that is more than a full bucket, it takes all of the bucket, and
what it made beyond is owed. Longer answers than that may not be asked for by name.

A client is what rate_limit.py calls one. Servers of one engine count together (ledger.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minivllm.errors import BadRequest
from minivllm.serve import errors
from minivllm.serve.rate_limit import RateLimiter

NUMBERS = ("limit", "remaining", "reset")  # x-ratelimit-limit-tokens: OpenAI's headers
HEADERS = [f"x-ratelimit-{number}-{what}" for what in ("requests", "tokens") for number in NUMBERS]


class Demand(NamedTuple):
    """What a request may take."""

    sequences: int
    least: int  # tokens of the prompts, and of the answers as long as they are named; one that is not has one
    most: int  # with the answers as long as they may become


def demand(prompts: Sequence[int], sequences: int, max_tokens: int | None, max_model_len: int) -> Demand:
    """prompts: their lengths. sequences: of each prompt."""
    least = most = sum(prompts)
    for length in prompts:
        room = max_model_len - length
        most += sequences * min(room, room if max_tokens is None else max_tokens)
        least += sequences * (1 if max_tokens is None or max_tokens >= room else max_tokens)
    return Demand(len(prompts) * sequences, least, most)


class Limits:
    """None: no limit."""

    def __init__(
        self, requests: RateLimiter | None = None, tokens: RateLimiter | None = None, sequences: int | None = None
    ):
        self.requests, self.tokens, self.sequences = requests, tokens, sequences

    def count_request(self, client: str) -> None:
        """Raises ApiError 429."""
        if self.requests is not None and (wait := self.requests.take(client)):
            raise errors.rate_limited(f"too many requests (--rate-limit {self.requests.limit})", wait)

    def take(self, client: str, asked: Demand, num_open: int) -> int:
        """The tokens that the request takes, until `settle`. num_open: sequences that the client has. Raises ApiError
        429, or BadRequest for what the client can never have."""
        self._check_sequences(asked.sequences, num_open)
        return 0 if self.tokens is None else self._take_tokens(self.tokens, client, asked)

    def settle(self, client: str, taken: int, made: int) -> None:
        """A request has ended, with so many tokens."""
        if self.tokens is not None:
            self.tokens.change(client, taken - made)

    def headers(self, client: str) -> list[tuple[bytes, bytes]]:
        return [
            (f"x-ratelimit-{number}-{what}".encode(), value.encode())
            for what, limiter in (("requests", self.requests), ("tokens", self.tokens))
            if limiter is not None
            for number, value in zip(NUMBERS, _told(limiter, client), strict=True)
        ]

    def _check_sequences(self, asked: int, num_open: int) -> None:
        most = self.sequences
        if most is None:
            return
        if asked > most:
            raise BadRequest(f"{asked} sequences in one request; a client may have {most} (--sequence-limit)")
        if num_open + asked > most:
            what = f"{num_open} of {most} sequences at once are taken, and this request has {asked} (--sequence-limit)"
            raise errors.rate_limited(what, errors.RETRY_SECONDS)

    def _take_tokens(self, bucket: RateLimiter, client: str, asked: Demand) -> int:
        limit = bucket.limit
        if asked.least > limit.burst:
            what = f"{asked.least:,} tokens of prompts and of answers as long as max_tokens allows"
            raise BadRequest(f"{what}; a client may have {limit.burst:,} at once (--token-limit {limit})")
        taken = min(asked.most, limit.burst)
        if wait := bucket.take(client, taken):
            what = f"this request may take {taken:,} tokens, and {_left(bucket, client):,} are left"
            raise errors.rate_limited(f"{what} (--token-limit {limit})", wait)
        return taken


def _told(limiter: RateLimiter, client: str) -> Iterator[str]:
    limit, left = limiter.limit, limiter.left(client)
    yield str(limit.burst)
    yield str(_left(limiter, client))
    yield duration((limit.burst - left) / limit.rate)


def _left(limiter: RateLimiter, client: str) -> int:
    return max(0, math.floor(limiter.left(client)))


def duration(seconds: float) -> str:
    """As Go writes it, and OpenAI's headers do: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:g}s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text
