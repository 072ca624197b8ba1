"""SimulatedWorker: answers the plans that a real worker would, in the time that a device would take, without a model.

Inputs are built by the engine's own builders, so a step's host work is the true one, and so is what a plan means: which
tokens are sampled from, which drafts are verified, who joins and leaves. What a token is, babble.py says; how long a
step takes, cost.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from minivllm.batch import BatchKey, InputBatch
from minivllm.facts import WorkerFacts
from minivllm.plan import NO_LOGITS, Join, PositionLogprobs, StepOutput, StepPlan
from minivllm.request import SamplingParams
from minivllm.runner.inputs import InputBuilder, Rows, leave_and_join
from minivllm.simulate.babble import Babble
from minivllm.simulate.clock import Clock
from minivllm.simulate.cost import Step, StepCost
from minivllm.spec_decode.throttle import Throttle

MEASURED_TOKENS = 128  # of the prefill that says what recomputing a token costs


class Tokens(Protocol):
    """What a model would say: Babble, or what another run said. A RowState."""

    def join(self, row: int, join: Join) -> None: ...
    def leave(self, row: int) -> None: ...
    def draw(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions [N] int64 of the tokens to be drawn -> [N] int64"""
        ...


class SimulatedWorker:
    def __init__(
        self,
        inputs: InputBuilder,
        max_rows: int,
        block_tokens: float,
        tokens: Tokens,
        answers: Answers,
        guesses: Guesses | None,
        cost: StepCost,
        clock: Clock,
        facts: WorkerFacts,
    ):
        """block_tokens: how many tokens' K and V of all layers a block is as large as. Of groups of layers each block
        has fewer layers and more tokens."""
        self.inputs = inputs
        self.rows = Rows(max_rows)
        self.block_tokens = block_tokens
        self.tokens = tokens
        self.answers = answers
        self.guesses = guesses
        self.cost = cost
        self.clock = clock
        self._known = facts
        self._tell: Callable[[], None] = lambda: None
        self._states = [part for part in (tokens, answers, guesses) if part is not None]

    def facts(self) -> WorkerFacts:
        return self._known

    def measure_costs(self) -> dict[str, float]:
        """What a preemption costs here: seconds_per_token to recompute, seconds_per_block to move one way."""
        prefill = Step(np.array([MEASURED_TOKENS]), np.array([0]), 1)
        return {
            "seconds_per_token": self.cost.step_seconds(prefill) / MEASURED_TOKENS,
            "seconds_per_block": self.cost.move_seconds(self.block_tokens, across=True),
        }

    def tell_forwards(self, tell: Callable[[], None]) -> None:
        """tell: called in each step that computes, once the device alone is at work."""
        self._tell = tell

    def execute(self, plan: StepPlan) -> StepOutput:
        """Returns when the device would have."""
        begin = self.clock()
        leave_and_join(plan, self.rows, self._states, self.inputs)
        seconds, out = moving_seconds(self.cost, plan, self.block_tokens), StepOutput()
        if plan.num_tokens:
            batch = self.inputs.build(plan, BatchKey(plan.total_tokens))
            seconds += self.cost.step_seconds(_step_of(batch))
            out = self._answer(plan, batch)
            self._tell()
        self.clock.wait_until(begin + seconds)
        return out

    def _answer(self, plan: StepPlan, batch: InputBatch) -> StepOutput:
        out = StepOutput(prompt_logprobs=self.answers.of_prompts(plan, batch))
        samples, requests = batch.sample_tokens, batch.sample_requests
        if not len(samples):
            return out
        rows = batch.rows[requests]
        positions = batch.positions_of(samples, requests) + 1  # of the token being drawn
        tokens = self.tokens.draw(rows, positions)
        kept = _kept(requests, tokens, batch.draft_tokens)
        tokens, requests, rows = tokens[kept], requests[kept], rows[kept]
        self.inputs.append(batch, requests, tokens)
        self.answers.write(out, [batch.req_ids[r] for r in requests.tolist()], rows.tolist(), tokens.tolist())
        if self.guesses is not None:
            out.drafts = self.guesses.propose(plan, batch, out.tokens, rows, positions[kept])
        return out


def moving_seconds(cost: StepCost, plan: StepPlan, block_tokens: float) -> float:
    """Of the blocks that a plan swaps and copies before its tokens are computed."""
    across = (len(plan.swap_out) + len(plan.swap_in)) * block_tokens
    within = len(plan.copies) * block_tokens
    if not across and not within:
        return 0.0
    return cost.move_seconds(across, across=True) + cost.move_seconds(within, across=False)


def _step_of(batch: InputBatch) -> Step:
    num_new = np.diff(batch.query_start).astype(np.int64)
    return Step(num_new, batch.seq_lens - num_new, len(batch.sample_tokens))


def _kept(requests: np.ndarray, tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Which samples become output: of each request those up to the first draft that was not what is drawn there.
    requests (ascending), tokens, drafts (-1: none) [S] int64 -> [N] int64"""
    if (drafts < 0).all():
        return np.arange(len(tokens))
    kept, refused = [], -1
    for i, (request, is_right) in enumerate(zip(requests.tolist(), (tokens == drafts).tolist(), strict=True)):
        if request != refused:
            kept.append(i)
            if not is_right:
                refused = request
    return np.array(kept, np.int64)


class Answers:
    """What a step says of each request: tokens, log-probabilities, or why it gets none. A RowState."""

    def __init__(self, babble: Babble):
        self._babble = babble
        self._asks: dict[int, SamplingParams] = {}  # by row, of those who want log-probabilities
        self._scores: dict[int, tuple[list[int], SamplingParams]] = {}  # of their prompts
        self._refused: dict[int, str] = {}

    def join(self, row: int, join: Join) -> None:
        params = join.params
        if params.num_logprobs is not None:
            self._asks[row] = params
        if params.prompt_logprobs is not None:
            self._scores[row] = join.token_ids[: join.num_prompt_tokens], params
        for name in ("structured", "allowed_token_ids", "logit_bias", "bad_words", "begin_suppress_tokens"):
            if getattr(params, name):
                self._refused[row] = f"{NO_LOGITS}, so nothing that {name} could change"

    def leave(self, row: int) -> None:
        for kept in (self._asks, self._scores, self._refused):
            kept.pop(row, None)

    def write(self, out: StepOutput, req_ids: list[str], rows: list[int], tokens: list[int]) -> None:
        for req_id, row, token in zip(req_ids, rows, tokens, strict=True):
            if row in self._refused:
                out.errors[req_id] = self._refused[row]
                continue
            out.tokens.setdefault(req_id, []).append(token)
            if (params := self._asks.get(row)) is not None:
                position = self._babble.logprobs(row, token, params, params.num_logprobs or 0)
                out.logprobs.setdefault(req_id, []).append(position)

    def of_prompts(self, plan: StepPlan, batch: InputBatch) -> dict[str, list[PositionLogprobs]]:
        found = {}
        for req_id, row in zip(batch.req_ids, batch.rows.tolist(), strict=True) if self._scores else ():
            if row in self._scores:
                prompt, params = self._scores[row]
                start, num_top = plan.start[req_id], params.prompt_logprobs or 0
                targets = prompt[start + 1 : start + plan.num_tokens[req_id] + 1]
                if targets:
                    plain = params.with_values(logprob_token_ids=None)
                    found[req_id] = [self._babble.logprobs(row, token, plain, num_top) for token in targets]
        return found


class Guesses:
    """Drafts that are right by a given chance, each. A RowState. Who would guess is not asked: it costs the device
    nothing, as looking a continuation up does."""

    def __init__(self, babble: Babble, k: int, acceptance: float, throttle: Throttle):
        """throttle: calibrated, if guesses are to be weighed."""
        self._babble = babble
        self._k = k
        self._acceptance = acceptance
        self._throttle = throttle

    def join(self, row: int, join: Join) -> None:
        self._throttle.reset(row)

    def leave(self, row: int) -> None: ...

    def propose(
        self, plan: StepPlan, batch: InputBatch, tokens: dict[str, list[int]], rows: np.ndarray, positions: np.ndarray
    ) -> dict[str, list[int]]:
        """rows, positions [N] int64: of all new tokens."""
        last = dict(zip(rows.tolist(), positions.tolist(), strict=True))  # row -> position of its newest token
        row_of = dict(zip(batch.req_ids, batch.rows.tolist(), strict=True))
        req_ids = list(tokens)
        for req_id in req_ids:
            if (drafts := plan.drafts.get(req_id)) is not None:
                self._throttle.learn(row_of[req_id], 0, len(drafts), len(tokens[req_id]) - 1)
        if not req_ids:
            return {}
        of = [row_of[req_id] for req_id in req_ids]
        counts = self._throttle.cut(of, [0] * len(of), [self._k] * len(of), len(of))
        ahead = np.array([last[row] for row in of])[:, None] + np.arange(1, self._k + 1)  # [R, k]
        drafts = self._babble.guess(np.repeat(of, self._k), ahead.ravel(), self._acceptance).reshape(ahead.shape)
        cut = zip(req_ids, drafts.tolist(), counts, strict=True)
        return {req_id: guess[:count] for req_id, guess, count in cut if count}
