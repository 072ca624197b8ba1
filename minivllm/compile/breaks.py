"""Where a capture stops: at attention, which runs by itself and reads the step's own metadata.

While a forward is being recorded, something else stands where its attention backend would. It is handed what attention
gets, and whoever records decides: to end a graph here and begin another behind it, or to attend on tensors that were
kept. So a model as it is written is cut at the same places as a traced one, without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from minivllm.compile.context import ForwardContext, Turn, attending_by, current

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionSpec


@dataclass(frozen=True, slots=True)
class Break:
    """One attention of a forward."""

    context: ForwardContext  # of the step that it was met in
    inputs: tuple[Tensor, ...]  # q, k, v; or qkv and positions: what a later step has other numbers of
    call: Callable[[ForwardContext, tuple[Tensor, ...]], None]  # attends these by a step's metadata
    kv: Tensor
    layer: AttentionSpec
    out: Tensor  # [T, heads, head_size]

    def attend(self) -> None:
        self.call(self.context, self.inputs)

    def attend_now(self) -> None:
        """With the metadata of the step that runs now."""
        self.call(current(), self.inputs)

    def attend_for(self, other: Break) -> None:
        """What `other`, the same attention of a later step, would do, on the tensors that this one has kept."""
        assert self.layer == other.layer and self.kv.data_ptr() == other.kv.data_ptr(), "another layer, or its cache"
        for kept, new in zip(self.inputs, other.inputs, strict=True):
            kept.copy_(new)
        self.call(other.context, self.inputs)
        other.out.copy_(self.out)


class _Breaking:
    """Stands where an attention backend would."""

    def __init__(self, context: ForwardContext, interrupt: Callable[[Break], None]):
        self._context = context
        self._interrupt = interrupt

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: Any, layer: Any, out: Tensor) -> None:
        def call(context: ForwardContext, inputs: tuple[Tensor, ...]) -> None:
            context.backend.forward(*inputs, kv, context.meta, layer, out)

        self._interrupt(Break(self._context, (q, k, v), call, kv, layer, out))

    def turn_and_attend(self, qkv: Tensor, turn: Turn, kv: Tensor, meta: Any, layer: Any, out: Tensor) -> None:
        def call(context: ForwardContext, inputs: tuple[Tensor, ...]) -> None:
            own, positions = inputs
            context.backend.turn_and_attend(own, turn._replace(positions=positions), kv, context.meta, layer, out)

        self._interrupt(Break(self._context, (qkv, turn.positions), call, kv, layer, out))


def broken_at_attention(
    forward: Callable[..., Tensor], args: Sequence[Tensor], interrupt: Callable[[Break], None]
) -> Tensor:
    """forward(*args), with each attention left to `interrupt`. Inside of a forward context."""
    with attending_by(_Breaking(current(), interrupt)):
        return forward(*args)
