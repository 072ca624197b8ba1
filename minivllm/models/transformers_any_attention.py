"""How attention gets from transformers' code to ours: one function in its AttentionInterface, one in that of masks.

The network calls the function once a layer, with what it wants: scale, window, soft cap, sinks, a mask. Whoever runs
the network says by a context variable who answers:

    Measuring   when the model is loaded: notes each call, attends as it asks in plain torch
    Separate    then: the same of two requests in one batch
    Continued   then: the same of one in two steps
    Paged       in a step: hands q, k and v to `attend`, by the number of the call

A mask is an object here and no tensor, so code that looks into it fails when the model is loaded, not in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import attend
from minivllm.errors import ModelError

NAME = "minivllm"  # of the two functions
# What else networks tell their attention, which changes nothing here: positions are applied, nothing is dropped out.
HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "cos", "sin", "input_ids", "layer_idx"})


class Answer(Protocol):
    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, told: dict[str, Any]) -> Tensor:
        """q [1, heads, T, size], k [1, kv_heads, T, size], v [1, kv_heads, T, value_size] -> [1, T, heads,
        value_size]."""
        ...


_answer: ContextVar[Answer] = ContextVar("minivllm_transformers_attention")


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def register() -> None:
    """Once or more often."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **told: Any
) -> tuple[Tensor, None]:
    return _answer.get()(module, query, key, value, attention_mask, told), None


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query may see, as transformers says it."""

    sees: Callable[..., Any]  # of (batch, head, query, key), each an index
    size: int | None  # of a window or a chunk


def _mask(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    return Mask(mask_function, local_size)


class Call(NamedTuple):
    """What one layer asked for."""

    spec: AttentionSpec
    value_size: int  # of a head of V, which may be smaller than K's


# ------------------------------------------------------------------------------------------------------- measuring


class Measuring:
    """One forward of one request."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, told: dict[str, Any]) -> Tensor:
        call = read_call(module, q, k, v, mask, told)
        self.calls.append(call)
        return _in_plain_torch(*(x[0].transpose(0, 1) for x in (q, k, v)), call.spec)[None]


class Continued:
    """Forwards of one request, each of the tokens behind those of the last; calls: as they were measured."""

    def __init__(self, calls: Sequence[Call]):
        self._calls, self._next = list(calls), 0
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * len(self._calls)  # K and V of all tokens so far

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, told: dict[str, Any]) -> Tensor:
        index = self._next % len(self._calls)
        self._next += 1
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if (past := self._past[index]) is not None:
            k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        self._past[index] = k, v
        return _in_plain_torch(q, k, v, self._calls[index].spec)[None]


class Separate:
    """One forward of several requests, lengths of whose tokens lie behind each other; calls: as they were measured."""

    def __init__(self, lengths: Sequence[int], calls: Sequence[Call]):
        self._lengths, self._calls = list(lengths), iter(calls)

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, told: dict[str, Any]) -> Tensor:
        call = next(self._calls)
        parts = zip(*(x[0].transpose(0, 1).split(self._lengths) for x in (q, k, v)), strict=True)
        return torch.cat([_in_plain_torch(*part, call.spec) for part in parts])[None]


def _in_plain_torch(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Of one request: q [m, heads, size] of the last tokens, k and v [n, kv_heads, ..] of all -> [m, heads,
    value_size]."""
    n, group = len(k), spec.num_heads // spec.num_kv_heads
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    behind = torch.arange(n - len(q), n, device=q.device)[:, None] - torch.arange(n, device=q.device)
    sees = (behind >= 0) & (behind < (spec.sliding_window or n))
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype).contiguous()


def read_call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, told: dict[str, Any]) -> Call:
    """Raises ModelError for what our attention would compute otherwise."""
    told = dict(told)
    scale, cap = told.pop("scaling", None), told.pop("softcap", None)
    window = _window(mask, told.pop("sliding_window", None))
    _refuse(module, q, k, told)
    heads, size = q.shape[1], q.shape[3]
    scale = size**-0.5 if scale is None else float(scale)
    spec = AttentionSpec(heads, k.shape[1], size, scale, window, None if cap is None else float(cap))
    return Call(spec, v.shape[3])


def _refuse(module: nn.Module, q: Tensor, k: Tensor, told: dict[str, Any]) -> None:
    if told.pop("s_aux", None) is not None:
        raise ModelError("its attention has sinks, which no backend here computes")
    if told.pop("position_bias", None) is not None:
        raise ModelError("its attention adds a bias by position to scores, which no backend here does")
    if told.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise ModelError("its attention is not causal")
    if told.pop("dropout", 0.0):
        raise ModelError("its attention drops numbers at random")
    if q.shape[2] != k.shape[2]:
        raise ModelError("its attention has other keys than one a token")
    if others := sorted(name for name, value in told.items() if isinstance(value, Tensor) and name not in HARMLESS):
        raise ModelError(f"its attention is given what no backend here takes ({', '.join(others)})")


def _window(mask: Any, told: int | None) -> int | None:
    """The mask decides where there is one: that is what transformers' slowest attention, the oracle, goes by."""
    if mask is None:
        return told
    if not isinstance(mask, Mask):
        raise ModelError("it makes a mask of its own, which no backend here takes")
    size = mask.size or told or 4
    try:
        seen = _row(mask, query=3 * size)
    except Exception as e:  # it looks into what only this request has
        raise ModelError("its mask depends on more than two tokens' distance") from e
    for window, first in ((None, 0), (mask.size or told, 2 * size + 1)):
        if seen == [key >= first for key in range(3 * size + 1)] and (first == 0 or window):
            return window
    raise ModelError("its mask is neither causal nor a sliding window")


def _row(mask: Mask, query: int) -> list[bool]:
    """Which of the keys 0 .. query are seen."""
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask.sees(zero, zero, torch.tensor(query), torch.arange(query + 1))
    return seen.expand(query + 1).tolist()


# ----------------------------------------------------------------------------------------------------- in a step


def in_one_shape(calls: Sequence[Call]) -> list[AttentionSpec]:
    """Of layers that share a cache: heads as long as the longest, as many KV heads as the most. Raises ModelError."""
    size = max(max(call.spec.head_size, call.value_size) for call in calls)
    kv_heads = max(call.spec.num_kv_heads for call in calls)
    for spec, _ in calls:
        if kv_heads % spec.num_kv_heads or spec.num_heads % kv_heads:
            raise ModelError(f"its layers have {kv_heads} and {spec.num_kv_heads} KV heads, which share no cache")
    return [replace(call.spec, head_size=size, num_kv_heads=kv_heads) for call in calls]


class Paged:
    """One forward of a step. Heads shorter than the cache's are filled up with zeros, which add nothing to scores, and
    to results nothing that is kept; KV heads are written as often as the cache has room for them."""

    def __init__(self, calls: Sequence[Call], layers: Sequence[AttentionSpec]):
        self._calls, self._layers, self._next = calls, layers, 0

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, told: dict[str, Any]) -> Tensor:
        index = self._next
        self._next += 1
        shape, value_size = self._layers[index], self._calls[index].value_size
        repeats = shape.num_kv_heads // self._calls[index].spec.num_kv_heads
        q, k, v = (_rows(x, shape.head_size) for x in (q, k, v))
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        return attend(q, k, v, index)[None, :, :, :value_size].contiguous()


def _rows(x: Tensor, size: int) -> Tensor:
    """[1, heads, T, n] -> [T, heads, size]."""
    x = x[0].transpose(0, 1)
    return F.pad(x, (0, size - x.shape[2])) if x.shape[2] < size else x.contiguous()
