"""Blocks between two engines: kept until they are sent, and taken before their content comes."""

from __future__ import annotations

import pytest

from minivllm.kv.handover import ReceivingKV, SendingKV
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.kv.store import BlockStore, StoredKV, StoredSendingKV
from minivllm.kv.swap import Swap
from minivllm.request import Request, SamplingParams


def request(name: str, num_tokens: int, num_computed: int = 0) -> Request:
    return Request(name, SamplingParams(), list(range(num_tokens)), num_tokens, num_computed_tokens=num_computed)


def computed(kv, req: Request) -> Request:
    """As a scheduler has it, after a step with all its tokens."""
    start = kv.lookup(req)
    assert kv.allocate(req, req.num_tokens - start) is not None
    req.num_computed_tokens = req.num_tokens
    kv.commit(req)
    kv.check()
    return req


def sending() -> SendingKV:
    return SendingKV(10, 4, NoPrefix())


def receiving(num_blocks: int = 10, index=None) -> ReceivingKV:
    return ReceivingKV(num_blocks, 4, index or NoPrefix())


def test_blocks_of_a_computed_prompt_are_in_use_until_they_are_sent():
    kv = sending()
    kv.free(computed(kv, request("a", 9)))
    assert (kv.pool.num_free, kv.num_lent) == (7, 3)
    kv.check()
    kv.sent("a")
    assert (kv.pool.num_free, kv.num_lent) == (10, 0)
    kv.check()


@pytest.mark.parametrize("num_computed, keep", [(9, True), (5, False)], ids=["preempted", "aborted in its prompt"])
def test_who_has_nothing_to_send_gives_its_blocks_back_at_once(num_computed, keep):
    kv = sending()
    req = computed(kv, request("a", 9))
    req.num_computed_tokens = num_computed
    kv.free(req, keep=keep)
    assert kv.pool.num_free == 10 and not kv.num_lent


@pytest.mark.parametrize("lookahead, num_blocks, sent", [(0, 6, "a"), (4, 7, "ab")])
def test_a_sender_without_room_waits_for_as_much_as_was_asked_for(lookahead, num_blocks, sent):
    kv = sending()
    for name in "ab":
        kv.free(computed(kv, request(name, 16)))
    late = request("c", 24)
    kv.lookup(late)
    assert not kv.waits and kv.allocate(late, 24, lookahead) is None
    for name in sent:
        assert kv.waits
        kv.sent(name)
    assert not kv.waits and len(kv.allocate(late, 24, lookahead)) == num_blocks


KINDS = {
    "sending": SendingKV,
    "receiving": ReceivingKV,
    "stored": lambda *args, **options: StoredKV(*args, store=BlockStore(8), **options),
    "stored and sending": lambda *args, **options: StoredSendingKV(*args, store=BlockStore(8), **options),
}


@pytest.mark.parametrize("kind", KINDS)
def test_who_has_nothing_to_hand_over_is_treated_as_by_any_manager(kind):
    kv, req = KINDS[kind](10, 4, HashPrefix(seed="test"), shares_forks=False), request("a", 6)
    assert not kv.shares_forks and kv.lookup(req) == 0
    assert len(kv.allocate(req, 6, lookahead=3)) == 3
    req.num_computed_tokens = 6
    assert kv.allocate(req, 1, lookahead=6) == [3]
    kv.check()
    kv.free(req, keep=True)
    assert kv.pool.num_free == 10 and kv.num_lent == 0
    kv.check()


@pytest.mark.parametrize("kind", ["sending", "receiving"])
def test_who_is_preempted_waits_on_the_host_if_that_is_the_policy(kind):
    kv = KINDS[kind](10, 4, NoPrefix(), num_host_blocks=4, swap_policy=Swap())
    req = computed(kv, request("a", 9))
    kv.free(req, keep=True)
    assert kv.lookup(req) == 9 and len(kv.moves.swap_out) == 3
    kv.check()


def test_room_is_taken_before_a_request_comes_and_all_but_its_last_token_is_found_there():
    kv, req = receiving(), request("a", 9)
    assert kv.reserve(req) == 8
    assert (kv.pool.num_free, kv.num_lent) == (7, 3)
    reserved = list(kv.tables["a"].blocks)
    again = request("a", 9)  # as the core makes it of what came
    assert kv.lookup(again) == 8
    assert kv.allocate(again, 1) == reserved and not kv.num_lent
    again.num_computed_tokens = 9
    kv.check()
    kv.free(again)
    assert kv.pool.num_free == 10


def test_there_is_no_room_where_those_that_run_need_it():
    kv = receiving()
    assert kv.reserve(request("a", 32), spare=3) is None
    assert kv.pool.num_free == 10 and not kv.tables
    assert not kv._found, "what was found is not kept for who does not come"
    assert kv.reserve(request("a", 32), spare=2) == 31


def test_who_comes_may_have_every_block():
    kv = receiving()
    assert kv.reserve(request("a", 41)) is None
    assert kv.reserve(request("a", 40)) == 39
    assert kv.pool.num_free == 0
    kv.check()


@pytest.mark.parametrize("new_tokens, lookahead, num_blocks", [(1, 0, 3), (4, 0, 3), (5, 0, 4), (1, 4, 4)])
def test_who_came_is_given_what_its_first_step_needs_beyond_what_was_taken(new_tokens, lookahead, num_blocks):
    kv, req = receiving(), request("a", 9)
    kv.reserve(req)
    assert kv.lookup(req) == 8
    assert len(kv.allocate(req, new_tokens, lookahead)) == num_blocks
    kv.check()


def test_what_the_prefix_cache_has_is_not_sent():
    kv = receiving(index=HashPrefix(seed="test"))
    kv.free(computed(kv, request("a", 8)))
    assert kv.reserve(request("b", 11)) == 10 - 8
    assert len(kv.tables["b"].blocks) == 3 and kv.tables["b"].blocks[:2] == [0, 1]
    kv.check()


def test_what_came_is_published_like_what_was_computed():
    kv = receiving(index=HashPrefix(seed="test"))
    req = request("a", 9)
    kv.reserve(req)
    kv.lookup(req)
    kv.allocate(req, 1)
    req.num_computed_tokens = 9
    kv.commit(req)
    kv.free(req)
    assert kv.lookup(request("b", 9)) == 8


def test_room_is_given_up_again_if_nobody_runs_who_would_make_any():
    kv = receiving()
    for name in "abc":
        kv.reserve(request(name, 12))
    running = computed(kv, request("r", 4))
    late = request("d", 16)
    kv.lookup(late)
    assert kv.allocate(late, 16) is None and not kv.num_given_up  # r will end
    kv.free(running)
    kv.lookup(late)
    assert kv.allocate(late, 16) is None and kv.num_given_up == 1
    assert kv.lookup(request("c", 12)) == 0 and kv.lookup(request("b", 12)) == 11  # the newest went
    kv.lookup(late)
    assert kv.allocate(late, 16) is not None
    kv.check()


def test_no_more_room_is_given_up_than_is_wanted_drafts_included():
    kv = receiving()
    for name in "abc":
        kv.reserve(request(name, 9))
    late = request("d", 12)
    kv.lookup(late)
    assert kv.allocate(late, 12, lookahead=5) is None  # 5 blocks, and one is free
    assert kv.num_given_up == 2 and kv.pool.num_free == 7
    kv.check()


def test_an_abort_on_the_way_leaves_nothing():
    kv, req = receiving(), request("a", 9)
    kv.reserve(req)
    kv.free(req)
    assert kv.pool.num_free == 10 and not kv.num_lent and kv.lookup(req) == 0
