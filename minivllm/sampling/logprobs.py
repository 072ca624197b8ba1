"""Log-probabilities of tokens, as reported to the client."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.plan import PositionLogprobs
from minivllm.sampling.draw import BLOCK

_CHUNK = 64  # positions at a time: bounds the scratch memory to a few rows of the vocabulary


def position_logprobs(logits: Tensor, tokens: np.ndarray | Tensor, num_top: int) -> list[PositionLogprobs]:
    """logits [N, V] fp32, tokens [N] int64 -> for each position the token taken, then the num_top likeliest."""
    out: list[PositionLogprobs] = []
    for start in range(0, len(tokens), _CHUNK):
        out += _chunk(logits[start : start + _CHUNK], tokens[start : start + _CHUNK], num_top)
    return out


def _chunk(logits: Tensor, tokens: np.ndarray | Tensor, num_top: int) -> list[PositionLogprobs]:
    taken_ids = torch.as_tensor(tokens, device=logits.device)[:, None]  # [N, 1]
    norm = logits.logsumexp(-1, keepdim=True)  # [N, 1]
    taken = logits.gather(1, taken_ids)
    columns = [tokens.tolist(), (taken - norm)[:, 0].tolist(), _num_at_least(logits, taken).tolist()]
    out = [[entry] for entry in zip(*columns, strict=True)]
    if num_top:
        top, ids = _topk(logits, min(num_top, logits.shape[1]))  # [N, k]
        ranks = (top[:, :, None] <= top[:, None, :]).sum(-1)  # [N, k]: equal ones share the later rank
        last = top[:, -1:]  # ties with it may go on outside of the top
        ranks = torch.where(top == last, _num_at_least(logits, last)[:, None], ranks)
        for entries, *row in zip(out, ids.tolist(), (top - norm).tolist(), ranks.tolist(), strict=True):
            entries.extend(zip(*row, strict=True))
    return out


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
