"""What Triton's kernels are called with, and who calls them: no card is needed for that.

The kernels' place is taken by what their docstrings promise, on the references of torch and numpy. The kernels
themselves run in the area `kernels`, in Triton's interpreter.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

import minivllm.kernels.triton as package
from minivllm.kernels.dispatch import Dispatch
from minivllm.sampling import draws, rejection
from minivllm.sampling.draw import BLOCK, apply_filters, draw, find_cuts_by_sort, pad_to_blocks

CPU = torch.device("cpu")


def check(probs, *columns):
    assert probs.dtype == torch.float32 and probs.shape[1] % BLOCK == 0
    assert all(column.dtype == torch.int64 and column.shape == (len(probs),) for column in columns)


def plain_draw(probs, seeds, positions):
    check(probs, seeds, positions)
    return draw(probs, seeds.numpy().view(np.uint64), positions.numpy())


def plain_cuts(probs, top_k, top_p, min_p):
    check(probs, top_k)
    assert (top_p.dtype, min_p.dtype) == (torch.float64, torch.float32) and len(top_p) == len(min_p) == len(probs)
    return find_cuts_by_sort(probs, top_k, top_p, min_p)[:, 0]


def plain_reject(probs, drafts, draft_probs, draft_rows, seeds, positions):
    check(probs, drafts, draft_rows, seeds, positions)
    assert draft_probs is None or (draft_probs.dtype, draft_probs.shape[1] % BLOCK) == (torch.float32, 0)
    assert draft_rows.min() >= -1
    known = [None if row < 0 else draft_probs[row] for row in draft_rows.tolist()]
    seeds, positions = seeds.numpy().view(np.uint64), positions.numpy()
    return rejection.reject(probs, drafts.numpy(), known, seeds, positions)


@pytest.fixture
def kernels(monkeypatch):
    module = ModuleType("minivllm.kernels.triton.draw")
    module.draw, module.find_cuts, module.reject = plain_draw, plain_cuts, plain_reject
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, "draw", module, raising=False)
    return module


@pytest.fixture
def calls(kernels, monkeypatch):
    """{kernel: the arguments of each call}"""
    seen = {name: [] for name in ("draw", "find_cuts", "reject")}

    def watched(name, kernel):
        return lambda *args: seen[name].append(args) or kernel(*args)

    for name in seen:
        monkeypatch.setattr(kernels, name, watched(name, getattr(kernels, name)))
    return seen


def rows(num: int, vocab_size: int = 300):
    """probs [num, rounded up], seeds of which some do not fit int64, positions in 32 bits."""
    generator = torch.Generator().manual_seed(num)
    probs = pad_to_blocks(torch.randn(num, vocab_size, generator=generator) * 2).softmax(-1)
    return probs, np.arange(num, dtype=np.uint64) * np.uint64(2**63 + 5), np.arange(num, dtype=np.int32) * 7


def same(got, wanted):
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_a_kernel_draws_what_the_reference_draws(kernels):
    assert same(draws.kernel_draw(*rows(5)), draw(*rows(5)))


LIMITS = [(0, 1, 0), (1, 1, 0), (7, 1, 0), (0, 0.6, 0), (0, 1, 0.1), (9, 0.7, 0.01)]


@pytest.mark.parametrize("top_k, top_p, min_p", LIMITS)
def test_a_kernel_filters_rows_of_which_one_at_least_has_a_filter(kernels, calls, top_k, top_p, min_p):
    k, p, m = np.array([0, top_k], np.int32), np.array([1, top_p]), np.array([0, min_p])
    probs, wanted = rows(2)[0], rows(2)[0]
    draws.kernel_filter(probs, k, p, m)
    assert len(calls["find_cuts"]) == ((top_k, top_p, min_p) != (0, 1, 0))
    cuts = find_cuts_by_sort(wanted, *map(torch.from_numpy, (k, p, m.astype(np.float32))))
    wanted[wanted < cuts] = 0
    assert torch.equal(probs, wanted)
    assert not calls["find_cuts"] or (probs[1] == 0).sum() > (probs[0] == 0).sum()


@pytest.mark.parametrize("given", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_a_kernel_rejects_what_the_reference_rejects_whatever_is_known_of_the_drafts(kernels, calls, given):
    """A draft was drawn from a distribution, narrower than the model's or not, or proposed for sure; a row has none."""
    probs, seeds, positions = rows(4)
    widths = [100, 320, 64, 200]
    known = [probs.flip(0)[i, : widths[i]].clone() if i in given else None for i in range(4)]
    drafts = np.array([3, 8, -1, 5], np.int32)
    if 2 in given:
        drafts[2] = 1
    arguments = drafts, known, seeds, positions
    assert same(draws.kernel_reject(probs.clone(), *arguments), rejection.reject(probs.clone(), *arguments))
    ((_, _, draft_probs, draft_rows, *_),) = calls["reject"]
    assert draft_rows.tolist() == [given.index(i) if i in given else -1 for i in range(4)]
    if not given:
        assert draft_probs is None
    else:
        widest = max(widths[i] for i in given)
        assert draft_probs.shape == (len(given), -(-widest // BLOCK) * BLOCK)


PROOFS = {"draw": draws.proves_draw, "find_cuts": draws.proves_filter, "reject": draws.proves_reject}


@pytest.mark.parametrize("name", PROOFS)
def test_a_proof_holds_for_a_kernel_that_is_right_alone(kernels, monkeypatch, name):
    assert PROOFS[name](CPU)
    right = getattr(kernels, name)

    def one_row_is_wrong(*args):
        answer = right(*args)
        (answer if name == "find_cuts" else answer[0])[2] += 1
        return answer

    monkeypatch.setattr(kernels, name, one_row_is_wrong)
    assert not PROOFS[name](CPU)


def test_what_a_proof_tries_is_more_than_a_block_of_each_kind(kernels, calls):
    """Several of a kernel's chunks, some limits off, a seed beyond int64, drafts that are known, sure or missing."""
    assert all(proof(CPU) for proof in PROOFS.values())
    ((probs, seeds, positions),) = calls["draw"]
    assert probs.shape[1] > 4096 and (probs[:, -1] == 0).all()
    assert (seeds < 0).any() and len(set(positions.tolist())) == 4
    ((_, top_k, top_p, min_p),) = calls["find_cuts"]
    assert (top_k == 0).any() and (top_k > 0).any() and (top_p < 1).any() and (top_p == 1).any()
    assert (min_p == 0).any() and (min_p > 0).any()
    ((_, drafts, draft_probs, draft_rows, *_),) = calls["reject"]
    assert drafts[0] == -1 and (drafts[1:] >= 0).all() and draft_rows.tolist() == [-1, 0, -1, 1]
    assert draft_probs.shape[1] < probs.shape[1]


class Only:
    """A Dispatch that uses these kernels."""

    def __init__(self, *names: str):
        self.names, self.asked = names, {}

    def uses(self, name, proof) -> bool:
        self.asked[name] = proof
        return name in self.names


def test_each_kernel_is_chosen_by_itself():
    nothing = Only()
    assert draws.choose_draws(nothing) == draws.TORCH == (apply_filters, draw, rejection.reject, 32)
    assert nothing.asked == {
        "draw": draws.proves_draw,
        "top-k, top-p and min-p": draws.proves_filter,
        "rejection sampling": draws.proves_reject,
    }
    chosen = draws.choose_draws(Only("draw"))
    assert chosen == draws.TORCH._replace(draw=draws.kernel_draw, num_rows=256)
    chosen = draws.choose_draws(Only("top-k, top-p and min-p", "rejection sampling"))
    assert chosen == draws.TORCH._replace(filter=draws.kernel_filter, reject=draws.kernel_reject)
    assert draws.choose_draws(Dispatch("torch", CPU)) == draws.TORCH
