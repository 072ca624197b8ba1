"""min-p, top-k, top-p and the draw, on probabilities.

All three filters keep the head of the descending order, so together they are one number per row, a *cut*: tokens with
p >= cut stay. In turn (vLLM V1's order), each on what the one before left:

    min-p   p >= min_p * largest p
    top-k   p >= the k-th largest p
    top-p   the mass of strictly likelier tokens is < top_p * the mass that is left

Tokens as likely as the cut stay too: the result never depends on how a sort breaks ties. On a CPU a cut comes from the
few largest values nearly always, found in the blocks with the largest maxima: the vocabulary is not sorted (find_cut).
On other devices one batched sort finds all cuts (find_cuts_by_sort).

The draw is an exponential race: the token with the least noise / probability wins, the noise being exponential (equal
to the Gumbel-max trick; Yellott 1977). It is run in two rounds, among blocks of 64 tokens and then inside the winner,
so that it takes V/64 + 64 random numbers and not V. Noise belongs to a token, so a small change of the logits (another
batch size, another kernel) rarely changes the winner: measured at 1 % noise, 0.3 % of the draws, against 17 % when one
uniform number is sent through the cumulative distribution. A token of probability 0 never wins.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling.noise import make_noise
from minivllm.upload import upload

BLOCK = 64  # tokens
NUM_HEAD = 256  # at least so many of the largest values are looked at first


def pad_to_blocks(logits: Tensor) -> Tensor:
    """[S, V] -> [S, V rounded up to BLOCK]; the tokens added can never be drawn."""
    extra = -logits.shape[1] % BLOCK
    return torch.nn.functional.pad(logits, (0, extra), value=float("-inf")) if extra else logits


def draw(probs: Tensor, seeds: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """probs [S, V] fp32 >= 0, V a multiple of BLOCK, need not sum to 1; seeds [S] uint64, positions [S] int64.

    -> (tokens [S] int64, valid [S] bool). valid is False where the mass is 0, NaN or infinite; the token is then 0.
    """
    blocks = probs.view(len(probs), -1, BLOCK)  # [S, B, BLOCK]
    mass = blocks.sum(-1).double()  # [S, B]
    total = mass.sum(-1)  # [S]
    valid = torch.isfinite(total) & (total > 0)
    noise, device = make_noise(seeds, positions, probs.device), probs.device
    block = _race(noise(torch.arange(blocks.shape[1], device=device), stream=0), mass)  # [S]
    lanes = block[:, None] * BLOCK + torch.arange(BLOCK, device=device)  # [S, BLOCK]: token ids
    inside = blocks[torch.arange(len(probs), device=device), block]  # [S, BLOCK]
    tokens = block * BLOCK + _race(noise(lanes, stream=1), inside.double())
    return torch.where(valid, tokens, 0), valid


def _race(noise: Tensor, rates: Tensor) -> Tensor:
    """noise [S, N] > 0, rates [S, N] >= 0, both float64 -> [S]: who is first; a rate of 0 never arrives."""
    return (noise / rates).argmin(-1)


def apply_filters(probs: Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> None:
    """Zeroes, in place, what the filters drop. probs [S, V] fp32, V a multiple of BLOCK; top_k [S] int64, 0: off;
    top_p [S] in (0, 1], 1: off; min_p [S] in [0, 1], 0: off. A row that holds NaN is left alone."""
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if not len(filtered):
        return
    if probs.device.type == "cpu":
        return _apply_on_cpu(probs, filtered, top_k, top_p, min_p)
    cuts = find_cuts_by_sort(probs, *(upload(x, probs.device) for x in (top_k, top_p, min_p)))
    probs.masked_fill_(probs < cuts, 0)


def _apply_on_cpu(probs: Tensor, filtered: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> None:
    blocks = probs.view(len(probs), -1, BLOCK)  # [S, B, BLOCK]
    peaks = blocks.amax(-1).numpy()  # [S, B]
    blocks = blocks.numpy()
    for i in filtered.tolist():
        cut = find_cut(blocks[i], peaks[i], int(top_k[i]), float(top_p[i]), float(min_p[i]))
        _drop_below(cut, blocks[i], peaks[i])


def _drop_below(cut: np.float32, blocks: np.ndarray, peaks: np.ndarray) -> None:
    """In place; most blocks hold nothing to keep and are cleared whole."""
    some = np.flatnonzero(~(peaks < cut))  # NaN stays
    kept = blocks[some]
    kept[kept < cut] = 0
    blocks[:] = 0
    blocks[some] = kept


def find_cut(
    blocks: np.ndarray, peaks: np.ndarray, top_k: int, top_p: float, min_p: float, num_head: int = NUM_HEAD
) -> np.float32:
    """The least probability kept of one row: its values [B, BLOCK] and the largest of each block [B]."""
    cut = np.float32(min_p) * peaks.max()
    if np.isnan(cut) or (top_k == 0 and top_p >= 1):
        return np.nan_to_num(cut)
    # n blocks whose peaks are at or above a bound hold at least n values at or above it.
    nth = max(len(peaks) - (min(top_k, num_head) or num_head), 0)
    bound = np.partition(peaks, nth)[nth]
    head = _at_least(blocks, peaks, max(bound, cut))
    if len(head) < top_k < blocks.size and bound > cut:
        bound = np.partition(blocks, blocks.size - top_k, axis=None)[blocks.size - top_k]
        head = _at_least(blocks, peaks, max(bound, cut))
    whole = bound <= cut  # the head is all that is left
    if 0 < top_k <= len(head):
        cut = max(cut, head[top_k - 1])
        head = head[: np.searchsorted(-head, -cut, side="right")]
        whole = True
    if top_p >= 1:
        return cut
    mass = (head if whole else blocks[blocks >= cut]).sum(dtype=np.float64)
    num_kept = _nucleus(head, top_p * mass)
    if num_kept == len(head) and not whole:
        # Tokens below this together weigh less than 1 - top_p: none of them can be kept. (0.999: rounding.)
        head = _at_least(blocks, peaks, max(cut, 0.999 * (1 - top_p) * mass / blocks.size))
        num_kept = _nucleus(head, top_p * mass)
    return head[num_kept - 1]


def _at_least(blocks: np.ndarray, peaks: np.ndarray, least: float) -> np.ndarray:
    """All values >= least, descending."""
    near = blocks[peaks >= least]
    return np.sort(near[near >= least])[::-1]


def _nucleus(head: np.ndarray, mass: float) -> int:
    """How many of the descending values have less than `mass` before them; at least one."""
    return int(np.searchsorted(head.cumsum(dtype=np.float64)[:-1], mass)) + 1


def find_cuts_by_sort(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """find_cut for all rows at once: probs [S, V], parameters [S] -> [S, 1]."""
    ordered = probs.sort(-1, descending=True).values
    cuts = min_p[:, None].to(probs.dtype) * ordered[:, :1]
    kth = ordered.gather(1, top_k.clamp(1, probs.shape[1])[:, None] - 1)
    cuts = torch.where(top_k[:, None] > 0, torch.maximum(cuts, kth), cuts)
    running = torch.where(ordered >= cuts, ordered, 0).cumsum(-1, dtype=torch.float64)
    num_kept = (running[:, :-1] < top_p[:, None] * running[:, -1:]).sum(-1, keepdim=True)
    return torch.where(top_p[:, None] < 1, torch.maximum(cuts, ordered.gather(1, num_kept)), cuts)
