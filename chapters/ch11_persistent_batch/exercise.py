"""Chapter 11: close the holes in a batch. Fill in `remove`, then run the tests:

python -m minivllm chapter 11 --exercise
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Batch:
    """The requests that run, in the first rows of arrays that stay from step to step."""

    def __init__(self, max_rows: int, max_tokens: int, max_blocks: int):
        self.req_ids: list[str] = []  # whose row 0 is, row 1, ...
        self.row_of: dict[str, int] = {}
        self.tokens = np.zeros((max_rows, max_tokens), np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.blocks = np.zeros((max_rows, max_blocks), np.int32)  # behind a request's own blocks: 0
        self.num_blocks = np.zeros(max_rows, np.int32)

    def add(self, req_id: str, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """A request joins: its row is the first behind all others."""
        row = self.row_of[req_id] = len(self.req_ids)
        self.req_ids.append(req_id)
        self.tokens[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.blocks[row] = 0
        self.blocks[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)

    def extend(self, req_id: str, token: int, blocks: Sequence[int] = ()) -> None:
        """What a step changes: one more token, and sometimes a block."""
        row = self.row_of[req_id]
        self.tokens[row, self.num_tokens[row]] = token
        self.num_tokens[row] += 1
        first = self.num_blocks[row]
        self.blocks[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] += len(blocks)

    def remove(self, req_ids: Sequence[str]) -> list[tuple[int, int]]:
        """They leave, and the n requests that stay have rows 0 to n - 1 again.

        A row that is below n already stays where it is. The others move, each into the row of one
        who left. -> the moves, (from, to): whoever keeps something by row does the same with it.
        """
        raise NotImplementedError("yours to write")
