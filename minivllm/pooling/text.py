"""What an engine that pools is asked to run. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """A text's tokens, or, for a cross-encoder, those of a pair in one sequence."""

    token_ids: Sequence[int]
    second: int | None = None  # where the second text of a pair begins; None: there is none
