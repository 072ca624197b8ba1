"""Tokens that stay on the device: the next step is given to it before the host has seen what this one sampled.

    device    | forward n | sample n | forward n + 1 | ...
    host         ... start n + 1 | land n: read its tokens, tell the engine ...

What `sample` gives stays there as a tensor, and a copy of it sets out for the host. The input builder writes the tensor
to its tables, if they are on the device (tables_device.py), or keeps it for the next step (`NewestTokens`, by the
request's permanent row). Everything else of that step follows from counts, which the host knows.

Copies go through a ring of pinned buffers, on a stream of their own, behind a small protocol: tests put a stream there
that is as late and as disorderly as one may be. A buffer is used again once it has been read. Log-probabilities travel
with their tokens, those of prompts in a ring of their own.

A processor that follows the output (penalties, grammars ...) must have seen step n's tokens before step n + 1 samples.
The host then waits for them, with forward n + 1 launched: the device is busy meanwhile, so this delays sampling only,
and only a step in which such a request has a token behind one that is on its way:

    device    | forward n | sample n | forward n + 1            | sample n + 1 | ...
    host         ... start n + 1 | wait for n's tokens, masks of n + 1 | ...

What stays synchronous is a step with drafts: how many tokens it gives each request is the shape of the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.plan import StepPlan
from minivllm.runner.batch import InputBatch
from minivllm.runner.inputs import BatchKey, InputBuilder
from minivllm.runner.prompt_logprobs import Send, read_at_once
from minivllm.sampling.base import Sampled
from minivllm.sampling.sampler import Launched
from minivllm.sampling.verify import Verifier
from minivllm.upload import upload

UNKNOWN = -1  # a token that only the device knows


class Arrival(Protocol):
    def is_here(self) -> bool: ...
    def wait(self) -> None: ...


class Copies(Protocol):
    """A stream of copies to the host."""

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size] of host memory that can be copied to."""
        ...

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Arrival:
        """Behind all that the device has been given so far; when it arrives, all have. Of the same shapes and types.
        The targets may be neither read nor written before."""
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

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> CudaArrival:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # its memory is not given out again before
            event = torch.cuda.Event()
            event.record(self._stream)
        return CudaArrival(event)


def make_copies(device: torch.device) -> Copies | None:
    """None where tokens are on the host as soon as they are anywhere: on a CPU."""
    return CudaCopies(device) if device.type == "cuda" else None


class PinnedRing:
    """A buffer holds one parcel: of each of its tensors a piece of memory, which grows with the largest one yet and is
    kept: to pin memory is slow."""

    def __init__(self, copies: Copies, num_buffers: int, size: int = 1):
        """size: elements that each piece has at least."""
        self._copies = copies
        self._size = size
        self._pieces: list[dict[tuple[int, torch.dtype], Tensor]] = [{} for _ in range(num_buffers)]
        self._unread: list[Sent | None] = [None] * num_buffers
        self._next = 0

    def send(self, sources: Sequence[Tensor]) -> Sent:
        """sources: on the device, contiguous; their number, shapes and types may differ from parcel to parcel.

        A buffer that nobody has read when its turn comes again is read first. Where there are as many as steps in
        flight, it is of a step that failed behind this call.
        """
        at = self._next
        if (unread := self._unread[at]) is not None:
            unread.open()
        self._next = (at + 1) % len(self._pieces)
        targets = [self._target(at, place, source) for place, source in enumerate(sources)]
        sent = self._unread[at] = Sent(self, at, targets, self._copies.copy(sources, targets))
        return sent

    def _target(self, at: int, place: int, source: Tensor) -> Tensor:
        key, size = (place, source.dtype), source.numel()
        piece = self._pieces[at].get(key)
        if piece is None or len(piece) < size:
            piece = self._pieces[at][key] = self._copies.pinned(max(self._size, _power_of_two(size)), source.dtype)
        return piece[:size].view(source.shape)

    def release(self, at: int) -> None:
        self._unread[at] = None


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


class Sent:
    """A buffer of the ring until it has been read, and what was read."""

    def __init__(self, ring: PinnedRing, at: int, targets: list[Tensor], arrival: Arrival):
        self._ring, self._at, self._targets, self._arrival = ring, at, targets, arrival
        self._arrays: list[np.ndarray] | None = None

    def is_here(self) -> bool:
        return self._arrays is not None or self._arrival.is_here()

    def open(self) -> list[np.ndarray]:
        """Waits for them. As often as one likes."""
        if self._arrays is None:
            self._arrival.wait()
            self._arrays = [target.numpy().copy() for target in self._targets]
            self._ring.release(self._at)
        return self._arrays


def make_send(num_steps: int, device: torch.device) -> Send:
    """For a runner with so many steps in flight: how something else than tokens gets to the host."""
    copies = make_copies(device) if num_steps > 1 else None
    return read_at_once if copies is None else PinnedRing(copies, num_steps).send


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
    """A Verifier whose tokens may be on their way. It never waits for those of the step that it is called for, unless
    there are drafts."""

    def __init__(self, verifier: Verifier, ring: PinnedRing):
        self._verifier = verifier
        self._sampler = verifier.sampler
        self._ring = ring
        self._unread: deque[LateStep] = deque()  # in their order

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, drafts: np.ndarray) -> Sampled:
        """As Verifier's; the tokens may be a tensor until they are received."""
        self._catch_up(rows)
        if (drafts >= 0).any():
            return self._verifier(logits, rows, positions, drafts)
        launched = self._sampler.launch(logits, rows, positions)
        step = LateStep(self, launched, self._ring.send(launched.tensors), rows, self._sampler.generation[rows])
        self._unread.append(step)
        tokens = launched.tensors[0]
        return Sampled(tokens, [None] * len(rows), kept=np.arange(len(rows)), parcel=step)

    def _catch_up(self, rows: np.ndarray) -> None:
        """Wait for the tokens that processors must see before they are applied to `rows`."""
        if not self._unread:
            return
        followers = rows[self._sampler.follow_output(rows)]
        for step in reversed(self._unread):
            if np.isin(followers, step.rows).any():
                return self.read(step)

    def read(self, step: LateStep) -> None:
        """Wait for a step, and for those before it: processors see a row's tokens in their order, and each once. What
        was sampled for a row that is somebody else's by now is not observed."""
        while not step.is_read:
            oldest = self._unread[0]
            tokens, *_ = oldest.sent.open()
            same = self._sampler.generation[oldest.rows] == oldest.generations
            self._sampler.observe(oldest.rows[same], tokens[same])
            oldest.is_read = True
            self._unread.popleft()


@dataclass(slots=True, eq=False)
class LateStep:
    """A Parcel."""

    late: LateTokens
    launched: Launched
    sent: Sent
    rows: np.ndarray  # [S] int64
    generations: np.ndarray  # [S] int64: whose they were (Sampler.generation)
    is_read: bool = False

    def is_here(self) -> bool:
        return self.sent.is_here()

    def open(self) -> Sampled:
        self.late.read(self)
        return self.launched.landed(self.sent.open())


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
