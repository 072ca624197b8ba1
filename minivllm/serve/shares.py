"""What clients may take together of what there is: an equal part each, if others want some.

Requests whose answers may be above LIGHT_BYTES share --max-answer-bytes while they live, so that several cannot take
together what one may not (price.py).
"""

from __future__ import annotations

from minivllm.request import MAX_LOGPROBS
from minivllm.serve.ledger import Holdings

ANSWER_BYTES = 128 * 2**20
LIGHT_BYTES = 2**20
TOKEN_BYTES = 8  # of JSON: a token's text, or its id
ENTRY_BYTES = 80  # one that is an object: token, logprob, bytes; or rank and decoded_token


class LongAnswers:
    """How many bytes the answers that are being made may take, by client: of those above LIGHT_BYTES."""

    def __init__(self, taken: Holdings) -> None:
        self.taken = taken

    def has_room(self, client: str, num_bytes: int, most: int) -> bool:
        """most: bytes that all may take together, a client's equal part aside."""
        if num_bytes <= LIGHT_BYTES or self.taken.total() + num_bytes <= most:
            return True
        return has_part(self.taken, client, num_bytes, most)

    def take(self, client: str, num_bytes: int) -> None:
        if num_bytes > LIGHT_BYTES:
            self.taken.add(client, num_bytes)

    def give_back(self, client: str, num_bytes: int) -> None:
        if num_bytes > LIGHT_BYTES:
            self.taken.add(client, -num_bytes)


def has_part(taken: Holdings, client: str, asked: int, most: int) -> bool:
    """Whether a client has and asks for no more than an equal part of what there is."""
    has = taken.of(client)
    return has + asked <= most // (taken.num_clients() + (not has))


def most_answer_bytes(asked: int | None, max_model_len: int) -> int:
    """asked: by an option. Else one output of the whole context may have all the log-probabilities that OpenAI's API
    admits, since clients that ask for them often name no max_tokens."""
    one = max_model_len * ((MAX_LOGPROBS + 2) * ENTRY_BYTES + TOKEN_BYTES)
    return asked or max(ANSWER_BYTES, one)
