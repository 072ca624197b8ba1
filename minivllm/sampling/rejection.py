"""Exact rejection sampling of drafts (Leviathan, Kalman and Matias 2023; Chen et al. 2023).

A draft d that was drawn from q is accepted with probability min(1, p(d) / q(d)), p being what the model says; else the
token is drawn from max(p - q, 0), normalised. What comes out is distributed as p, whatever q was: at token t

    q(t) min(1, p(t)/q(t))  +  P(rejected) * max(p(t) - q(t), 0) / P(rejected)  =  p(t).

A proposer that looks a continuation up (n-gram, suffix) proposes one token for sure: its q is 1 at that token, so a
draft is accepted with probability p(d), and else the token is drawn from p without d.

A token that was drawn after a rejection never equals the draft (there max(p - q, 0) is 0), so "accepted" can be read
off the tokens. The coin is one more random number of (seed, position), independent of those of the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling.draw import draw
from minivllm.sampling.uniform import uniform
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.sampling.pick import Draws, Pick

COIN = 2  # the stream of `uniform` for acceptance; 0 and 1 are the draw's

# (row, place) -> the distribution [V] that this draft was drawn from, not normalised; None: it was proposed for sure
DraftProbs = Callable[[int, int], Tensor | None]


def certain(row: int, place: int) -> None:
    return None


class Rejection:
    """A Verifier's `pick_for`."""

    def __init__(self, draft_probs: DraftProbs = certain, draws: Draws | None = None):
        """draws: who draws and rejects; None: this module and draw.py."""
        self.draft_probs = draft_probs
        self._draw, self._reject = (draw, reject) if draws is None else (draws.draw, draws.reject)

    def __call__(self, drafts: np.ndarray, rows: np.ndarray, places: np.ndarray) -> Pick:
        def pick(probs: Tensor, seeds: np.ndarray, positions: np.ndarray, which: np.ndarray) -> tuple[Tensor, Tensor]:
            proposed = drafts[which]
            if not (proposed >= 0).any():
                return self._draw(probs, seeds, positions)
            asked = zip(rows[which].tolist(), places[which].tolist(), proposed.tolist(), strict=True)
            known = [self.draft_probs(row, place) if draft >= 0 else None for row, place, draft in asked]
            return self._reject(probs, proposed, known, seeds, positions)

        return pick


def reject(
    probs: Tensor, drafts: np.ndarray, known: Sequence[Tensor | None], seeds: np.ndarray, positions: np.ndarray
) -> tuple[Tensor, Tensor]:
    """probs [S, V] fp32 >= 0, V a multiple of draw.BLOCK, changed; drafts [S] int64, -1: none, the row is drawn freely;
    known [S]: what each draft was drawn from, not normalised, None: it was proposed for sure; seeds, positions [S] as
    in draw. -> (tokens [S] int64, valid [S] bool)."""
    proposed = np.flatnonzero(drafts >= 0)
    at = upload(proposed, probs.device)
    guesses = upload(drafts[proposed], probs.device)
    p = probs[at]
    p /= p.sum(-1, keepdim=True)
    q = _draft_distributions(p, guesses, [known[i] for i in proposed.tolist()])
    lanes = torch.arange(len(at), device=probs.device)
    coin = uniform(seeds[proposed], positions[proposed], np.zeros(1, np.int64), COIN)[:, 0]
    accepted = upload(coin, probs.device) * q[lanes, guesses] < p[lanes, guesses]
    # Where p and q are equal nothing is left and nothing is rejected; p stands in, and is not looked at.
    rest = (p - q).clamp_(min=0)
    probs[at] = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    tokens, valid = draw(probs, seeds, positions)
    tokens[at] = torch.where(accepted, guesses, tokens[at])
    return tokens, valid


def _draft_distributions(p: Tensor, guesses: Tensor, known: Sequence[Tensor | None]) -> Tensor:
    q = torch.zeros_like(p)
    for i, own in enumerate(known):
        if own is None:
            q[i, guesses[i]] = 1
        else:
            q[i, : len(own)] = own / own.sum()
    return q
