"""The solution of chapter 0's exercise, and what its script reads the trace with."""

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
    """{request: its story}, in the order in which they first ran."""
    found: dict[str, Story] = {}
    for step in steps:
        for name, now, _ in step["sched"]:
            story = found.get(name) or Story(step["step"], 0, [], None)
            reason, _ = step.get("finished", {}).get(name, (None, None))
            found[name] = Story(
                first_step=story.first_step,
                num_computed=story.num_computed + now,
                output=story.output + step["tokens"].get(name, []),
                finish_reason=reason,
            )
    return found
