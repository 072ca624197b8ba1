"""Who filters, draws and rejects for a sampler: torch and numpy (draw.py, rejection.py), or Triton's kernels on a GPU.

Both draw the same tokens: their noise is the same function of (seed, position, token).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling.draw import apply_filters, draw, find_cuts_by_sort, pad_to_blocks
from minivllm.sampling.pick import Drawn, Draws
from minivllm.sampling.rejection import reject
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch

TORCH = Draws(apply_filters, draw, reject, 32)  # so many rows stay in a CPU's last-level cache


def choose_draws(kernels: Dispatch) -> Draws:
    draws = TORCH
    if kernels.uses("draw", proves_draw):
        draws = draws._replace(draw=kernel_draw, num_rows=256)
    if kernels.uses("top-k, top-p and min-p", proves_filter):
        draws = draws._replace(filter=kernel_filter)
    if kernels.uses("rejection sampling", proves_reject):
        draws = draws._replace(reject=kernel_reject)
    return draws


# --- the kernels, called as their references are


def kernel_draw(probs: Tensor, seeds: np.ndarray, positions: np.ndarray) -> Drawn:
    from minivllm.kernels.triton import draw as kernels

    return kernels.draw(probs, *_noise(seeds, positions, probs.device))


def kernel_filter(probs: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> None:
    from minivllm.kernels.triton import draw as kernels

    if not ((top_k > 0) | (top_p < 1) | (min_p > 0)).any():
        return
    limits = top_k.astype(np.int64), top_p.astype(np.float64), min_p.astype(np.float32)
    cuts = kernels.find_cuts(probs, *(upload(x, probs.device) for x in limits))
    probs.masked_fill_(probs < cuts[:, None], 0)


def kernel_reject(
    probs: Tensor, drafts: np.ndarray, known: Sequence[Tensor | None], seeds: np.ndarray, positions: np.ndarray
) -> Drawn:
    from minivllm.kernels.triton import draw as kernels

    given = [q for q in known if q is not None]
    rows = np.cumsum([q is not None for q in known]) - 1
    rows[[q is None for q in known]] = -1
    width = pad_to_blocks(probs.new_empty(1, max(map(len, given), default=0))).shape[1]
    draft_probs = probs.new_zeros(len(given), width)
    for row, q in zip(draft_probs, given, strict=True):
        row[: len(q)] = q
    guesses, draft_rows = (upload(x.astype(np.int64), probs.device) for x in (drafts, rows))
    noise = _noise(seeds, positions, probs.device)
    return kernels.reject(probs, guesses, draft_probs if given else None, draft_rows, *noise)


def _noise(seeds: np.ndarray, positions: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    return upload(seeds.view(np.int64), device), upload(positions.astype(np.int64), device)


# --- proofs: a few rows of which every kind of work is needed


def _rows(device: torch.device) -> tuple[Tensor, np.ndarray, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    probs = pad_to_blocks(torch.randn(4, 4200, generator=generator) * 3).softmax(-1)
    return probs.to(device), np.arange(4, dtype=np.uint64) * np.uint64(2**62 + 1), np.arange(4) * 1001


def proves_draw(device: torch.device) -> bool:
    return _same(kernel_draw(*_rows(device)), draw(*_rows(device)))


def proves_filter(device: torch.device) -> bool:
    (probs, _, _), num = _rows(device), 4
    limits = np.arange(num) * 9, np.linspace(0.4, 1, num), np.linspace(0, 0.1, num)
    wanted = probs.masked_fill(probs < find_cuts_by_sort(probs, *(torch.from_numpy(x).to(device) for x in limits)), 0)
    kernel_filter(probs, *limits)
    return torch.equal(probs, wanted)


def proves_reject(device: torch.device) -> bool:
    probs, seeds, positions = _rows(device)
    known = [q if i % 2 else None for i, q in enumerate(probs.flip(0)[:, :4000])]
    drafts = probs.argmax(-1).clamp(max=3999).cpu().numpy()
    drafts[0] = -1
    arguments = drafts, known, seeds, positions
    return _same(kernel_reject(probs.clone(), *arguments), reject(probs.clone(), *arguments))


def _same(got: Drawn, wanted: Drawn) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
