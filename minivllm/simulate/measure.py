"""What a worker takes for steps of a designed grid: decodes, pieces of prompts, both together, moves of blocks.

Plans are made by hand, so that a context of a thousand tokens costs no prefill: a request joins with tokens that count
as computed, in blocks of its own, and what its blocks hold does not change how long a step takes. Each point is
measured in several rounds, in another order each, and its median counts: a busy moment of the machine meets some
rounds of a point and not all. A request's second and later decodes are timed, as most of a run's are.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minivllm.plan import AsyncOutput, Join, StepOutput, StepPlan
from minivllm.request import SamplingParams
from minivllm.simulate.cost import Step
from minivllm.simulate.regression import Sample
from minivllm.simulate.workload import FIRST_TOKEN

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # requests that decode
CONTEXTS = (16, 256, 1024)  # tokens that each has in the cache
CHUNKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of a prompt in a step
BEFORE = (0, 256, 1024)  # of a prompt, in the cache
MIXED = ((4, 16), (4, 64), (4, 256), (16, 32), (16, 128), (32, 64))  # decodes, and a prompt's tokens
SEVERAL = ((2, 32), (4, 16), (4, 64), (8, 32), (16, 16))  # prompts, and tokens of each
MOVED = (8, 16, 32, 64)  # blocks
MOVE_TRIES = 3
TIMED_DECODES = 3  # of a point, in a round
SPARE = 8  # tokens that a request's blocks have room for besides
LEAST_ROUNDS = 2
MOST_SHARE = 0.01  # of the time that there is, for one step: longer ones are left out

Execute = Callable[[StepPlan], Any]  # a worker's


class Bounds(NamedTuple):
    """What an engine lets a step be."""

    max_rows: int
    max_tokens: int  # of a step
    max_model_len: int
    num_blocks: int
    block_size: int


class Point(NamedTuple):
    """A step to be measured: each request's tokens in the cache, and those it computes. Decodes compute one."""

    start: tuple[int, ...]
    num_new: tuple[int, ...]

    @property
    def step(self) -> Step:
        return Step(np.array(self.num_new, np.int64), np.array(self.start, np.int64), len(self.num_new))

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)

    @property
    def is_decode(self) -> bool:
        return max(self.num_new) == 1

    @property
    def lengths(self) -> list[int]:
        return [start + new for start, new in zip(self.start, self.num_new, strict=True)]

    def fits(self, bounds: Bounds) -> bool:
        longest = max(self.lengths) + SPARE
        num_blocks = sum(-(-(length + SPARE) // bounds.block_size) for length in self.lengths)
        within = len(self.start) <= bounds.max_rows and sum(self.num_new) <= bounds.max_tokens
        return within and longest <= bounds.max_model_len and num_blocks <= bounds.num_blocks


def decodes(count: int, context: int) -> Point:
    return Point((context,) * count, (1,) * count)


def grid(bounds: Bounds) -> list[Point]:
    """Those points of the grid that the engine allows."""
    points = [decodes(count, context) for count in BATCHES for context in CONTEXTS]
    points += [Point((before,), (chunk,)) for chunk in CHUNKS for before in BEFORE]
    points += [Point((0,) * count, (chunk,) * count) for count, chunk in SEVERAL]
    for count, chunk in MIXED:
        for context in CONTEXTS[1:3]:
            points.append(Point((context,) * count + (0,), (1,) * count + (chunk,)))
    return [point for point in points if point.fits(bounds)]


class Stand:
    """Makes plans for a worker in which nobody else has a request."""

    def __init__(self, execute: Execute, bounds: Bounds, clock: Callable[[], float] = time.perf_counter):
        self._execute = execute
        self._bounds = bounds
        self._clock = clock
        self._params = SamplingParams(temperature=0.0, max_tokens=bounds.max_model_len, ignore_eos=True)
        self._step = 0
        self._live: list[str] = []

    def measure(self, points: Sequence[Point], seconds: float, seed: int = 0) -> list[Sample]:
        """As many rounds as `seconds` allow, of the points that they allow. A first one tells which these are, and
        warms up what is slow at first; it counts for nothing."""
        begin, rng = self._clock(), random.Random(seed)
        points = self._affordable(points, seconds)
        found: list[list[float]] = [[] for _ in points]
        order, longest = list(range(len(points))), 0.0
        while len(found[0]) < LEAST_ROUNDS or self._clock() - begin + longest < seconds:
            round_begin = self._clock()
            rng.shuffle(order)
            for i in order:
                found[i] += self.times(points[i])
            longest = max(longest, self._clock() - round_begin)
        self.leave()
        return [Sample(point.step, statistics.median(times)) for point, times in zip(points, found, strict=True)]

    def _affordable(self, points: Sequence[Point], seconds: float) -> list[Point]:
        """Of fewer tokens first. A step takes no longer a token than any smaller one did."""
        kept, per_token = [], 0.0
        for point in sorted(points, key=lambda point: point.num_tokens):
            if per_token * point.num_tokens <= MOST_SHARE * seconds:
                kept.append(point)
                took = min(self.times(point)) / point.num_tokens
                per_token = min(per_token or took, took)
        return kept

    def times(self, point: Point) -> list[float]:
        """Seconds of such a step; of decodes, of several that follow each other."""
        plan = self._joining(point)
        if not point.is_decode:
            return [self._timed(plan)]
        self._timed(plan)
        return [self._timed(self._next(point, i + 1)) for i in range(TIMED_DECODES)]

    def moves(self, num_host_blocks: int) -> list[Sample]:
        """Blocks that go to the host and come back, and copies. num_host_blocks: 0 where nothing is swapped."""
        none, size = Step(np.zeros(0, np.int64), np.zeros(0, np.int64), 0), self._bounds.block_size
        half, found = self._bounds.num_blocks // 2, []
        for count in MOVED:
            pairs = [(i, i) for i in range(min(count, half, num_host_blocks))]
            copies = [(i, half + i) for i in range(min(count, half))]
            if pairs:
                for way in ("swap_out", "swap_in"):
                    found.append(Sample(none, self._moving(**{way: pairs}), num_moved=size * len(pairs)))
            if copies:
                found.append(Sample(none, self._moving(copies=copies), num_copied=size * len(copies)))
        return found

    def leave(self) -> None:
        self._timed(self._plan(leaves=self._take_live()))

    def _moving(self, **moves: list[tuple[int, int]]) -> float:
        return min(self._timed(self._plan(**moves)) for _ in range(MOVE_TRIES))

    def _joining(self, point: Point) -> StepPlan:
        leaves, blocks = self._take_live(), iter(range(self._bounds.num_blocks))
        self._live = [f"p{self._step}-{i}" for i in range(len(point.start))]
        lengths = dict(zip(self._live, point.lengths, strict=True))
        return self._plan(
            leaves=leaves,
            joins=[Join(req_id, [FIRST_TOKEN] * length, length, self._params) for req_id, length in lengths.items()],
            new_blocks={req_id: self._blocks(blocks, length) for req_id, length in lengths.items()},
            num_tokens=dict(zip(self._live, point.num_new, strict=True)),
            start=dict(zip(self._live, point.start, strict=True)),
        )

    def _next(self, point: Point, later: int) -> StepPlan:
        start = {req_id: at + later for req_id, at in zip(self._live, point.start, strict=True)}
        return self._plan(num_tokens=dict.fromkeys(self._live, 1), start=start)

    def _blocks(self, free: Iterator[int], length: int) -> list[int]:
        return [next(free) for _ in range(-(-(length + SPARE) // self._bounds.block_size))]

    def _take_live(self) -> list[str]:
        live, self._live = self._live, []
        return live

    def _plan(self, **columns: Any) -> StepPlan:
        self._step += 1
        return StepPlan(self._step, **columns)

    def _timed(self, plan: StepPlan) -> float:
        begin = self._clock()
        out: StepOutput | AsyncOutput[StepOutput] = self._execute(plan)
        if isinstance(out, AsyncOutput):
            out.result()
        return self._clock() - begin
