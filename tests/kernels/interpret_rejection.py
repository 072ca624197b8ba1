"""Rejection sampling in the interpreter accepts and draws exactly what sampling/rejection.py does. Run by
test_interpreter.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm.kernels.triton import draw as kernels
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.sampling.draw import pad_to_blocks
from minivllm.sampling.rejection import Rejection

assert INTERPRETED
COUNT = 24


def softmax(logits: Tensor) -> Tensor:
    return pad_to_blocks(logits).softmax(-1)


def compare(probs: Tensor, drafts: np.ndarray, q: Tensor | None, q_rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """-> the drafts, and the tokens that both gave."""
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(0, 2**64, len(probs), np.uint64), rng.integers(0, 10**6, len(probs))
    rejection = Rejection(lambda row, place: None if q_rows[row] < 0 else q[q_rows[row]])
    everything = np.arange(len(probs))
    pick = rejection(drafts, everything, everything * 0)
    tokens, valid = pick(probs.clone(), seeds, positions, everything)
    on_device = [torch.from_numpy(x) for x in (drafts, q_rows, seeds.view(np.int64), positions)]
    got, got_valid = kernels.reject(probs, on_device[0], q, *on_device[1:])
    assert torch.equal(got, tokens) and torch.equal(got_valid, valid)
    return on_device[0], tokens


@pytest.mark.parametrize("size, q_size", [(64, 64), (200, 100), (4300, 4300)])
def test_tokens_equal_the_references(size, q_size):
    """Rows with a draft that was drawn, with one that is sure, and with none; p and q do not sum to 1."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(COUNT, size, generator=generator) * 2
    q = softmax(logits[:, :q_size] + torch.randn(COUNT, q_size, generator=generator)) * 3
    drafts = q.multinomial(1, generator=generator)[:, 0].numpy()
    q_rows = np.where(np.arange(COUNT) % 3 == 1, -1, np.arange(COUNT)[::-1])
    drafts[::6] = -1
    drafted, tokens = compare(softmax(logits) * 5, drafts, q.flip(0), q_rows)
    accepted = (tokens == drafted)[drafted >= 0]
    assert 3 < accepted.sum() < len(accepted) - 3


def test_without_draft_distributions_a_draft_is_taken_as_often_as_it_is_likely():
    probs = torch.tensor([[0.0] * 5 + [0.7, 0.0, 0.3] + [0.0] * 56]).repeat(40, 1)
    drafted, tokens = compare(probs, np.full(40, 5), None, np.full(40, -1))
    assert set(tokens.tolist()) == {5, 7} and 22 < (tokens == drafted).sum() < 34


def test_the_edges():
    p = softmax(torch.randn(7, 100))
    q = p.clone()
    drafts = np.full(7, 3)
    drafts[0] = 99  # p and q are equal: always accepted
    p[1, 3] = 0  # the model never says so
    p[2] = 0  # no distribution
    p[3, 7] = torch.nan
    p[4, 50] = torch.inf
    p[5], q[5] = torch.eye(128)[3], torch.eye(128)[3]  # both sure
    q_rows = np.arange(7)
    q_rows[6], p[6] = -1, torch.eye(128)[3]
    _, tokens = compare(p, drafts, q, q_rows)
    assert tokens[0] == 99 and tokens[1] != 3 and tokens[2:].tolist() == [0, 0, 0, 3, 3]
