"""What a step takes as a sum of terms, fitted to steps that were measured.

    seconds = step + sum over pieces of slope * tokens in that piece
            + per request, per sampled row, per prompt, and once for any prompt
            + sum of decodes' contexts + prompts' contexts + pairs of a query and a key that it sees (squared lengths)
            + per move of blocks (to the host and back, copies), and tokens whose K and V are moved or copied

Tokens of a step are taken piece by piece (from 0 to 1, 2, 4, 8 ...), because a product of few rows waits for memory and
one of many computes, and kernels change in between: a line through all is off by half somewhere. No term is negative
(Lawson and Hanson, 1974): nothing gets faster by more work, so outside of what was measured the last piece goes on.
Least squares are of relative errors. Of a recorded run, steps that something else on the machine made OUTLIER times as
long as the rest says can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from minivllm.simulate.cost import Step, num_pairs

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # where pieces of the tokens of a step may begin
LEAST_ABOVE = 3  # different numbers of tokens that lie in the last piece: else it is one with the piece before
FOLDS = 5
OUTLIER = 1.5
ROUNDS = 4
LEAST_SECONDS, LEAST_SHARE = 1e-9, 0.1  # of a prediction that others are relative to
PIECE = "tokens_from_"
OTHERS = (
    "step",
    "request",
    "sample",
    "prompts",
    "prompt",
    "decode_context",
    "prompt_context",
    "pair",
    "move",
    "moved_token",
    "copied_token",
)
KINDS = ("decodes", "prompts", "both", "moves")  # of steps, whose errors are told apart


class Sample(NamedTuple):
    """A step that was measured. num_moved, num_copied: tokens of the blocks that went before it."""

    step: Step
    seconds: float
    num_moved: int = 0
    num_copied: int = 0

    @property
    def kind(self) -> str:
        if not len(self.step.num_new):
            return "moves"
        is_decode = self.step.num_new == 1
        return "decodes" if is_decode.all() else "both" if is_decode.any() else "prompts"


def names_of(knots: Sequence[int]) -> list[str]:
    return [*OTHERS, *(f"{PIECE}{knot}" for knot in knots)]


def terms_of(knots: Sequence[int], step: Step, num_moved: int = 0, num_copied: int = 0) -> np.ndarray:
    """How much there is of each of names_of(knots): [T] float64."""
    num_new, start = step.num_new, step.start
    found = np.zeros(len(OTHERS) + len(knots))
    found[len(OTHERS) - 3 : len(OTHERS)] = bool(num_moved) + bool(num_copied), num_moved, num_copied
    if not len(num_new):
        return found
    is_prompt = num_new > 1
    new, before, num_prompts = num_new[is_prompt], start[is_prompt], int(is_prompt.sum())
    found[: len(OTHERS) - 3] = (
        1,
        len(num_new),
        step.num_samples,
        min(num_prompts, 1),
        num_prompts,
        start.sum() - before.sum(),
        before.sum(),
        num_pairs(new, before, None) if num_prompts else 0,
    )
    ends = (*knots[1:], np.inf)
    tokens = float(num_new.sum())
    found[len(OTHERS) :] = [min(max(tokens - low, 0.0), high - low) for low, high in zip(knots, ends, strict=True)]
    return found


def knots_for(samples: Sequence[Sample]) -> list[int]:
    totals = {int(sample.step.num_new.sum()) for sample in samples}
    return [knot for knot in KNOTS if not knot or sum(total > knot for total in totals) >= LEAST_ABOVE]


class Error(msgspec.Struct, frozen=True):
    """Of |predicted / measured - 1|."""

    mean: float
    p90: float
    num_steps: int


class Fit(NamedTuple):
    seconds: Mapping[str, float]  # of one of each term
    errors: Mapping[str, Error]  # by kind of step, and "all": of steps that were held out
    predicted: Sequence[float]  # seconds of each sample, by a fit that had not seen it
    num_left_out: int  # outliers


def fit(samples: Sequence[Sample], outlier: float = np.inf) -> Fit:
    """Errors are of FOLDS fits, each without a part of each kind of samples, of which there must be some. outlier: so
    many times what the others say is left out."""
    knots = knots_for(samples)
    terms = np.array([terms_of(knots, s.step, s.num_moved, s.num_copied) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    kept = kept_by(terms, seconds, outlier)
    kinds = np.array([sample.kind for sample in samples])
    fold = _folds(kinds)
    predicted = np.zeros(len(samples))
    for number in range(FOLDS):
        held_out = fold == number
        learn = kept & ~held_out
        predicted[held_out] = terms[held_out] @ solve(terms[learn], seconds[learn])
    off = np.abs(predicted / seconds - 1)
    errors = {kind: _error(off[kept & (kinds == kind)]) for kind in KINDS if (kept & (kinds == kind)).any()}
    found = solve(terms[kept], seconds[kept])
    return Fit(
        dict(zip(names_of(knots), found.tolist(), strict=True)),
        {"all": _error(off[kept]), **errors},
        predicted.tolist(),
        int((~kept).sum()),
    )


def _folds(kinds: np.ndarray) -> np.ndarray:
    """[N] int: of each kind in turn."""
    fold = np.zeros(len(kinds), np.int64)
    for kind in KINDS:
        of_kind = kinds == kind
        fold[of_kind] = np.arange(of_kind.sum()) % FOLDS
    return fold


def kept_by(terms: np.ndarray, seconds: np.ndarray, outlier: float) -> np.ndarray:
    """[N] bool. Found by fits in which a sample counts less the further off it is."""
    if not np.isfinite(outlier):
        return np.ones(len(seconds), bool)
    weights, ratio = np.ones(len(seconds)), np.ones(len(seconds))
    for _ in range(ROUNDS):
        ratio = seconds / np.maximum(terms @ solve(terms, seconds, weights), LEAST_SECONDS)
        weights = 1 / np.sqrt(np.maximum(np.abs(ratio - 1), 0.02))
    return ratio < outlier


def solve(terms: np.ndarray, seconds: np.ndarray, weights: np.ndarray | float = 1.0) -> np.ndarray:
    """Seconds of each term, relative errors squared and summed the least. terms [N, T], seconds and weights [N].

    An error is relative to what is predicted, found in rounds: relative to what was measured, a step that was held up
    would count less than one that was lucky, and the sum of all steps would come out too short."""
    expected, found = seconds, np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        found = _weighted(terms, seconds, weights / expected)
        expected = np.maximum(terms @ found, LEAST_SHARE * seconds)
    return found


def _weighted(terms: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    weighted = terms * weights[:, None]
    scale = np.sqrt((weighted**2).sum(0))  # terms are as different as tokens and pairs of them
    known = scale > 0
    found = np.zeros(terms.shape[1])
    found[known] = nnls(weighted[:, known] / scale[known], seconds * weights) / scale[known]
    return found


def nnls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 for which |a @ x - b| is least: Lawson and Hanson's active sets. a [M, N], b [M] -> [N]"""
    x = np.zeros(a.shape[1])
    active = np.zeros(a.shape[1], bool)  # terms that are not held at 0
    tolerance = 1e-10 * np.abs(a.T @ b).max(initial=0.0)
    for _ in range(3 * a.shape[1]):
        gradient = np.where(active, -np.inf, a.T @ (b - a @ x))
        if active.all() or gradient.max() <= tolerance:
            break
        active[gradient.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            falls = active & (wanted <= 0)
            if not falls.any():
                x = wanted
                break
            share = (x[falls] / np.maximum(x[falls] - wanted[falls], 1e-300)).min()
            x += share * (wanted - x)
            active &= x > 1e-14
            x[~active] = 0.0
    return x


def _error(off: np.ndarray) -> Error:
    return Error(round(float(off.mean()), 5), round(float(np.percentile(off, 90)), 5), len(off))


def fit_host(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(requests in it, seconds that the host took) of each step -> seconds a step, and of each request in it. The
    median of each number of requests counts: pauses of the machine are not the host's work."""
    by_count: dict[int, list[float]] = {}
    for count, seconds in steps:
        by_count.setdefault(count, []).append(seconds)
    counts = np.array(sorted(by_count), float)
    medians = np.array([np.median(by_count[int(count)]) for count in counts])
    weights = np.sqrt([len(by_count[int(count)]) for count in counts])
    terms = np.stack([np.ones_like(counts), counts], 1)
    each, request = nnls(terms * (weights / medians)[:, None], weights)
    return float(each), float(request)
