"""Seeded workloads: lists of arrivals, made of token ids alone. No torch, no tokenizer, no data set.

Nothing here downloads ShareGPT or Alpaca. As the vLLM paper (Kwon et al., SOSP 2023, section 6.1) uses them, they are
pairs of lengths: Figure 11 gives means of 161.31 tokens in and 337.99 out for ShareGPT, 19.31 and 58.45 for Alpaca, and
arrivals are drawn from a Poisson process, since the data sets have no time stamps. Lengths here are log-normal,
clipped, with exactly these means after clipping; how wide they spread (`sigma`) is our choice, wider for ShareGPT as
the histograms are. Prompts are random ids, so that nothing is shared unless a workload says so.

`scale` multiplies every length, to bring a shape down to a small model or a short run. `rate` is requests a second,
math.inf for all at once. Equal arguments give equal arrivals.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minivllm.simulate.lengths import LogNormal

DEFAULT_VOCAB, SMALLEST_VOCAB = 49_152, 256  # of the default model; of every dummy shape at least
FIRST_ID = 10  # ids below are often special
SPARE_SLOTS = 16  # of a pool that shall hold all, for each sequence: what the end of its last block wastes


class Arrival(NamedTuple):
    time_s: float
    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0
    kind: str = "chat"  # what the request is for, for metrics of one kind alone
    n: int = 1  # outputs of the one prompt; above 1 they are sampled, else greedy
    beam_width: int = 0  # above 0: beam search, and n is 1

    @property
    def num_sequences(self) -> int:
        return self.beam_width or self.n

    @property
    def num_tokens(self) -> int:
        """Prompt and all outputs."""
        return len(self.prompt_token_ids) + self.num_sequences * self.max_tokens

    @property
    def num_unshared_tokens(self) -> int:
        """If each sequence keeps the prompt for itself: what schedulers ask for before they take a group."""
        return self.num_sequences * (len(self.prompt_token_ids) + self.max_tokens)


@dataclass(frozen=True, slots=True)
class Lengths(LogNormal):
    def draw(self, generator: np.random.Generator, num: int, scale: float) -> list[int]:
        lengths = generator.lognormal(self.mu(), self.sigma, num).clip(self.low, self.high)
        return [max(1, round(float(length) * scale)) for length in lengths]


SHAREGPT_IN, SHAREGPT_OUT = Lengths(161.31, 1.1, 4, 1024), Lengths(337.99, 0.9, 4, 1024)
SERVED_IN, SERVED_OUT = Lengths(202, 1.1, 4, 1024), Lengths(179, 0.9, 4, 1024)
ALPACA_IN, ALPACA_OUT = Lengths(19.31, 0.6, 4, 256), Lengths(58.45, 0.8, 2, 512)


@dataclass(frozen=True, slots=True)
class Draw:
    """What the generators share: the source of chance, and the arguments that all of them take."""

    generator: np.random.Generator
    num_requests: int
    rate: float
    scale: float
    vocab: int

    def ids(self, length: int) -> list[int]:
        return self.generator.integers(FIRST_ID, self.vocab, length).tolist()

    def length(self, tokens: int) -> int:
        return max(1, round(tokens * self.scale))

    def times(self) -> list[float]:
        """Poisson arrivals: the first at 0, gaps exponential with mean 1 / rate."""
        gaps = self.generator.exponential(1 / self.rate, self.num_requests)
        return [0.0, *np.cumsum(gaps[1:]).tolist()]

    def pairs(
        self, inputs: Lengths, outputs: Lengths, *, n: int = 1, beam_width: int = 0, before: list[int] | None = None
    ) -> list[Arrival]:
        lengths_in = inputs.draw(self.generator, self.num_requests, self.scale)
        lengths_out = outputs.draw(self.generator, self.num_requests, self.scale)
        return [
            Arrival(time, (before or []) + self.ids(num_in), num_out, n=n, beam_width=beam_width)
            for time, num_in, num_out in zip(self.times(), lengths_in, lengths_out, strict=True)
        ]


def fixed(draw: Draw, num_in: int = 128, num_out: int = 128) -> list[Arrival]:
    """Equal lengths: the best case for a static batch."""
    num_in, num_out = draw.length(num_in), draw.length(num_out)
    return [Arrival(time, draw.ids(num_in), num_out) for time in draw.times()]


def sharegpt(draw: Draw) -> list[Arrival]:
    """Chats: 161 tokens in, 338 out on average, wide (vLLM paper, Figure 11a)."""
    return draw.pairs(SHAREGPT_IN, SHAREGPT_OUT)


def sharegpt_served(draw: Draw) -> list[Arrival]:
    """Chats as vLLM's benchmark of servers takes them: 202 tokens in, 179 out on average (its post on 0.6.0, 2024)."""
    return draw.pairs(SERVED_IN, SERVED_OUT)


def alpaca(draw: Draw) -> list[Arrival]:
    """Instructions: 19 tokens in, 58 out on average (vLLM paper, Figure 11b)."""
    return draw.pairs(ALPACA_IN, ALPACA_OUT)


def shared_prefix(draw: Draw, prefix: int = 341) -> list[Arrival]:
    """Alpaca's lengths after a common beginning: 341 tokens, the five-shot prefix of the vLLM paper's section 6.4."""
    return draw.pairs(ALPACA_IN, ALPACA_OUT, before=draw.ids(draw.length(prefix)))


def many_prefixes(draw: Draw, groups: int = 16, prefix: int = 341) -> list[Arrival]:
    """Alpaca's lengths, each after one of 16 common beginnings of 341 tokens.

    Each beginning is as likely as the others, whatever came before: with replicas, where a request goes decides what it
    finds in the prefix cache.
    """
    beginnings = [draw.ids(draw.length(prefix)) for _ in range(groups)]
    chosen = draw.generator.integers(groups, size=draw.num_requests).tolist()
    after = draw.pairs(ALPACA_IN, ALPACA_OUT)
    return [
        arrival._replace(prompt_token_ids=beginnings[group] + arrival.prompt_token_ids)
        for group, arrival in zip(chosen, after, strict=True)
    ]


def long_prompt_among_chats(draw: Draw, num_chats: int = 8, num_long: int = 2000) -> list[Arrival]:
    """Eight chats decode when a 2,000-token prompt joins: the stall that Sarathi (Agrawal et al. 2023) was made for.

    The chats have 32 tokens in and 64 out, so that one long gap in each is more than 1 % of all gaps; the long prompt
    comes 1 / rate seconds later and wants 16 tokens. What chunked prefill does for it depends on the token budget: the
    usual 2,048 take the prompt in one piece. Lengths scale; num_requests beyond nine repeats the scene, 8 / rate
    seconds apart.
    """
    arrivals = []
    for scene in range(max(1, draw.num_requests // (num_chats + 1))):
        begin = 8 * scene / draw.rate
        arrivals += [Arrival(begin, draw.ids(draw.length(32)), draw.length(64)) for _ in range(num_chats)]
        arrivals.append(Arrival(begin + 1 / draw.rate, draw.ids(draw.length(num_long)), draw.length(16), kind="long"))
    return arrivals


def parallel_sampling(draw: Draw, n: int = 4) -> list[Arrival]:
    """Alpaca's lengths with n sampled outputs a prompt (vLLM paper, section 6.3: n of 2, 4 and 6)."""
    return draw.pairs(ALPACA_IN, ALPACA_OUT, n=n)


def beam(draw: Draw, width: int = 4) -> list[Arrival]:
    """Alpaca's lengths with beam search of that width (vLLM paper, section 6.3: widths of 2, 4 and 6)."""
    return draw.pairs(ALPACA_IN, ALPACA_OUT, beam_width=width)


def memory_pressure(draw: Draw) -> list[Arrival]:
    """ShareGPT's lengths into a pool that holds a fifth of them: preemption is certain once outputs grow."""
    return draw.pairs(SHAREGPT_IN, SHAREGPT_OUT)


def mixed(draw: Draw, prefix: int = 341, num_long: int = 1500) -> list[Arrival]:
    """Something for every switch from V0 to V1, more of it than the pool holds at once.

    Of each twelve requests eight are chats behind one common beginning (a prefix cache), four of them with answers as
    long as ShareGPT's; two have nothing in common with others; one is a prompt of 1,500 tokens that meets chats which
    decode (one budget, chunks); and one is a beam search of width 4 (forks). The pool holds a fifth of all, so that
    requests wait and some are preempted (admission, preemption).
    """
    beginning = draw.ids(draw.length(prefix))
    kinds = ["chat", "answer", "chat", "alone", "answer", "chat", "beam", "answer", "chat", "long", "alone", "answer"]
    arrivals = []
    for i, (time, num_in, short, long) in enumerate(
        zip(
            draw.times(),
            ALPACA_IN.draw(draw.generator, draw.num_requests, draw.scale),
            ALPACA_OUT.draw(draw.generator, draw.num_requests, draw.scale),
            SHAREGPT_OUT.draw(draw.generator, draw.num_requests, draw.scale),
            strict=True,
        )
    ):
        kind = kinds[i % len(kinds)]
        num_in = draw.length(num_long) if kind == "long" else num_in
        own, num_out = draw.ids(num_in), long if kind == "answer" else short
        before = beginning if kind in ("chat", "answer") else []
        arrivals.append(Arrival(time, before + own, num_out, kind=kind, beam_width=4 if kind == "beam" else 0))
    return arrivals


@dataclass(frozen=True, slots=True)
class Workload:
    generate: Callable[..., list[Arrival]]
    num_requests: int  # defaults, for a small model on a few cores
    rate: float
    longest: int  # tokens of a request at most, at scale 1
    pool_fraction: float = 1.0  # KV slots, as a fraction of all tokens that the workload brings

    @property
    def what(self) -> str:
        return inspect.getdoc(self.generate).splitlines()[0]


WORKLOADS: dict[str, Workload] = {
    "fixed": Workload(fixed, 16, math.inf, 256),
    "sharegpt": Workload(sharegpt, 16, 2.0, 2048),
    "sharegpt_served": Workload(sharegpt_served, 500, math.inf, 2048),
    "alpaca": Workload(alpaca, 32, 4.0, 768),
    "shared_prefix": Workload(shared_prefix, 32, 4.0, 1109),
    "many_prefixes": Workload(many_prefixes, 64, 4.0, 1109),
    "long_prompt_among_chats": Workload(long_prompt_among_chats, 9, 1.0, 2016),
    "parallel_sampling": Workload(parallel_sampling, 8, 2.0, 768),
    "beam": Workload(beam, 8, 2.0, 768),
    "mixed": Workload(mixed, 24, 16.0, 2012, pool_fraction=0.18),
    "memory_pressure": Workload(memory_pressure, 16, math.inf, 2048, pool_fraction=0.2),
}


def vocab_of(model: str) -> int:
    """Ids below this are in the model's vocabulary, as far as its name tells."""
    return SMALLEST_VOCAB if model.startswith("dummy:") else DEFAULT_VOCAB


class Scene(NamedTuple):
    """A drawn workload and the engine that it needs."""

    arrivals: list[Arrival]
    max_model_len: int
    pool_tokens: int  # KV slots


def draw(
    name: str,
    seed: int = 0,
    *,
    vocab: int = DEFAULT_VOCAB,
    num_requests: int | None = None,
    rate: float | None = None,
    scale: float = 1.0,
    **shape: Any,
) -> Scene:
    """The workload `name`, in order of arrival. `shape` goes to its generator (prefix=, n=, num_long= ...)."""
    workload = WORKLOADS[name]
    num, rate = num_requests or workload.num_requests, rate or workload.rate
    arrivals = workload.generate(Draw(np.random.default_rng(seed), num, rate, scale, vocab), **shape)
    max_model_len = max(16, math.ceil(workload.longest * scale))
    max_model_len = max(max_model_len, *(len(a.prompt_token_ids) + a.max_tokens for a in arrivals))
    tokens = workload.pool_fraction * sum(a.num_tokens for a in arrivals)
    if workload.pool_fraction == 1.0:
        tokens += SPARE_SLOTS * sum(a.num_sequences for a in arrivals)
    tokens = max(math.ceil(tokens), max_model_len, *(a.num_unshared_tokens for a in arrivals))
    return Scene(sorted(arrivals, key=lambda a: a.time_s), max_model_len, tokens)
