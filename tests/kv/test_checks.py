"""check(), which tests call between two steps: each way to break what it guards is found, and named."""

from __future__ import annotations

import pytest

from minivllm.kv.contiguous import Buddies, ContiguousKVManager, Run, reserve_oracle
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.none import NoKV
from minivllm.kv.pool import BlockPool
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.kv.store import BlockStore, StoredKV
from minivllm.kv.swap import Kept, Swap
from minivllm.request import Request, SamplingParams


def request(name: str, num_tokens: int) -> Request:
    return Request(name, SamplingParams(max_tokens=4, ignore_eos=True), list(range(num_tokens)), num_tokens)


def computed(kv, name: str, num_tokens: int) -> Request:
    req = request(name, num_tokens)
    kv.allocate(req, num_tokens - kv.lookup(req))
    req.num_computed_tokens = num_tokens
    kv.commit(req)
    kv.check()
    return req


# Each takes something sound, and breaks it.


def a_count_that_is_off(pool):
    pool.num_free -= 1


def a_block_in_use_on_the_free_list(pool):
    pool.ref_counts[4] = 1


def a_block_that_is_nowhere(pool):
    pool.ref_counts[0] = 0


def a_torn_list(pool):
    pool._prev[4] = 4


@pytest.mark.parametrize(
    "break_it, named",
    [
        (a_count_that_is_off, "^the free list and its count disagree"),
        (a_block_in_use_on_the_free_list, "^a block in use stands on the free list"),
        (a_block_that_is_nowhere, "^free [+] in use != total"),
        (a_torn_list, "^the free list is torn"),
    ],
)
def test_a_pool(break_it, named):
    pool = BlockPool(6)
    pool.take(2)
    pool.check()
    break_it(pool)
    with pytest.raises(AssertionError, match=named):
        pool.check()


def a_block_twice_in_a_table(kv):
    kv.tables["a"].blocks[1] = kv.tables["a"].blocks[0]


def a_block_that_no_table_counts(kv):
    kv.tables["a"].blocks.pop()


def a_request_in_two_places(kv):
    kv.swap.kept["a"] = Kept([], 0, 0)


def usage_that_nobody_updated(kv):
    kv.usage.num_cached += 1


def a_broken_pool(kv):
    kv.pool.num_free += 1


def a_host_block_that_nobody_counts(kv):
    kv.swap.kept["gone"] = Kept([0], 4, 0)


def a_broken_pool_of_the_host(kv):
    kv.swap.pool.num_free += 1


@pytest.mark.parametrize(
    "break_it, named",
    [
        (a_block_twice_in_a_table, "^a table names a block twice"),
        (a_block_that_no_table_counts, "^a reference count differs from the tables that name the block"),
        (a_request_in_two_places, "^a request is on the host and on the device"),
        (usage_that_nobody_updated, r"^usage says KVUsage\(num_total=10, num_free=7, num_cached=1,.*the pool KVUsage"),
        (a_broken_pool, "^the free list and its count disagree"),
        (a_host_block_that_nobody_counts, "^a host block's references differ from the tables that name it"),
        (a_broken_pool_of_the_host, "^the free list and its count disagree"),
    ],
)
def test_a_paged_manager(break_it, named):
    kv = PagedKVManager(10, 4, HashPrefix(seed="test"), num_host_blocks=4, swap_policy=Swap())
    computed(kv, "a", 9)
    break_it(kv)
    with pytest.raises(AssertionError, match=named):
        kv.check()


def test_a_store_of_blocks():
    store = BlockStore(4)
    kv = StoredKV(10, 4, HashPrefix(seed="test"), store=store)
    computed(kv, "a", 9)
    store._free.append(store._free[0])
    with pytest.raises(AssertionError, match="^a slot is in two places, or in none"):
        kv.check()


def two_buddies_side_by_side(buddies):
    run = buddies._free[3].popitem()[0]
    buddies._free[2] |= {run: None, run + 4: None}


def a_run_that_is_not_aligned(buddies):
    del buddies._free[3][0]
    buddies._free[3][4] = None


def a_count_of_runs_that_is_off(buddies):
    buddies.num_free += 1


@pytest.mark.parametrize(
    "break_it, named",
    [
        (two_buddies_side_by_side, "^the run at [04] and its buddy were not merged"),
        (a_run_that_is_not_aligned, "^the run at 4 is not aligned to its size"),
        (a_count_of_runs_that_is_off, "^the free runs and their count disagree"),
    ],
)
def test_buddies(break_it, named):
    buddies = Buddies(8)
    buddies.check()
    break_it(buddies)
    with pytest.raises(AssertionError, match=named):
        buddies.check()


def a_run_that_lies_on_another(kv):
    kv.runs["b"] = Run(0, 1, 2)


def a_run_that_nobody_holds(kv):
    del kv.runs["a"]


def a_pool_that_is_too_large(kv):
    kv.usage.num_total += 1


def a_run_larger_than_it_need_be(kv):
    kv.runs["a"].num_blocks = 2


def a_table_longer_than_its_run(kv):
    kv.runs["a"].num_blocks = 5


def a_count_of_free_blocks_that_is_off(kv):
    kv.usage.num_free += 1


@pytest.mark.parametrize(
    "break_it, named",
    [
        (a_run_that_lies_on_another, "^runs overlap or blocks are lost between 2 and 0"),
        (a_run_that_nobody_holds, "^runs overlap or blocks are lost between 0 and 4"),
        (a_pool_that_is_too_large, "^the runs do not cover the pool"),
        (a_run_larger_than_it_need_be, "^a run has the wrong order"),
        (a_table_longer_than_its_run, "^a run has the wrong order"),
        (a_count_of_free_blocks_that_is_off, r"^usage says KVUsage\(num_total=16, num_free=13,.*the allocator KVUsage"),
    ],
)
def test_a_contiguous_manager(break_it, named):
    kv = ContiguousKVManager(16, 4, reserve_oracle, 64)
    computed(kv, "a", 10)  # 10 + 4 tokens fill 13 slots: a run of 4 blocks
    break_it(kv)
    with pytest.raises(AssertionError, match=named):
        kv.check()


@pytest.mark.parametrize("num_total, num_free", [(1, 0), (0, 1)])
def test_a_manager_without_blocks(num_total, num_free):
    kv = NoKV(64)
    kv.check()
    kv.usage.num_total, kv.usage.num_free = num_total, num_free
    with pytest.raises(AssertionError, match="^there are no blocks, and some are counted"):
        kv.check()
