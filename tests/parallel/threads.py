"""Ranks as threads of one process: a `Group` over barriers, and what runs a function on each rank at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from queue import Queue
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from minivllm.parallel.group import ALONE, Ranks
from minivllm.parallel.placement import Placement

R = TypeVar("R")
SECONDS = 60  # after which a rank that waits for one that is not coming gives up


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int):
        self.size, self.brought = size, [None] * size
        self.barrier = Barrier(size, timeout=SECONDS)
        self.boxes = {(a, b): Queue() for a in range(size) for b in range(size)}


class ThreadGroup:
    """A Group and a Line. Sums are taken in the order of ranks, by each rank for itself: the same bits on all."""

    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def _together(self, x: object, use: Callable[[list], R]) -> R:
        """use(what each rank brought); nobody goes on, and changes what it brought, before all have used it."""
        self.meeting.brought[self.rank] = x
        self.meeting.barrier.wait()
        result = use(self.meeting.brought)
        self.meeting.barrier.wait()
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._together(x, lambda found: reduce(torch.add, found))

    def all_gather(self, x: Tensor, axis: int = 0) -> Tensor:
        assert x.is_contiguous()
        return self._together(x, lambda found: torch.cat(found, axis))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._together(x, lambda found: reduce(torch.add, found).chunk(self.size)[self.rank])

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert sum(sent) == len(x)
        parts = x.split(list(sent))
        found = self._together(parts, lambda found: [theirs[self.rank].clone() for theirs in found])
        assert [len(part) for part in found] == list(received)
        return torch.cat(found)

    def send(self, x: Tensor, to: int) -> None:
        self.meeting.boxes[self.rank, to].put(x.clone())

    def recv(self, out: Tensor, source: int) -> Tensor:
        return out.copy_(self.meeting.boxes[source, self.rank].get(timeout=SECONDS))


def all_ranks(placement: Placement) -> list[Ranks]:
    """Of each device of the placement, with the groups that it is in."""
    placements = [replace(placement, rank=rank) for rank in range(placement.size)]
    meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}

    def group(own: Placement, axis: str) -> ThreadGroup:
        peers = own.peers(axis)
        if len(peers) == 1:
            return ALONE
        meeting = meetings.setdefault((axis, peers), Meeting(len(peers)))
        return ThreadGroup(meeting, peers.index(own.rank))

    return [Ranks(own, **{axis: group(own, axis) for axis in ("tp", "cp", "dp", "pp")}) for own in placements]


def on_all(ranks: Sequence[Ranks], run: Callable[[Ranks], R]) -> list[R]:
    """[run(rank) for each rank], all at the same time."""

    def guarded(own: Ranks) -> R:
        try:
            with torch.inference_mode():
                return run(own)
        except BaseException:
            for group in (own.tp, own.cp, own.dp, own.pp):
                if isinstance(group, ThreadGroup):
                    group.meeting.barrier.abort()  # so that the others do not wait
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, own) for own in ranks]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:  # the first cause, and not who waited for it
        raise min(errors, key=lambda error: "Broken" in type(error).__name__)
    return [future.result() for future in futures]
