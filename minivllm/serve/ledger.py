"""What each client holds of the server, and what its buckets (rate_limit.py) have left.

Limits look here and nowhere else, so that they mean the same whether one server counts or several do together
(shared_ledger.py). Who looks and then takes does both in `alone`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

MAX_CLIENTS = 10_000  # whose buckets are kept


class Bucket(NamedTuple):
    left: float
    since: float  # seconds of time.monotonic, which processes of a machine share


class Holdings(Protocol):
    """How much of one thing each client holds. A client that holds nothing is not known."""

    def alone(self) -> AbstractContextManager[None]:
        """Nobody else changes anything of the ledger meanwhile. May be entered again inside."""
        ...

    def of(self, client: str) -> int: ...

    def total(self) -> int: ...

    def num_clients(self) -> int: ...

    def add(self, client: str, number: int) -> None:
        """number: below 0, what is given back."""
        ...


class Buckets(Protocol):
    """A bucket of each client. One that is not known is full; which ones are forgotten first is up to the table."""

    def alone(self) -> AbstractContextManager[None]:
        """As Holdings.alone."""
        ...

    def get(self, client: str) -> Bucket | None: ...

    def put(self, client: str, bucket: Bucket) -> None: ...


class Ledger(Protocol):
    body_bytes: Holdings  # by client: of bodies, from their first byte until they are answered (memory.py)

    @property
    def sequences(self) -> Holdings:
        """By client (keys.Keys.share_of): whose answers are not complete."""
        ...

    @property
    def answer_bytes(self) -> Holdings:
        """By client: of long answers, while they are made and while they are sent (shares.py, memory.py)."""
        ...

    @property
    def connections(self) -> Holdings:
        """By address (rate_limit.client_of)."""
        ...

    @property
    def requests(self) -> Buckets: ...

    @property
    def tokens(self) -> Buckets: ...


class OwnHoldings:
    """Of a server that is the only one."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self._total = 0

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def of(self, client: str) -> int:
        return self._of[client]

    def total(self) -> int:
        return self._total

    def num_clients(self) -> int:
        return len(self._of)

    def add(self, client: str, number: int) -> None:
        self._of[client] += number
        self._total += number
        if not self._of[client]:
            del self._of[client]


class OwnBuckets:
    """Of a server that is the only one. Beyond max_clients, whoever came longest ago is forgotten."""

    def __init__(self, max_clients: int = MAX_CLIENTS):
        self._of: OrderedDict[str, Bucket] = OrderedDict()
        self._max_clients = max_clients

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def get(self, client: str) -> Bucket | None:
        return self._of.get(client)

    def put(self, client: str, bucket: Bucket) -> None:
        self._of[client] = bucket
        self._of.move_to_end(client)
        if len(self._of) > self._max_clients:
            self._of.popitem(last=False)


class OwnLedger:
    """Of a server that is the only one: its event loop is alone as long as it awaits nothing."""

    def __init__(self) -> None:
        self.sequences, self.answer_bytes, self.connections = OwnHoldings(), OwnHoldings(), OwnHoldings()
        self.body_bytes: Holdings = OwnHoldings()
        self.requests, self.tokens = OwnBuckets(), OwnBuckets()
