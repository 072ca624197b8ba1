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

from minivllm.compile.context import ForwardContext, attending_by, current

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionSpec


@dataclass(frozen=True, slots=True)
class Break:
    """One attention of a forward."""

    context: ForwardContext  # of the step that it was met in
    q: Tensor  # [T, heads, head_size]
    k: Tensor  # [T, kv_heads, head_size]
    v: Tensor  # like k
    kv: Tensor
    layer: AttentionSpec
    out: Tensor  # like q

    def attend(self) -> None:
        self._attend(self.context)

    def attend_now(self) -> None:
        """With the metadata of the step that runs now."""
        context = current()
        self._attend(context)

    def attend_for(self, other: Break) -> None:
        """What `other`, the same attention of a later step, would do, on the tensors that this one has kept."""
        assert self.layer == other.layer and self.kv.data_ptr() == other.kv.data_ptr(), "another layer, or its cache"
        for kept, new in ((self.q, other.q), (self.k, other.k), (self.v, other.v)):
            kept.copy_(new)
        self._attend(other.context)
        other.out.copy_(self.out)

    def _attend(self, context: ForwardContext) -> None:
        context.backend.forward(self.q, self.k, self.v, self.kv, context.meta, self.layer, self.out)


class _Breaking:
    """Stands where an attention backend would."""

    def __init__(self, context: ForwardContext, interrupt: Callable[[Break], None]):
        self._context = context
        self._interrupt = interrupt

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: Any, layer: Any, out: Tensor) -> None:
        self._interrupt(Break(self._context, q, k, v, kv, layer, out))


def broken_at_attention(
    forward: Callable[..., Tensor], args: Sequence[Tensor], interrupt: Callable[[Break], None]
) -> Tensor:
    """forward(*args), with each attention left to `interrupt`. Inside of a forward context."""
    with attending_by(_Breaking(current(), interrupt)):
        return forward(*args)
