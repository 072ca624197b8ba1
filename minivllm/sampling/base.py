"""The seams of sampling: a step that changes logits, and what a sampler returns.

Every request owns one permanent row of the worker's state from its first step to its last. Logits come in batch order;
`rows[i]` is the request row of logits row i, so a processor never needs to know what else is in the batch, and a row
may appear several times (speculative decoding scores several positions of one request).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from minivllm.plan import AsyncOutput, PositionLogprobs
from minivllm.request import SamplingParams


class LogitsProcessor(Protocol):
    """One step between the model's logits and the draw. Built as cls(vocab_size, max_rows).

    Called only while some row has joined with True, so that a feature nobody uses costs nothing.
    """

    keeps_argmax: bool  # True: greedy rows skip it, and it sees logits already divided by the temperature
    follows_output: bool  # False: what it does to a row is the same whatever the row's output, and nothing is observed

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """A request enters, token_ids[num_prompt_tokens:] being output it has already. True: it needs this step."""

    def leave(self, row: int) -> None:
        """Called only for rows whose join gave True."""

    def observe(self, row: int, token: int) -> None:
        """`token` is final and extends the row's output. Called only for rows whose join gave True.

        A step that was planned before the host knew that the request has ended may come behind its last token: `apply`
        must be possible after any token, though nobody wants what is drawn then.
        """

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        """logits [S, V] fp32, rows [S]: changed in place where a row needs it, and returned. Never waits for the
        device: what it needs there is brought by upload()."""


@dataclass(slots=True)
class Sampled:
    tokens: np.ndarray | Tensor  # [S] int64; a tensor where they are on the device, and `output` on its way
    logprobs: list[PositionLogprobs | None]  # of the model's own logits, before any processor (vLLM's raw_logprobs)
    # Logits rows without a usable distribution (NaN, +inf, or every token masked): their token is only a placeholder,
    # and the request should end with an error. The other rows are not touched by it.
    invalid: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    kept: np.ndarray | None = None  # after verification: which logits rows these are, ascending; None: all of them
    on_its_way: AsyncOutput[Sampled] | None = None  # brings the tokens to the host, and the three that follow them

    @property
    def output(self) -> AsyncOutput[Sampled]:
        """All of it on the host."""
        return AsyncOutput.ready(self) if self.on_its_way is None else self.on_its_way
