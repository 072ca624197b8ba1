"""The data that crosses the seams of a step: StepPlan down, StepOutput up, Delta out.

A plan says everything that a worker needs and nothing else: which requests join (with their whole state), which blocks
they gain, how many tokens each computes now, who leaves. It is plain data, so it can be recorded, replayed, diffed,
sent to other processes and shown. A feature of the scheduler is a column here with one consumer in the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from minivllm.request import SamplingParams

# One reported position: (token id, log-probability, rank) of the token taken, then of the likeliest ones, best first.
# rank counts from 1 and is the number of tokens at least as likely.
PositionLogprobs = list[tuple[int, float, int]]

# What went wrong with one request's logits (StepOutput.errors).
NO_DISTRIBUTION = "the logits are NaN or all masked: no token can be chosen (check the weights and the dtype)"


@dataclass(slots=True)
class Join:
    """A request enters a worker: new, or resumed after a preemption (then token_ids hold earlier output too)."""

    req_id: str
    token_ids: list[int]  # all tokens known at this moment
    num_prompt_tokens: int
    params: SamplingParams
    adapter: str = ""


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
    new_blocks: dict[str, list[int]] = field(default_factory=dict)  # appended to each block table
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
    is_lost: bool = False  # a step before it failed while this one was in flight, so it has not run


@dataclass(slots=True)
class Landing:
    """A step that a device has been given, in place of its output: the tokens are on their way to the host. What land()
    raises is the device's own failure, behind which no step can run."""

    is_here: Callable[[], bool]
    land: Callable[[], StepOutput]  # waits for them; once, and steps in their order


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
