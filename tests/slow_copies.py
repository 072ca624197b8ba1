"""Streams of copies to the host (minivllm.runner.async_sampling.Copies) without a device."""

from __future__ import annotations

import random

import torch

from minivllm.plan import AsyncOutput

POISON = 77  # what a buffer holds until its copy arrives: a token, so that reading it early is no crash


class SlowCopies:
    """A stream as unkind as one may be: a copy arrives when somebody waits for it, or by chance earlier, and in any
    order; it reads its sources when it was asked to, as a device does behind its queue."""

    def __init__(self, seed: int):
        self._chance = random.Random(seed)
        self._in_flight: list[SlowCopy] = []
        self.num_copies = self.most_in_flight = self.num_waits = self.num_pinned = 0

    def pinned(self, size, dtype):
        self.num_pinned += 1
        with torch.inference_mode(False):  # it is written outside of a step
            return torch.full((size,), POISON, dtype=dtype)

    def copy(self, sources, targets):
        written = {target.data_ptr() for copy in self._in_flight for target in copy.targets}
        for source, target in zip(sources, targets, strict=True):
            assert source.is_contiguous() and source.dtype == target.dtype and source.shape == target.shape
            assert target.data_ptr() not in written, "rewritten in flight"
            target.fill_(POISON)
        copy = SlowCopy(self, [self.taken(source) for source in sources], targets)
        self._in_flight.append(copy)
        self.num_copies += 1
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return AsyncOutput(copy.is_ready, copy.wait)

    def taken(self, source):
        return source.clone()

    def let_some_arrive(self):
        for copy in self._chance.sample(self._in_flight, len(self._in_flight)):
            if self._chance.random() < 0.1:
                copy.arrive()


class SlowCopy:
    def __init__(self, stream, sources, targets):
        self.stream, self.sources, self.targets = stream, sources, targets

    def arrive(self):
        for source, target in zip(self.sources, self.targets, strict=True):
            target.copy_(source)
        self.stream._in_flight.remove(self)

    def is_ready(self):
        self.stream.let_some_arrive()
        return self not in self.stream._in_flight

    def wait(self):
        self.stream.num_waits += 1
        if self in self.stream._in_flight:
            self.arrive()


class PatientCopies(SlowCopies):
    """A device that is slower than its host: a copy arrives when somebody waits for it, when the device has another
    step to do, or when nobody has had one for it for long."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self._num_asked = 0

    def copy(self, sources, targets):
        self._num_asked = 0
        return super().copy(sources, targets)

    def let_some_arrive(self):
        self._num_asked += 1
        if self._in_flight and (len(self._in_flight) > 1 or self._num_asked > 2000):
            self._in_flight[0].arrive()
