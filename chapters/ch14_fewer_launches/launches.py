"""What a forward asks for, counted: in Python, at the door of torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chapters.ch14_fewer_launches.stage import Forward, Stage, compiled, eager, in_pieces, in_whole
from minivllm.compile.breaks import Break
from minivllm.compile.graphs import Exact, Interrupt, RecordedCalls, Recording
from minivllm.compile.program import Piece
from minivllm.runner.forward_fused import FusedModel


class Launches(TorchDispatchMode):
    """Counts what Python asks for while it is entered. What torch makes of one call inside is not seen.

    calls      of torch's operations, and of whatever `one` has wrapped
    launches   those among them that compute or copy: something for a processor to do. The others make a view of a
               tensor or set memory aside
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.launches = 0
        self._inside = False  # of what counts as one

    def __torch_dispatch__(self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if not self._inside:
            self.calls += 1
            self.launches += has_work(operation)
        return operation(*args, **(kwargs or {}))

    def add(self, num: int) -> None:
        if not self._inside:
            self.calls += num
            self.launches += num

    def one(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """run, which counts as one launch whatever it does inside."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.add(1)
            return self.uncounted(run, *args, **kwargs)

        return counted

    def uncounted(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        was, self._inside = self._inside, True
        try:
            return run(*args, **kwargs)
        finally:
            self._inside = was

    def of(self, run: Callable[[], Any]) -> dict[str, int]:
        """What a step asks for when it is done again: what a first one records or loads is not in it."""
        run()
        self.calls = self.launches = 0
        with self:
            run()
        return {"calls": self.calls, "launches": self.launches}


def has_work(operation: Any) -> bool:
    schema = operation._schema
    is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    return not is_view and not schema.name.startswith(("aten::empty", "aten::new_empty"))


class Pieces(Exact):
    """Notes which pieces a program calls, and counts a call of each."""

    def __init__(self, launches: Launches):
        self.launches = launches
        self.seen: list[Piece] = []

    def wrap(self, piece: Piece) -> Piece:
        self.seen.append(piece)
        return self.launches.one(piece)


class CountedGraphs(RecordedCalls):
    """Recorded calls that count, at each replay, what CudaGraphs would ask a GPU for: a graph before each attention
    that runs by itself, the attention, and a graph behind the last one."""

    def __init__(self, launches: Launches):
        self.launches = launches

    def record_around(self, run: Callable[[Interrupt], Sequence[Tensor]]) -> Recording:
        breaks: list[Break] = []

        def watched(interrupt: Interrupt) -> Sequence[Tensor]:
            breaks.clear()
            return run(lambda broken: (breaks.append(broken), interrupt(broken)))

        recording = super().record_around(watched)

        def replay() -> None:
            self.launches.uncounted(recording.replay)
            self.launches.add(2 * len(breaks) + 1)

        return Recording(recording.results, replay)


# ---------------------------------------------------------------------------------------- what a step asks for


def counted_stage(model: nn.Module, launches: Launches, attention: str = "auto", most: int = 1) -> Stage:
    stage = Stage(model, most, attention)
    stage.attention.forward = launches.one(stage.attention.forward)
    return stage


def counted_fused(model: nn.Module, launches: Launches) -> Forward:
    fused = FusedModel(model)
    for name in ("embed", "rotate", "gate", "add_norm", "decode"):
        setattr(fused.kernels, name, launches.one(getattr(fused.kernels, name)))
    return fused.run


def asked_for(dense: nn.Module, packed: nn.Module, cache: Path) -> tuple[dict[str, dict[str, int]], Pieces]:
    """{way: what a step of one request asks for}, and the pieces of the compiled one."""
    launches = Launches()
    pieces, graphs = Pieces(launches), CountedGraphs(launches)
    stage, whole = counted_stage(dense, launches), counted_stage(dense, launches, "reference")
    forwards = {
        "eager": (stage, eager(dense)),
        "fused": (stage, counted_fused(dense, launches)),
        "compiled": (stage, compiled(dense, cache, pieces)),
        "piecewise": (counted_stage(dense, launches), in_pieces(dense, 1, graphs)),
        "full": (whole, in_whole(whole, 1, graphs)),
        "one_call": (counted_stage(packed, launches), counted_fused(packed, launches)),
    }
    return {name: launches.of(at.step(forward, 1)) for name, (at, forward) in forwards.items()}, pieces


def eager_launches(model: nn.Module, num: int) -> int:
    launches = Launches()
    return launches.of(counted_stage(model, launches, most=num).step(eager(model), num))["launches"]
