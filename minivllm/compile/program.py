"""A model's forward as a list of calls: compiled pieces, and the opaque operations between them.

It is data, so that it can be kept beside the pieces and run without tracing again. Values live in numbered slots, used
again as soon as what they hold is dead, so that a long prompt's activations do not pile up over the layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from minivllm.compile.opaque import find


class Slot(NamedTuple):
    number: int


class Weight(NamedTuple):
    name: str


class Submodule(NamedTuple):
    name: str


class Call(NamedTuple):
    kind: str  # "piece" or "op"
    name: str  # the piece's hash, or the operation's name
    args: tuple[Any, ...]  # Slot, Weight, Submodule or a constant
    outs: tuple[int, ...]  # slots


class Program(NamedTuple):
    calls: tuple[Call, ...]
    num_slots: int  # the first ones hold the inputs
    output: int

    @property
    def pieces(self) -> list[str]:
        """In the order of their first call, each once."""
        return list(dict.fromkeys(call.name for call in self.calls if call.kind == "piece"))

    def to_json(self) -> str:
        calls = [[call.kind, call.name, [_encode(a) for a in call.args], list(call.outs)] for call in self.calls]
        return json.dumps({"calls": calls, "num_slots": self.num_slots, "output": self.output})

    @classmethod
    def from_json(cls, text: str) -> Program:
        tree = json.loads(text)
        calls = (Call(kind, name, tuple(map(_decode, args)), tuple(outs)) for kind, name, args, outs in tree["calls"])
        return cls(tuple(calls), tree["num_slots"], tree["output"])


def _encode(arg: Any) -> Any:
    if isinstance(arg, Slot):
        return {"slot": arg.number}
    if isinstance(arg, Submodule):
        return {"module": arg.name}
    return {"weight": arg.name} if isinstance(arg, Weight) else {"value": arg}


def _decode(arg: dict[str, Any]) -> Any:
    ((kind, value),) = arg.items()
    return {"slot": Slot, "weight": Weight, "module": Submodule, "value": lambda v: v}[kind](value)


Piece = Callable[[list[Tensor]], Any]  # tensors in, a sequence of tensors out


class Bound:
    """A program with its pieces and a model's weights: call it as the model. Not re-entrant: slots are its own."""

    def __init__(
        self,
        program: Program,
        pieces: Mapping[str, Piece],
        weights: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
    ):
        self._named = {Weight: weights, Submodule: modules}
        self._values: list[Any] = [None] * program.num_slots
        self._output = program.output
        self._calls = [self._bind(call, pieces) for call in program.calls]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        values = self._values
        values[0], values[1] = x, positions
        for run, args, outs in self._calls:
            for out, value in zip(outs, run([values[i] for i in args]), strict=True):
                values[out] = value
        return values[self._output]

    def _bind(self, call: Call, pieces: Mapping[str, Piece]) -> tuple[Piece, list[int], tuple[int, ...]]:
        """Weights, modules and constants get places behind the slots, filled for good."""
        args = []
        for arg in call.args:
            if isinstance(arg, Slot):
                args.append(arg.number)
            else:
                args.append(len(self._values))
                named = self._named.get(type(arg))
                self._values.append(arg if named is None else named[arg.name])
        run = pieces[call.name] if call.kind == "piece" else _as_piece(find(call.name), len(call.outs))
        return run, args, call.outs


def _as_piece(run: Callable[..., Any], num_outs: int) -> Piece:
    if num_outs == 0:
        return lambda args: run(*args) or ()
    return lambda args: (run(*args),)
