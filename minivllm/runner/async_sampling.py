"""Tokens that stay on the device: the next step is given to it before the host has seen what this one sampled.

    device    | forward n | sample n | forward n + 1 | ...
    host         ... start n + 1 | read n's tokens, tell the engine ...

What `sample` gives stays there as a tensor, and a copy of it sets out for the host. The input builder writes the tensor
to its tables, if they are on the device (tables_device.py), or keeps it for the next step (`NewestTokens`, by the
request's permanent row). Everything else of that step follows from counts, which the host knows.

Copies go through a ring of pinned buffers, on a stream of their own, behind a small protocol: tests put a stream there
that is as slow and as disorderly as one may be. A buffer is used again once it has been read. Log-probabilities travel
with their tokens, those of prompts in a ring of their own.

A processor that follows the output (penalties, grammars ...) must have seen step n's tokens before step n + 1 samples.
The host then waits for them, with forward n + 1 launched: the device is busy meanwhile, so this delays sampling only,
and only a step in which such a request has a token behind one that is on its way:

    device    | forward n | sample n | forward n + 1            | sample n + 1 | ...
    host         ... start n + 1 | wait for n's tokens, masks of n + 1 | ...

An engine that speculates has its tokens at once: how many of them a step gives each request is the shape of the next
one, and drafts are proposed behind them (spec_decode/ahead.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.batch import BatchKey, InputBatch
from minivllm.plan import AsyncOutput, StepPlan
from minivllm.runner.inputs import InputBuilder
from minivllm.runner.prompt_logprobs import Send, read_at_once
from minivllm.sampling.base import Sampled
from minivllm.sampling.sampler import DeviceSampled
from minivllm.sampling.verify import Verifier
from minivllm.upload import upload

UNKNOWN = -1  # a token that only the device knows


class Copies(Protocol):
    """A stream of copies to the host."""

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size] of host memory that can be copied to."""
        ...

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> AsyncOutput[None]:
        """Behind all that the device has been given so far; when it is ready, all are there. Of the same shapes and
        types. The targets may be neither read nor written before."""
        ...


class CudaCopies:
    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> AsyncOutput[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # its memory is not given out again before
            event = torch.cuda.Event()
            event.record(self._stream)
        return AsyncOutput(event.query, event.synchronize)


def make_copies(device: torch.device) -> Copies | None:
    """None where tokens are on the host as soon as they are anywhere: on a CPU."""
    return CudaCopies(device) if device.type == "cuda" else None


class PinnedRing:
    """A buffer holds one output: of each of its tensors a piece of memory, which grows with the largest one yet and is
    kept: to pin memory is slow."""

    def __init__(self, copies: Copies, num_buffers: int, size: int = 1):
        """size: elements that each piece has at least."""
        self._copies = copies
        self._size = size
        self._pieces: list[dict[tuple[int, torch.dtype], Tensor]] = [{} for _ in range(num_buffers)]
        self._unread: list[AsyncOutput[list[np.ndarray]] | None] = [None] * num_buffers
        self._next = 0

    def send(self, sources: Sequence[Tensor]) -> AsyncOutput[list[np.ndarray]]:
        """sources: on the device, contiguous; their number, shapes and types may differ from call to call.

        A buffer that nobody has read when its turn comes again is read first. Where there are as many as steps in
        flight, it is of a step that failed behind this call.
        """
        at = self._next
        if (unread := self._unread[at]) is not None:
            unread.result()
        self._next = (at + 1) % len(self._pieces)
        targets = [self._target(at, place, source) for place, source in enumerate(sources)]
        copied = self._copies.copy(sources, targets)
        sent = self._unread[at] = copied.then(lambda _: self._read(at, targets))
        return sent

    def _read(self, at: int, targets: Sequence[Tensor]) -> list[np.ndarray]:
        self._unread[at] = None
        return [target.numpy().copy() for target in targets]

    def _target(self, at: int, place: int, source: Tensor) -> Tensor:
        key, size = (place, source.dtype), source.numel()
        piece = self._pieces[at].get(key)
        if piece is None or len(piece) < size:
            piece = self._pieces[at][key] = self._copies.pinned(max(self._size, _power_of_two(size)), source.dtype)
        return piece[:size].view(source.shape)


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def send_for(num_steps: int, device: torch.device) -> Send:
    """For a runner with so many steps in flight: how something else than tokens gets to the host."""
    copies = make_copies(device) if num_steps > 1 else None
    return read_at_once if copies is None else PinnedRing(copies, num_steps).send


def stay_on_device(
    verifier: Verifier, inputs: InputBuilder, num_steps: int, max_rows: int, device: torch.device
) -> tuple[Verifier | AsyncVerifier, InputBuilder]:
    """For a runner with so many steps in flight: what it samples with and builds its inputs with."""
    copies = make_copies(device) if num_steps > 1 else None
    if copies is None:
        return verifier, inputs
    ring = PinnedRing(copies, num_steps, max_rows)
    return AsyncVerifier(verifier, ring), inputs if inputs.on_device else NewestTokens(inputs, max_rows, device)


class AsyncVerifier:
    """A Verifier whose tokens may be on their way. It never waits for those of the step that it is called for, unless
    there are drafts."""

    def __init__(self, verifier: Verifier, ring: PinnedRing):
        self._verifier = verifier
        self._sampler = verifier.sampler
        self._ring = ring
        self._unobserved: deque[_Step] = deque()  # in their order

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, drafts: np.ndarray) -> Sampled:
        """As Verifier's; the tokens may be a tensor, and their output on its way."""
        self._catch_up(rows)
        if (drafts >= 0).any():
            return self._verifier(logits, rows, positions, drafts)
        found = self._sampler.launch(logits, rows, positions)
        step = _Step(found, self._ring.send(found.tensors), rows, self._sampler.generation[rows])
        self._unobserved.append(step)
        output = AsyncOutput(step.arrays.is_ready, partial(self._result, step))
        return Sampled(found.tensors[0], [None] * len(rows), kept=np.arange(len(rows)), on_its_way=output)

    def _catch_up(self, rows: np.ndarray) -> None:
        """Wait for the tokens that processors must see before they are applied to `rows`."""
        if not self._unobserved:
            return
        followers = rows[self._sampler.follow_output(rows)]
        for step in reversed(self._unobserved):
            if np.isin(followers, step.rows).any():
                return self._observe(step)

    def _result(self, step: _Step) -> Sampled:
        self._observe(step)
        return step.found.read(step.arrays.result())

    def _observe(self, step: _Step) -> None:
        """Wait for a step, and for those before it: processors see a row's tokens in their order, and each once. What
        was sampled for a row that is somebody else's by now is not observed."""
        while step in self._unobserved:
            oldest = self._unobserved[0]
            tokens, *_ = oldest.arrays.result()
            same = self._sampler.generation[oldest.rows] == oldest.generations
            self._sampler.observe(oldest.rows[same], tokens[same])
            self._unobserved.popleft()


@dataclass(slots=True, eq=False)
class _Step:
    """What an AsyncVerifier has launched."""

    found: DeviceSampled
    arrays: AsyncOutput[list[np.ndarray]]  # its tensors, on their way
    rows: np.ndarray  # [S] int64
    generations: np.ndarray  # [S] int64: whose they were (Sampler.generation)


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
