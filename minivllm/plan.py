"""The data that crosses the seams of a step: StepPlan down, StepOutput up, Delta out.

A plan says everything that a worker needs and nothing else: which requests join (with their whole state), which blocks
they gain, how many tokens each computes now, who leaves. It is plain data, so it can be recorded, replayed, diffed,
sent to other processes and shown. A feature of the scheduler is a column here with one consumer in the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from minivllm.request import Item, PoolingParams, SamplingParams

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
U = TypeVar("U")

# One reported position: (token id, log-probability, rank) of the token taken, then of the likeliest ones, best first.
# rank counts from 1 and is the number of tokens at least as likely.
PositionLogprobs = list[tuple[int, float, int]]

# What went wrong with one request (StepOutput.errors): with its logits, what its grammar says of them, or its step.
NO_MEMORY = "the step needed more memory than the machine has left"
NO_DISTRIBUTION = "the logits are NaN or all masked: no token can be chosen (check the weights and the dtype)"
NOT_FINITE = "the model computed a vector with numbers that are not finite (NaN or infinity)"
TOO_SLOW = "the grammar is too slow"  # and on goes the message
LEADS_NOWHERE = "the grammar leads nowhere: no token may follow, and the output is no whole text of it"
NO_LOGITS = "a simulated model has no logits"  # likewise


@dataclass(slots=True)
class Join:
    """A request enters a worker: new, or resumed after a preemption (then token_ids hold earlier output too)."""

    req_id: str
    token_ids: list[int]  # all tokens known at this moment
    num_prompt_tokens: int
    params: SamplingParams
    adapter: str = ""
    cache_salt: str = ""  # what a worker remembers of a request is of use within one salt only
    pooling: PoolingParams | None = None  # of a request whose prompt becomes a vector
    items: tuple[Item, ...] = ()  # where token_ids are placeholders


@dataclass(slots=True)
class StepStats:
    """The scheduler's state after planning, for metrics and the trace."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # never used or evictable at once: no live request names them
    num_cached_blocks: int = 0  # of the free ones, how many still hold a reusable prefix
    num_total_blocks: int = 0
    num_used_slots: int = 0  # KV slots of running requests that hold a token (after this step)
    num_preempted: int = 0  # requests preempted while making this plan
    prefix_queries: int = 0  # tokens looked up in the prefix cache while making this plan
    prefix_hits: int = 0  # of these, how many were found
    num_drafted: int = 0  # draft tokens in this plan
    num_accepted: int = 0  # of these, how many became output; known after the step


@dataclass(slots=True)
class StepPlan:
    """One step: {request_id: num_tokens} and its columns. The order of num_tokens IS the batch order."""

    step: int
    num_tokens: dict[str, int] = field(default_factory=dict)  # to compute in this step
    start: dict[str, int] = field(default_factory=dict)  # tokens computed before this step, same keys
    joins: list[Join] = field(default_factory=list)  # requests that the workers see for the first time, or again
    # Appended to each block table; of a model with several KV groups one of each group in turn (kv_groups.py).
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    leaves: list[str] = field(default_factory=list)  # finished, aborted or preempted since the last plan; applied first
    stats: StepStats = field(default_factory=StepStats)  # for metrics and the trace
    # Block moves, done before the forward in this order, each column as one batch. A block that is copied from may be
    # free by now, so the copies come before what comes in:
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (shared block, its private copy): copy-on-write
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    notes: list[str] = field(default_factory=list)  # why the scheduler did something, for whoever reads the trace
    # Proposed tokens that follow a request's known ones in this step; num_tokens counts them. The runner says which of
    # them the model itself would have given (StepOutput.tokens); the others leave no trace.
    drafts: dict[str, list[int]] = field(default_factory=dict)
    # Items of those who join (Join.items), by digest: made ready before the joins, each once however many name it, of
    # what the workers were given when its request arrived (engine/contents.py); and forgotten, because the last who
    # named it has left.
    encode: list[str] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    # Requests that were planned behind a step which may bring them drafts: how many they may have in this one. Their
    # start and num_tokens are the most that these can be; where the step runs they become exact (spec_decode/ahead.py).
    ahead: dict[str, int] = field(default_factory=dict)
    # So many steps before this one were in flight when it was planned. If one of them fails, this one must not run:
    # it would find tables and rows without what that one should have written there.
    num_in_flight: int = 0

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens.values())


@dataclass(slots=True)
class StepOutput:
    """What a step produced. A request absent from `tokens` has not reached its last known token yet; one whose plan had
    k drafts has 1 to k + 1 tokens: the drafts that were accepted, and one more."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)  # one a token, of requests that asked
    # Log-probabilities of prompt tokens start+1 .. as far as this chunk gives them.
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # requests that this step ended, each with what went wrong
    drafts: dict[str, list[int]] = field(default_factory=dict)  # guesses of what follows `tokens`, for the next plan
    is_failed: bool = False  # the step raised: `errors` names all that were in it, whoever of them it was
    pooled: dict[str, np.ndarray] = field(default_factory=dict)  # of requests that end with a vector: [width] float32
    is_lost: bool = False  # a step before it failed while this one was in flight, so it has not run


class AsyncOutput(Generic[T]):
    """What was asked of a device or another thread, perhaps on its way still (vLLM V1's async output). Only one thread
    may ask for it. What result() raises of a step is the device's own failure, behind which no step can run."""

    __slots__ = ("_is_ready", "_make", "_value")

    def __init__(self, is_ready: Callable[[], bool], make: Callable[[], T]):
        """make: waits for it. Called once, unless it raises."""
        self._is_ready = is_ready
        self._make: Callable[[], T] | None = make

    @classmethod
    def ready(cls, value: T) -> AsyncOutput[T]:
        """What is here already."""
        output = cls.__new__(cls)
        output._make, output._value = None, value
        return output

    @classmethod
    def failed(cls, error: Exception) -> AsyncOutput[T]:
        def fail() -> T:
            raise error

        return cls(lambda: True, fail)

    def is_ready(self) -> bool:
        return self._make is None or self._is_ready()

    def result(self) -> T:
        """Waits for it. As often as one likes: it is the same each time."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value

    def then(self, change: Callable[[T], U]) -> AsyncOutput[U]:
        """What `change` makes of it."""
        return AsyncOutput(self.is_ready, lambda: change(self.result()))


class Delta(msgspec.Struct, array_like=True, gc=False):
    """What one step changed for one request, as its client sees it."""

    req_id: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the stop token or string; None for end of sequence
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    arrival_time: float = 0.0  # its request's: an id may be used again while this is still on its way
    pooled: bytes | None = None  # the vector that it ends with: float32, as the machine has them
