"""NoPrefix: prefix caching switched off, as a null object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.request import Request


class NoPrefix:
    def __init__(self, **_: Any):  # takes the options of its siblings
        pass

    def keys(self, req: Request, num_blocks: int, block_size: int) -> Sequence[Any]:
        return ()

    def match(self, keys: Sequence[Any], first: int = 0) -> list[int]:
        return []

    def publish(self, keys: Sequence[Any], first: int, blocks: Sequence[int]) -> None:
        pass  # nothing is ever found, so there is nothing to know

    def drop(self, block: int) -> bool:
        return False

    def __contains__(self, block: int) -> bool:
        return False
