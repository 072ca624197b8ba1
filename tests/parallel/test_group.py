"""Rules: the threads that stand for ranks in these tests talk as MPI's and NCCL's ranks do; a device that is alone
computes and copies nothing."""

from __future__ import annotations

import pytest
import torch
from parallel.threads import all_ranks, on_all

from minivllm.parallel.group import ALONE, Ranks
from minivllm.parallel.placement import Placement

RANKS = 3
X = [torch.arange(6.0).view(3, 2) + 10 * rank for rank in range(RANKS)]


def everywhere(run) -> list[torch.Tensor]:
    return on_all(all_ranks(Placement(tp=RANKS)), lambda own: run(own.tp, X[own.tp.rank].clone()))


def test_all_reduce_gives_each_the_sum():
    assert all(torch.equal(found, sum(X)) for found in everywhere(lambda group, x: group.all_reduce(x)))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_lays_the_ranks_side_by_side(axis):
    found = everywhere(lambda group, x: group.all_gather(x, axis))
    assert all(torch.equal(x, torch.cat(X, axis)) for x in found)


def test_reduce_scatter_is_a_share_of_the_rows_of_the_sum():
    found = everywhere(lambda group, x: group.reduce_scatter(x))
    assert torch.equal(torch.cat(found), sum(X)) and all(x.shape == (1, 2) for x in found)


def test_all_to_all_brings_rows_to_their_ranks_in_the_order_of_senders():
    sent = [[2, 0, 1], [0, 3, 0], [1, 1, 1]]  # rank r sends sent[r][i] rows to rank i
    found = everywhere(lambda group, x: group.all_to_all(x, sent[group.rank], [s[group.rank] for s in sent]))
    for rank, rows in enumerate(found):
        wanted = [X[r].split(sent[r])[rank] for r in range(RANKS)]
        assert torch.equal(rows, torch.cat(wanted))


def test_what_is_sent_is_received_in_order_and_may_be_changed_after():
    def run(own: Ranks):
        if own.pp.rank == 0:
            for value in (1.0, 2.0):
                own.pp.send(x := torch.full((2,), value), 1)
                x.zero_()
            return None
        return [own.pp.recv(torch.empty(2), 0).tolist() for _ in range(2)]

    assert on_all(all_ranks(Placement(pp=2)), run)[1] == [[1.0, 1.0], [2.0, 2.0]]


def test_a_rank_that_fails_ends_the_others_with_its_own_error():
    def run(own: Ranks):
        if own.tp.rank == 1:
            raise ValueError("this rank is gone")
        own.tp.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="this rank is gone"):
        on_all(all_ranks(Placement(tp=2)), run)


def test_alone_nothing_is_computed_or_copied():
    x = torch.ones(2)
    assert all(found is x for found in (ALONE.all_reduce(x), ALONE.all_gather(x), ALONE.reduce_scatter(x)))
    assert ALONE.all_to_all(x, [2], [2]) is x


def test_groups_that_are_not_the_placements_are_noticed():
    with pytest.raises(AssertionError, match=r"tp: the group's rank and size are \(0, 1\), the placement's \(0, 2\)"):
        Ranks(Placement(tp=2))
