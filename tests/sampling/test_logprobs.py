from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.sampling.logprobs import find_logprobs, read_logprobs, with_chosen


def position_logprobs(logits, tokens, num_top):
    columns = find_logprobs(logits, torch.as_tensor(tokens), num_top)
    return read_logprobs([column.numpy() for column in columns], [num_top] * len(tokens))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_taken_token_first_then_the_likeliest_with_log_softmax_values(num_top):
    logits = torch.randn(130, 50, generator=torch.Generator().manual_seed(0)) * 3
    tokens = np.arange(130) % 50
    expected = logits.double().log_softmax(-1)
    for i, entries in enumerate(position_logprobs(logits, tokens, num_top)):
        assert len(entries) == 1 + num_top
        assert entries[0][0] == tokens[i]
        best = expected[i].argsort(descending=True)
        assert [e[0] for e in entries[1:]] == best[:num_top].tolist()
        assert [e[2] for e in entries[1:]] == list(range(1, num_top + 1))
        for token, logprob, rank in entries:
            # fp32: one rounding of a logit below 16 (1e-6) and one of the log-sum-exp (1e-6).
            assert logprob == pytest.approx(expected[i, token].item(), abs=4e-6)
            assert rank == (expected[i] >= expected[i, token]).sum()


def test_equal_logits_share_the_rank_that_counts_them_all():
    logits = torch.tensor([[3.0, 1.0, 3.0, 1.0, 1.0, 0.0]])
    (entries,) = position_logprobs(logits, np.array([3]), 3)
    assert entries[0][2] == 5
    assert [e[2] for e in entries[1:]] == [2, 2, 5]


def test_chosen_tokens_stand_in_the_place_of_the_likeliest_in_their_rows_alone():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 3
    logits[2, 7] = logits[2, 9]
    tokens, chosen = torch.tensor([3, 4, 9, 5]), torch.tensor([[7, 0], [49, 9]])
    found = with_chosen(find_logprobs(logits, tokens, 3), logits, torch.tensor([0, 2]), chosen)
    rows = read_logprobs([column.numpy() for column in found], [2, 3, 2, 3])
    plain = position_logprobs(logits, tokens, 3)
    assert rows[1] == plain[1] and rows[3] == plain[3]
    expected = logits.double().log_softmax(-1)
    for i, ids in ((0, (3, 7, 0)), (2, (9, 49, 9))):
        assert tuple(entry[0] for entry in rows[i]) == ids
        for token, logprob, rank in rows[i]:
            assert logprob == pytest.approx(expected[i, token].item(), abs=4e-6)
            assert rank == (logits[i] >= logits[i, token]).sum()


def test_the_top_of_a_large_vocabulary_is_the_top_of_its_blocks():
    logits = torch.randn(3, 6400, generator=torch.Generator().manual_seed(1))
    for entries, expected in zip(position_logprobs(logits, np.zeros(3, int), 20), logits.topk(20).indices, strict=True):
        assert [e[0] for e in entries[1:]] == expected.tolist()


def test_more_alternatives_than_tokens_gives_all_tokens():
    (entries,) = position_logprobs(torch.zeros(1, 3), np.array([1]), 20)
    assert len(entries) == 4
