"""What devices say to each other, as two Protocols, and the null object of a device that is alone.

A group is some ranks in a fixed order. Every rank of it makes the same calls in the same order, with tensors of equal
shape and dtype; who calls alone waits for ever. The calls are those of MPI and NCCL (torch.distributed's too), so that
an implementation is a line each; nothing here starts a process or opens a connection.

Layers get their groups by constructor (`Ranks`). On one device they get none: the layers that talk are other classes
than those that do not (layers/sharded.py), so a single device makes no call at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minivllm.parallel.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor


class Group(Protocol):
    """What all of its ranks do together."""

    rank: int  # this one's place in the group
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each. It may be written to x."""
        ...

    def all_gather(self, x: Tensor, axis: int = 0) -> Tensor:
        """The ranks' x one behind the other along an axis, in the order of ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over the ranks, of which each gets its own of equal parts of the rows."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """x: rows for each rank in turn, sent[i] of them for rank i. -> those for this one, received[i] from rank i."""
        ...


class Line(Protocol):
    """Ranks one behind the other, as the stages of a pipeline are."""

    rank: int
    size: int

    def send(self, x: Tensor, to: int) -> None:
        """Returns when x may be changed again."""
        ...

    def recv(self, out: Tensor, source: int) -> Tensor:
        """-> out, filled with what the rank `source` sent next."""
        ...


class Alone:
    """A group of one, and a line of one: nothing is sent, so nothing is computed or copied."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, axis: int = 0) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("there is no other rank")

    def recv(self, out: Tensor, source: int) -> Tensor:
        raise AssertionError("there is no other rank")


ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this device stands, and whom it talks to along each axis of the placement (`Placement.peers`)."""

    placement: Placement = Placement()
    tp: Group = ALONE
    cp: Group = ALONE
    dp: Group = ALONE
    pp: Line = ALONE

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "dp", "pp"):
            group = getattr(self, axis)
            found, asked = (group.rank, group.size), (self._own(axis), getattr(self.placement, axis))
            assert found == asked, f"{axis}: the group's rank and size are {found}, the placement's {asked}"

    def _own(self, axis: str) -> int:
        return getattr(self.placement, f"{axis}_rank")


ONE_DEVICE = Ranks()
