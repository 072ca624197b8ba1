"""The gauges and totals of an engine whose replicas each tell their own."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.engine.core import EngineStats


class SummedStats(EngineStats):
    """The sum of `parts`, one a replica. Whoever holds this object reads on."""

    __slots__ = ("_parts",)

    def __init__(self, num_replicas: int):
        super().__init__()
        self._parts = tuple(EngineStats() for _ in range(num_replicas))

    @property
    def parts(self) -> Sequence[EngineStats]:
        return self._parts

    def take_part(self, replica: int, stats: EngineStats) -> None:
        self._parts[replica].take(stats)
        self._sum()

    def on_stall(self, replica: int) -> None:
        """As the core has counted it: its next report brings the same."""
        self._parts[replica].num_stalled += 1
        self._sum()

    def on_part_end(self, replica: int) -> None:
        self._parts[replica].on_end()
        self._sum()

    def _sum(self) -> None:
        for name in EngineStats.__slots__:
            setattr(self, name, sum(getattr(part, name) for part in self._parts))
