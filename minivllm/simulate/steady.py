"""By arithmetic, with nothing simulated: the least that a request waits on a set-up, and about how many it serves.

The least is what a step of one request takes that has the device to itself. The rate is that of a batch in balance: B
requests decode, and for each that ends a prompt is computed, so B / output prompts in each step, which takes t:

    rate = B / (output x t(B decodes, B x prompt / output tokens of prompts))

with the largest B that the KV pool, the scheduler's limits and the objectives on a step's time leave. Nothing waits in
it and no two requests differ, so it is where a search begins, not its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minivllm.errors import TraceError
from minivllm.simulate.cost import Step
from minivllm.simulate.traces import UnboundedCache
from minivllm.simulate.workload import TraceRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a workload's requests, in tokens."""

    shortest: int  # of a prompt, without what others may have computed
    fewest: int  # of an output
    prompt: float  # the mean, without what a prefix cache without bounds has seen before
    output: float  # the mean
    context: float  # of a request that decodes: tokens in the cache, in the mean over all steps

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> Lengths:
        """Raises TraceError for none."""
        if not (found := list(requests)):
            raise TraceError("a trace of no requests")
        prompts, outputs = (
            np.array([getattr(r, f"num_{name}") for r in found], float) for name in ("prompt", "output")
        )
        cache = UnboundedCache()
        num_shared = sum(cache.find_and_add(r) for r in found)
        return cls(
            shortest=1 if any(r.pieces or r.group is not None for r in found) else int(prompts.min()),
            fewest=int(outputs.min()),
            prompt=max(1.0, float(prompts.mean()) - num_shared / len(found)),
            output=float(outputs.mean()),
            context=float((outputs * (prompts + outputs / 2)).sum() / outputs.sum()),
        )


class Balance(NamedTuple):
    rate: float  # requests a second
    seconds: float  # of a request


@dataclass(frozen=True, slots=True)
class Place:
    """An engine core on its device."""

    step_seconds: Callable[[Step], float]
    max_requests: int  # in a step
    max_tokens: int  # in a step
    kv_tokens: int  # that its pool holds

    def prompt_seconds(self, num_tokens: float) -> float:
        """Of so many tokens of a prompt, in as many steps as they take."""
        seconds, whole = 0.0, max(1, round(num_tokens))
        for start in range(0, whole, self.max_tokens):
            new = min(self.max_tokens, whole - start)
            seconds += self.step_seconds(Step(np.array([new]), np.array([start]), int(start + new == whole)))
        return seconds

    def token_seconds(self, context: float = 0) -> float:
        """Of a step in which one request decodes behind so many tokens."""
        return self.step_seconds(_step(1, context, 0))

    def balance(self, lengths: Lengths, most_seconds: float = math.inf, computes_prompts: bool = True) -> Balance:
        """most_seconds: of a step; inf: any."""
        new = lengths.prompt if computes_prompts else 0.0
        per_request = 1 + new / lengths.output  # tokens a step for each that runs
        room = min(self.max_requests, self.kv_tokens / (lengths.context + 1), self.max_tokens / per_request)
        low, high = 0, max(1, int(room))

        def seconds(count: int) -> float:
            return self.step_seconds(_step(count, lengths.context, count * new / lengths.output))

        if seconds(high) <= most_seconds:
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if seconds(middle) <= most_seconds else (low, middle)
        low = max(1, low)
        answer = lengths.output * seconds(low)
        return Balance(low / answer, answer)


def _step(num_decodes: int, context: float, num_prompt: float) -> Step:
    """num_decodes requests behind so many tokens each, and a prompt's first tokens."""
    num_new, start = [1] * num_decodes, [round(context)] * num_decodes
    if num_prompt:
        num_new.append(max(2, round(num_prompt)))  # one token would be a decode
        start.append(0)
    return Step(np.array(num_new, np.int64), np.array(start, np.int64), len(num_new))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Of a set-up. Seconds are those of a request that has it to itself, and so the least of any."""

    weight_bytes: int  # on each of its devices at most
    kv_tokens: int  # of all pools in which requests decode
    first_token: float  # seconds, of the shortest prompt
    token: float  # seconds
    answer: float  # seconds, of the shortest prompt's fewest tokens
    rate: float  # requests a second, about
    seconds: float  # of a request at that rate, about

    def why_none(self, objectives: Iterable[Any]) -> str | None:
        """Which of these no request can meet, however few come; None: all can be met."""
        least = {"ttft": self.first_token, "tpot": self.token, "latency": self.answer}
        for objective in objectives:
            if (seconds := least.get(objective.metric, 0.0)) > objective.seconds:
                return f"{objective.metric} is at least {seconds:.3g} s"
        return None


def of_sides(
    sides: Mapping[str, Sequence[Place]],
    weight_bytes: int,
    lengths: Lengths,
    most_step_seconds: float = math.inf,
    most_tokens: int = 1,
) -> Arithmetic:
    """sides: "" (places that do all), or "prefill" and "decode". most_tokens: that a request may get of a step."""
    decoding = sides.get("decode", sides.get("", ()))
    first = sides.get("prefill", decoding)
    apart = first is not decoding
    balances = [place.balance(lengths, most_step_seconds, computes_prompts=not apart) for place in decoding]
    rate, seconds = sum(each.rate for each in balances), max(each.seconds for each in balances)
    if apart:
        prompt = [place.prompt_seconds(lengths.prompt) for place in first]
        rate, seconds = min(rate, sum(1 / each for each in prompt)), seconds + max(prompt)
    first_token, token = first[0].prompt_seconds(lengths.shortest), decoding[0].token_seconds() / most_tokens
    return Arithmetic(
        weight_bytes,
        sum(place.kv_tokens for place in decoding),
        first_token,
        token,
        first_token + (lengths.fewest - 1) * token,
        rate,
        seconds,
    )
