"""Where a capture stops: at what reads the step's own data. That is attention, what an adapter adds to a layer, and
torch's way to compute experts, which asks the host how many tokens each has.

While a forward is being recorded, `context.aside` hands over what it would have done, and whoever records decides: to
end a graph here and begin another behind it, or to do it on tensors that were kept. So a model as it is written is cut
at the same places as a traced one, without a compiler (a breakable capture, as SGLang's piecewise graphs have it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.compile.context import interrupted_by


class Break(NamedTuple):
    """One call that a capture must not hold."""

    run: Callable[..., None]  # changes some of the tensors; finds its step's data in the context, or by itself
    tensors: Sequence[Tensor]
    constants: dict[str, Any]

    def do(self) -> None:
        """With the data of the step that runs now."""
        self.run(*self.tensors, **self.constants)

    def do_for(self, other: Break) -> None:
        """What `other`, the same call of a later step, would do, on the tensors that this one has kept."""
        assert (self.run, self.constants) == (other.run, other.constants), "the calls came in another order"
        for kept, new in zip(self.tensors, other.tensors, strict=True):
            kept.copy_(new)
        self.do()
        for kept, new in zip(self.tensors, other.tensors, strict=True):
            new.copy_(kept)


def broken_off(forward: Callable[..., Tensor], args: Sequence[Tensor], interrupt: Callable[[Break], None]) -> Tensor:
    """forward(*args), with everything that is done aside left to `interrupt`. Inside of a forward context."""

    def hand_over(run: Callable[..., None], *tensors: Tensor, **constants: Any) -> None:
        interrupt(Break(run, tensors, constants))

    with interrupted_by(hand_over):
        return forward(*args)
