"""Chapter 0: read a trace. Fill in `stories`, then run the tests:

python -m minivllm chapter 0 --exercise
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Story(NamedTuple):
    """What a trace tells of one request."""

    first_step: int  # the first that it ran in
    num_computed: int  # tokens that went through the model for it
    output: list[int]  # its new tokens, in order
    finish_reason: str | None  # None: it had not ended when the trace did


def stories(steps: Iterable[dict[str, Any]]) -> dict[str, Story]:
    """{request: its story}, in the order in which they first ran. A step is a dictionary:

    {"step": 7, "sched": [["ada", 1, 14], ["ben", 60, 0]], "tokens": {"ada": [905], "ben": [28]},
     "finished": {"ada": ["length", None]}}

    step      its number; idle steps, in which nothing ran, have an empty sched
    sched     a row for each request that ran: [request, tokens computed now, and before]
    tokens    {request: new tokens}; a request whose prompt is not computed whole yet has none
    finished  {request: [reason, what stopped it]}; not there in steps in which no request ended
    """
    raise NotImplementedError("yours to write")
