"""What an onlooker may ask of any manager: the state of each block, and which blocks a request has (kv/base.py)."""

from __future__ import annotations

import pytest

from minivllm.kv.base import CACHED, FREE, SHARED, USED, KVUsage, Moves
from minivllm.kv.contiguous import ContiguousKVManager, reserve_oracle
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.none import NoKV
from minivllm.kv.pool import BlockPool
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.plan import StepPlan
from minivllm.request import Request, SamplingParams


def request(name: str, tokens: int | list[int], max_tokens: int = 4) -> Request:
    tokens = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Request(name, SamplingParams(max_tokens=max_tokens, ignore_eos=True), tokens, len(tokens))


def computed(kv, req: Request) -> Request:
    start = kv.lookup(req)
    assert kv.allocate(req, req.num_tokens - start) is not None
    req.num_computed_tokens = req.num_tokens
    kv.commit(req)
    return req


def test_a_block_is_free_or_cached_or_used_or_shared():
    kv = PagedKVManager(12, 4, HashPrefix(seed="test"))
    assert kv.block_map() == bytes([FREE] * 12)
    a, b = computed(kv, request("a", 9)), computed(kv, request("b", 13))
    assert (kv.blocks_of("a"), kv.blocks_of("b")) == ([0, 1, 2], [0, 1, 3, 4])
    assert kv.block_map() == bytes([SHARED, SHARED, USED, USED, USED] + [FREE] * 7)
    kv.free(b)  # its third block is full, so it stays known; its last one never was
    assert kv.block_map() == bytes([USED, USED, USED, CACHED] + [FREE] * 8)
    kv.free(a)
    assert kv.block_map() == bytes([CACHED, CACHED, FREE, CACHED] + [FREE] * 8)
    assert kv.blocks_of("a") == () and kv.blocks_of("nobody") == ()


def test_the_map_of_a_pool_counts_what_its_usage_counts():
    """Of many requests that come, share and go: a block that is on the map is in the count, and the other way round."""
    kv, live = PagedKVManager(40, 4, HashPrefix(seed="test")), []
    for i in range(60):
        stem = [i % 3] * (4 * (i % 5))
        live.append(computed(kv, request(str(i), [*stem, i, i, i])))
        if len(live) > 4:
            kv.free(live.pop(i % 4))
        states = kv.block_map()
        assert states.count(CACHED) == kv.usage.num_cached
        assert states.count(FREE) + states.count(CACHED) == kv.usage.num_free
        assert states.count(SHARED) == sum(count > 1 for count in kv.pool.ref_counts)


def test_what_is_forgotten_is_free_and_nobody_finds_it():
    kv = PagedKVManager(8, 4, HashPrefix(seed="test"))
    kv.free(computed(kv, request("a", 9)))
    kept = computed(kv, request("b", [7] * 5))
    kv.forget_cached()
    assert kv.usage.num_cached == 0 and CACHED not in kv.block_map()
    assert kv.lookup(request("c", 9)) == 0
    assert kv.lookup(request("d", [7] * 5)) == 4, "what a request names is not given up"
    kv.free(kept)
    kv.check()


def test_the_free_list_can_be_read_from_its_end():
    pool = BlockPool(5)
    pool.release(pool.take(2))
    assert list(pool.newest_free()) == [1, 0, 4, 3, 2] == list(pool.free_list())[::-1]


def test_a_contiguous_pool_has_free_blocks_and_used_ones_also_those_that_are_only_reserved():
    kv = ContiguousKVManager(12, 4, reserve_oracle, 64)
    assert kv.lookup(req := request("a", 6)) == 0
    kv.allocate(req, 6)  # 6 + 4 tokens fill 9 slots: 3 blocks, and the allocator took 4
    kv.allocate(request("b", 2, 1), 2)
    assert (list(kv.blocks_of("a")), list(kv.blocks_of("b"))) == ([8, 9, 10], [0])
    assert kv.blocks_of("nobody") == ()
    assert kv.block_map() == bytes([USED] + [FREE] * 7 + [USED] * 4)
    kv.forget_cached()  # it has nothing of the kind
    kv.free(req)
    assert kv.block_map() == bytes([USED] + [FREE] * 11)


def test_nothing_of_a_contiguous_pool_is_shared_or_found():
    kv = ContiguousKVManager(16, 4, reserve_oracle, 64)
    parent = computed(kv, request("a", 9))
    assert kv.fork(parent, request("b", 9)) == 0
    kv.free(parent)
    assert kv.lookup(request("c", 9)) == 0
    assert kv.capacity == 16 * 4 - 1, "a reservation may be for one slot more than the last token needs"
    assert [kv.most_blocks(slots) for slots in (1, 4, 5, 12, 13, 17)] == [1, 1, 2, 4, 4, 8], "runs are powers of two"
    assert ContiguousKVManager(13, 4, reserve_oracle, 64).capacity == 8 * 4 - 1, "the longest run of 13 blocks has 8"


def test_a_model_that_keeps_nothing_has_room_for_every_request_and_finds_none():
    kv, req = NoKV(512), request("a", 40)
    assert (kv.capacity, kv.num_lent, kv.usage) == (512, 0, KVUsage(0, 0))
    assert kv.moves == Moves()
    assert kv.lookup(req) == 0
    assert kv.allocate(req, 40, lookahead=3) == ()
    kv.commit(req)
    kv.free(req)
    assert kv.block_map() == b"" and kv.blocks_of("a") == ()
    assert kv.most_blocks(512) == 0
    kv.check()


def test_moves_are_handed_over_once_and_each_in_its_column():
    moves = Moves([(0, 1)], [(2, 3)], [(4, 5)], ["why"])
    plan = StepPlan(0)
    moves.drain(plan)
    assert (plan.swap_out, plan.swap_in, plan.copies, plan.notes) == ([(0, 1)], [(2, 3)], [(4, 5)], ["why"])
    assert moves == Moves()
    moves.swap_in.append((6, 7))
    moves.drain(plan)
    assert plan.swap_in == [(2, 3), (6, 7)] and plan.swap_out == [(0, 1)]


@pytest.mark.parametrize("num_tokens, num_blocks", [(4, 1), (5, 2)])
def test_a_pool_is_counted_in_blocks_and_says_how_many_tokens_one_holds(num_tokens, num_blocks):
    kv = PagedKVManager(10, 4, NoPrefix())
    computed(kv, request("a", num_tokens))
    assert kv.usage == KVUsage(num_total=10, num_free=10 - num_blocks, num_cached=0, block_size=4, num_groups=1)
    assert kv.capacity == 40
