"""What a CUDA graph would need of the pieces, asserted on a CPU: the fake twin of capture and replay.

A captured graph runs with the addresses that it saw while it was captured, whatever it is called with later. So here a
piece's first call with a key is its capture: arguments and results are kept. Each later call must bring arguments at
the same addresses, runs on the captured ones and writes into the captured results. And once warm-up is over nothing may
be captured any more: a key that was not warmed up would stall a running engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor

from minivllm.compile.program import Piece


class Exact:
    """No capture: a forward has as many rows as the step has tokens."""

    warmup_sizes = (1,)  # what the first call loads lazily

    def size(self, num_tokens: int) -> int:
        return num_tokens

    def inputs(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return token_ids, positions

    def wrap(self, piece: Piece) -> Piece:
        return piece

    def open(self) -> None:
        """Nothing is captured."""

    def seal(self) -> None:
        """Nothing was captured."""


class Rehearsal:
    """Batches are padded to powers of two; each of them is captured."""

    def __init__(self, max_tokens: int):
        powers = takewhile(lambda size: size < 2 * max_tokens, (2**i for i in range(64)))
        self.warmup_sizes = tuple(powers)[::-1]  # largest first, as captures share one pool of memory
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._sealed = False
        self._size = 0

    def size(self, num_tokens: int) -> int:
        return next(size for size in reversed(self.warmup_sizes) if size >= num_tokens)

    def inputs(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The size's own buffers, filled."""
        self._size = len(token_ids)
        if self._size not in self._inputs:
            self._refuse_if_sealed()
            self._inputs[self._size] = token_ids.clone(), positions.clone()
        buffers = self._inputs[self._size]
        for buffer, given in zip(buffers, (token_ids, positions), strict=True):
            buffer.copy_(given)
        return buffers

    def wrap(self, piece: Piece) -> Piece:
        captured: dict[int, tuple[list[Any], Sequence[Tensor]]] = {}

        def replay(args: list[Any]) -> Sequence[Tensor]:
            if self._size not in captured:
                self._refuse_if_sealed()
                captured[self._size] = args, piece(args)
                return captured[self._size][1]
            wanted, results = captured[self._size]
            for i, (given, seen) in enumerate(zip(args, wanted, strict=True)):
                assert _same_memory(given, seen), f"argument {i} has moved since size {self._size} was captured"
            for result, new in zip(results, piece(wanted), strict=True):
                result.copy_(new)
            return results

        return replay

    def open(self) -> None:
        """Other pieces are about to be warmed up."""
        self._sealed = False

    def seal(self) -> None:
        """Warm-up is over."""
        self._sealed = True

    def _refuse_if_sealed(self) -> None:
        assert not self._sealed, f"size {self._size} was not warmed up (sizes: {self.warmup_sizes})"


def _same_memory(a: Any, b: Any) -> bool:
    if a is b:  # weights, also packed ones, which have no address
        return True
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
