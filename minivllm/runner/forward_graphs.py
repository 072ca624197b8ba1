"""`runner.graphs`: which forwards are captured once for each size, and replayed without the host's work.

    none             each forward is called
    piecewise        what lies between two attentions: the pieces of runner.forward=piecewise or, of a model as it is
                     written, what runs until a capture is broken off at attention and taken up behind it
    full             whole forwards, attention included, of steps in which every request has one token (decodes) or,
                     with speculative decoding, one and all k of its drafts (vLLM's uniform decode batches)
    full+piecewise   both: the first where a step allows it

A whole forward can be captured where the attention backend says so (`AttentionBackend.graphs`): its metadata then has
shapes that follow from the number of requests, and `StaticAttention` keeps it where the capture reads it. A model may
object (`capture_unsupported_reason`): torch's way to compute experts asks the host. What a LoRA adapter adds depends on
who is in the step: it is done aside, between two captures, and a step with an adapter in it is not replayed whole. On a
CPU the captures are recorded calls (compile/graphs.py): slower than calling, and a test of all that a graph takes for
granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend
from minivllm.batch import BatchKey, InputBatch, InputSizes, pad_requests
from minivllm.compile.graphs import Captures, Recorder, capture_sizes, copy_into, make_recorder
from minivllm.runner.forward import ForwardOptions, ForwardRunner, first_inputs

MAX_CAPTURED = 512  # tokens of a step; in longer ones the host keeps ahead of the device

MakeForward = Callable[[nn.Module, torch.device, ForwardOptions], ForwardRunner]


class Setting(NamedTuple):
    """What a forward is made of."""

    make: MakeForward  # the entry of the runner.forward axis
    model: nn.Module
    device: torch.device
    options: ForwardOptions
    attention: AttentionBackend
    sizes: InputSizes
    num_drafts: int = 0  # the most that a request brings to a step


class Graphed(NamedTuple):
    forward: ForwardRunner
    attention: Any  # AttentionBackend: what the runner shall prepare and attend with
    decision: tuple[str, str]


def none(at: Setting) -> Graphed:
    return Graphed(at.make(at.model, at.device, at.options), at.attention, ("none", "called"))


def piecewise(at: Setting) -> Graphed:
    return _named("piecewise", _piecewise(at, make_recorder(at.device)), at.device)


def full(at: Setting) -> Graphed:
    if (why := _unsupported_reason(at)) is not None:
        return none(at)._replace(decision=("none", why))
    return _named("full", _full(at, none(at), make_recorder(at.device)), at.device)


def full_and_piecewise(at: Setting) -> Graphed:
    recorder = make_recorder(at.device)  # one pool of memory
    pieces = _piecewise(at, recorder)
    if (why := _unsupported_reason(at)) is None:
        return _named("full+piecewise", _full(at, pieces, recorder), at.device)
    name, reason = _named("piecewise", pieces, at.device).decision
    return pieces._replace(decision=(name, f"{reason}; {why}"))


def _named(name: str, graphed: Graphed, device: torch.device) -> Graphed:
    how = "captured" if device.type == "cuda" else "recorded calls, as a CPU has no graphs"
    return graphed._replace(decision=(name, f"{how}: {graphed.decision[1]}"))


def _unsupported_reason(at: Setting) -> str | None:
    """Why no whole forward can be captured, or None."""
    why = getattr(at.model, "capture_unsupported_reason", None)  # said by a model that may have parts which prevent it
    if at.attention.graphs == "none":
        why = f"{type(at.attention).__name__} says that it cannot be part of one"
    return why and f"no whole forward can be captured: {why}"


def _piecewise(at: Setting, recorder: Recorder) -> Graphed:
    captures = Captures(capture_sizes(min(at.options.max_tokens, MAX_CAPTURED)), recorder)
    forward = at.make(at.model, at.device, replace(at.options, shapes=captures))
    return Graphed(forward, at.attention, ("", f"between attentions in {_shown(captures)} tokens"))


def _full(at: Setting, inner: Graphed, recorder: Recorder) -> Graphed:
    queries = [1, 1 + at.num_drafts] if at.num_drafts and at.attention.graphs in ("uniform", "any") else [1]
    captures = {n: Captures(_whole_sizes(at, n), recorder) for n in queries}
    forward = FullForward(inner.forward, at.model, at.device, captures)
    reason = f"whole decodes in {_shown(captures[1])}"
    if len(queries) > 1:
        reason += f", with {at.num_drafts} drafts each in {_shown(captures[1 + at.num_drafts])}"
    elif at.num_drafts:
        reason += f" (with drafts not: {type(at.attention).__name__} says that they cannot be part of one)"
    reason += f", other steps {inner.decision[1]}"
    return Graphed(forward, StaticAttention(inner.attention, at.sizes), ("", reason))


def _whole_sizes(at: Setting, queries: int) -> tuple[int, ...]:
    """In tokens, for requests of so many each."""
    most = max(1, min(at.sizes.max_rows, min(at.options.max_tokens, MAX_CAPTURED) // queries))
    return tuple(queries * num_requests for num_requests in capture_sizes(most))


def _shown(captures: Captures) -> str:
    return f"{len(captures.sizes)} sizes of up to {captures.sizes[0]}"


class FullForward:
    """Replays whole forwards of decodes, and leaves all other steps to another ForwardRunner."""

    def __init__(self, inner: ForwardRunner, model: nn.Module, device: torch.device, captures: Mapping[int, Captures]):
        """captures: by the number of tokens that each request of a step has."""
        self.inner = inner
        self.model, self.device = model, device
        self._captures = captures
        self._models = {n: own.wrap(lambda args: (model(*args),)) for n, own in captures.items()}

    @property
    def decision(self) -> tuple[str, str]:
        return self.inner.decision

    def key_for(self, num_reqs: int, num_tokens: int, max_query: int, adapted: bool = False) -> BatchKey:
        captures = self._captures.get(max_query)
        if captures is not None and num_tokens == num_reqs * max_query <= captures.sizes[0] and not adapted:
            return BatchKey(captures.fit(num_tokens), queries=max_query)
        return self.inner.key_for(num_reqs, num_tokens, max_query, adapted)

    def warmup(self, run_dummy: Callable[[BatchKey], None]) -> None:
        self.inner.warmup(run_dummy)
        for queries, captures in self._captures.items():
            for size in captures.sizes:
                run_dummy(BatchKey(size, queries))
            captures.seal()

    def __call__(self, batch: InputBatch) -> Tensor:
        if not batch.whole:
            return self.inner(batch)
        captures, model = self._captures[batch.max_query], self._models[batch.max_query]
        return model(list(first_inputs(self.model, batch, self.device, captures)))[0]


class StaticAttention:
    """An AttentionBackend for another one: the metadata of a captured step lies where its capture reads it."""

    def __init__(self, inner: AttentionBackend, sizes: InputSizes):
        self.inner = inner
        self.forward = inner.forward
        self._sizes = sizes
        self._held: dict[BatchKey, Any] = {}

    def rope_and_attend(self, *args: Any) -> None:
        self.inner.rope_and_attend(*args)

    def prepare(self, batch: InputBatch) -> Any:
        if not batch.whole:
            return self.inner.prepare(batch)
        key = BatchKey(batch.padded_tokens, batch.max_query)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = self.inner.prepare(pad_requests(batch, self._sizes, self._sizes.max_blocks))
        else:  # later columns keep what they had, blocks that exist: nobody reads past a request's length
            copy_into(held, self.inner.prepare(pad_requests(batch, self._sizes, batch.block_tables.shape[-1])))
        return held
