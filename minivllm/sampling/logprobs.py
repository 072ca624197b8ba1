"""Log-probabilities of tokens, as reported to the client: found where the logits are, read on the host.

Between the two they may travel (runner/async_sampling.py), so finding them never waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.plan import PositionLogprobs
from minivllm.sampling.draw import BLOCK

_CHUNK = 64  # positions at a time: bounds the scratch memory to a few rows of the vocabulary


class Columns(NamedTuple):
    """[N, 1 + k] each: of every position the token taken, then the k likeliest, best first."""

    ids: Tensor  # int64
    logprobs: Tensor  # fp32
    ranks: Tensor  # int64, from 1


def find_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Columns:
    """logits [N, V] fp32, tokens [N] int64 -> where the logits are; k is num_top, or V if that is less."""
    starts = range(0, max(len(tokens), 1), _CHUNK)
    parts = [_chunk(logits[at : at + _CHUNK], tokens[at : at + _CHUNK], num_top) for at in starts]
    return parts[0] if len(parts) == 1 else Columns(*map(torch.cat, zip(*parts, strict=True)))


def with_chosen(columns: Columns, logits: Tensor, at: Tensor, chosen: Tensor) -> Columns:
    """Rows `at` [C] report `chosen` [C, m] in the place of the likeliest. logits [N, V] fp32, k >= m."""
    rows = logits[at]  # [C, V]
    values = rows.gather(1, chosen)
    ranks = [_num_at_least(rows, values[:, i : i + 1]) for i in range(chosen.shape[1])]
    found = Columns(chosen, values - rows.logsumexp(-1, keepdim=True), torch.stack(ranks, 1))
    for column, of_chosen in zip(columns, found, strict=True):
        column[at, 1 : 1 + chosen.shape[1]] = of_chosen
    return columns


def read_logprobs(columns: Sequence[np.ndarray], counts: Sequence[int]) -> list[PositionLogprobs]:
    """columns: those of Columns; counts [N]: how many of the likeliest each position reports."""
    rows = zip(*(column.tolist() for column in columns), counts, strict=True)
    return [list(zip(*entries, strict=True))[: count + 1] for *entries, count in rows]


def _chunk(logits: Tensor, tokens: Tensor, num_top: int) -> Columns:
    taken_ids = tokens[:, None]  # [N, 1]
    norm = logits.logsumexp(-1, keepdim=True)  # [N, 1]
    taken = logits.gather(1, taken_ids)
    own = Columns(taken_ids, taken - norm, _num_at_least(logits, taken)[:, None])
    if not num_top:
        return own
    top, ids = _topk(logits, min(num_top, logits.shape[1]))  # [N, k]
    falling = -top
    ranks = torch.searchsorted(falling, falling, right=True)  # [N, k]: equal ones share the later rank
    last = top[:, -1:]  # ties with it may go on outside of the top
    ranks = torch.where(top == last, _num_at_least(logits, last)[:, None], ranks)
    likeliest = ids, top - norm, ranks
    return Columns(*(torch.cat(columns, 1) for columns in zip(own, likeliest, strict=True)))


def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x.topk(k) -> values, ids [N, k]. The k largest lie in the k blocks with the largest maxima: a value outside them
    has k blocks' maxima above or equal to it."""
    if x.shape[1] % BLOCK or x.shape[1] <= 2 * k * BLOCK:
        return tuple(x.topk(k))
    blocks = x.reshape(len(x), -1, BLOCK)  # [N, B, BLOCK]
    best = blocks.amax(-1).topk(k).indices  # [N, k]
    candidates = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1)  # [N, k * BLOCK]
    top, at = candidates.topk(k)
    return top, best.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def _num_at_least(logits: Tensor, value: Tensor) -> Tensor:
    """logits [N, V], value [N, 1] -> [N]: how many logits of each row are >= its value."""
    if logits.device.type != "cpu":
        return (logits >= value).sum(-1)
    rows = zip(logits.numpy(), value.numpy(), strict=True)
    return torch.tensor([np.count_nonzero(row >= least) for row, least in rows])  # several times faster than a sum
