"""Tokens that stay on the device: the next step is given to it before the host has seen what this one sampled.

    device    | forward n | sample n | forward n + 1 | ...
    host         ... start n + 1 | land n: read its tokens, tell the engine ...

What `sample` gives stays there as a tensor, and a copy of it sets out for the host. The input builder writes the tensor
to its tables, if they are on the device (tables_device.py), or keeps it for the next step (`NewestTokens`, by the
request's permanent row). Everything else of that step follows from counts, which the host knows.

Copies go through a ring of pinned buffers, on a stream of their own, behind a small protocol: tests put a stream there
that is as late and as disorderly as one may be. A buffer is used again once it has been read.

What needs the host between two steps has its tokens at once, as without an overlap: penalties, grammars,
log-probabilities, drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.plan import StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey, InputBuilder
from minivllm.sampling.base import Sampled
from minivllm.sampling.verify import Verifier
from minivllm.upload import upload

UNKNOWN = -1  # a token that only the device knows


class Arrival(Protocol):
    def is_here(self) -> bool: ...
    def wait(self) -> None: ...


class Copies(Protocol):
    """A stream of copies to the host."""

    def pinned(self, size: int) -> Tensor:
        """[size] int64 of host memory that can be copied to."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> Arrival:
        """Behind all that the device has been given so far. The target may be neither read nor written before."""
        ...


class CudaArrival(NamedTuple):
    event: torch.cuda.Event

    def is_here(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> CudaArrival:
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        source.record_stream(self._stream)  # its memory is not given out again before
        return CudaArrival(event)


def make_copies(device: torch.device) -> Copies | None:
    """None where tokens are on the host as soon as they are anywhere: on a CPU."""
    return CudaCopies(device) if device.type == "cuda" else None


class PinnedRing:
    def __init__(self, copies: Copies, num_buffers: int, size: int):
        self._copies = copies
        self._buffers = [copies.pinned(size) for _ in range(num_buffers)]
        self._in_flight = [False] * num_buffers
        self._next = 0

    def send(self, source: Tensor) -> Sent:
        """source [S] int64, on the device."""
        at = self._next
        assert not self._in_flight[at], "more steps are in flight than the ring has buffers"
        self._in_flight[at] = True
        self._next = (at + 1) % len(self._buffers)
        target = self._buffers[at][: len(source)]
        return Sent(self, at, target, self._copies.copy(source, target))

    def release(self, at: int) -> None:
        self._in_flight[at] = False


class Sent:
    """A Parcel."""

    def __init__(self, ring: PinnedRing, at: int, target: Tensor, arrival: Arrival):
        self._ring, self._at, self._target, self._arrival = ring, at, target, arrival

    def is_here(self) -> bool:
        return self._arrival.is_here()

    def open(self) -> np.ndarray:
        self._arrival.wait()
        tokens = self._target.numpy().copy()
        self._ring.release(self._at)
        return tokens


def stay_on_device(
    verifier: Verifier, inputs: InputBuilder, num_steps: int, max_rows: int, device: torch.device
) -> tuple[Verifier | LateTokens, InputBuilder]:
    """For a runner with so many steps in flight: what it samples with and builds its inputs with."""
    copies = make_copies(device) if num_steps > 1 else None
    if copies is None:
        return verifier, inputs
    ring = PinnedRing(copies, num_steps, max_rows)
    return LateTokens(verifier, ring), inputs if inputs.on_device else NewestTokens(inputs, max_rows, device)


class LateTokens:
    """A Verifier whose tokens may be on their way."""

    def __init__(self, verifier: Verifier, ring: PinnedRing):
        self._verifier = verifier
        self._sampler = verifier.sampler
        self._ring = ring

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, drafts: np.ndarray) -> Sampled:
        """As Verifier's; the tokens may be a tensor until they are received."""
        if (drafts >= 0).any() or not self._sampler.is_plain(rows):
            return self._verifier(logits, rows, positions, drafts)
        tokens, valid = self._sampler.launch(logits, rows, positions)
        parcel = self._ring.send(torch.where(valid, tokens, ~tokens))
        return Sampled(tokens, [None] * len(rows), kept=np.arange(len(rows)), parcel=parcel)


class NewestTokens:
    """An InputBuilder before one whose tables are the host's: what only the device knows stays in `newest`, a
    placeholder in the tables, and takes its place in a batch on the device."""

    def __init__(self, inputs: InputBuilder, max_rows: int, device: torch.device):
        self.newest = torch.zeros(max_rows, dtype=torch.int64, device=device)  # by row: the last token sampled
        self._inputs = inputs
        self._device = device

    def apply(self, plan: StepPlan, rows: Sequence[int]) -> None:
        self._inputs.apply(plan, rows)

    def build(self, plan: StepPlan, key: BatchKey) -> InputBatch:
        batch = self._inputs.build(plan, key)
        unknown = np.flatnonzero(batch.token_ids == UNKNOWN)
        if len(unknown):
            token_ids = upload(batch.token_ids, self._device)
            rows = batch.rows[np.searchsorted(batch.query_start, unknown, side="right") - 1]
            token_ids[upload(unknown, self._device)] = self.newest[upload(rows, self._device)]
            batch.token_ids = token_ids
        return batch

    def append(self, batch: InputBatch, requests: np.ndarray, tokens: np.ndarray | Tensor) -> None:
        if isinstance(tokens, Tensor):
            self.newest[upload(batch.rows[requests], self._device)] = tokens
            tokens = np.full(len(tokens), UNKNOWN, np.int64)
        self._inputs.append(batch, requests, tokens)
