"""What a request holds of the server's memory, from the first byte of its body to the last one of its answer.

bodies    as many bytes as have come, until the request is answered; all together MOST_BODIES, or a client's equal part
          of them, whatever others hold: what comes beyond is a 429
answers   the bytes that are there to be sent, as long as their client has not read them. They count among the long
          answers (shares.py), so that no more are made while many are unread

What is smaller than LIGHT is not counted: a connection's own buffers are as large.
"""

from __future__ import annotations

from minivllm.serve import errors
from minivllm.serve.ledger import Holdings, Ledger
from minivllm.serve.shares import LongAnswers, has_part

MOST_BODIES = 256 * 2**20
LIGHT = 64 * 2**10
STEP = 256 * 2**10  # bytes of a body that are counted at once


class Memory:
    """Of one request."""

    def __init__(self, ledger: Ledger, client: str, most_bodies: int = MOST_BODIES):
        self._bodies, self._answers = ledger.body_bytes, LongAnswers(ledger.answer_bytes)
        self._client, self._most = client, most_bodies
        self._body = self._answer = 0

    def body(self, num_bytes: int) -> None:
        """So much of it has come. Raises ApiError 429 if there is no room for it."""
        if num_bytes <= max(LIGHT, self._body):
            return
        more = -(-num_bytes // STEP) * STEP - self._body
        with self._bodies.alone():
            if not has_room(self._bodies, self._client, more, self._most):
                raise errors.bodies_full()
            self._bodies.add(self._client, more)
        self._body += more

    def answer(self, num_bytes: int, most: int | None = None) -> None:
        """So much is there to be sent. most: raises ApiError 429 where that and what others hold is more; None: it was
        admitted before it was made."""
        if most is not None and not self._answers.has_room(self._client, num_bytes, most):
            raise errors.answers_full()
        self._answers.take(self._client, num_bytes)
        self._answer = num_bytes

    def end(self) -> None:
        if self._body:
            self._bodies.add(self._client, -self._body)
        self._answers.give_back(self._client, self._answer)
        self._body = self._answer = 0


def has_room(taken: Holdings, client: str, more: int, most: int) -> bool:
    return taken.total() + more <= most or has_part(taken, client, more, most)
