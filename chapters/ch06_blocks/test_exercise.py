"""The tests of chapter 6's exercise. They need no model."""

from __future__ import annotations

import random
import time

from exercise import BlockPool, OutOfBlocks


def test_blocks_are_taken_from_the_front_and_freed_to_the_back():
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.release([2, 1, 0])
    assert pool.take(3) == [3, 2, 1]


def test_all_or_nothing():
    pool = BlockPool(3)
    pool.take(1)
    try:
        pool.take(3)
    except OutOfBlocks:
        pass
    else:
        raise AssertionError("three blocks out of two")
    assert pool.take(2) == [1, 2]


def test_a_shared_block_is_free_when_its_last_table_lets_go():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.touch(block)
    pool.touch(block)
    pool.release([block])
    pool.release([block])
    assert pool.take(1) == [1], "a table still names it"
    pool.release([block])
    assert pool.take(1) == [block]


def test_a_free_block_can_be_brought_back_from_the_middle():
    pool = BlockPool(4)
    pool.touch(2)
    assert pool.take(3) == [0, 1, 3]
    pool.release([2])
    assert pool.take(1) == [2]


def test_whatever_happens_no_block_is_lost_or_given_twice():
    """Random calls, beside a model of the pool that is slow and plain."""
    for seed in range(20):
        rng, pool = random.Random(seed), BlockPool(12)
        free, names = list(range(12)), [0] * 12
        for _ in range(200):
            used = [block for block in range(12) if names[block]]
            if rng.random() < 0.4 and free:
                n = rng.randint(0, len(free))
                taken, free = free[:n], free[n:]
                assert pool.take(n) == taken
                for block in taken:
                    names[block] = 1
            elif rng.random() < 0.3:
                block = rng.randrange(12)
                pool.touch(block)
                if block in free:
                    free.remove(block)
                names[block] += 1
            elif used:
                block = rng.choice(used)
                pool.release([block])
                names[block] -= 1
                if not names[block]:
                    free.append(block)
        assert pool.take(len(free)) == free, f"seed {seed}"


def test_a_large_pool_is_no_slower():
    """A search through 300,000 free blocks takes milliseconds; these 3,000 calls may take a second together."""
    pool = BlockPool(300_000)
    begin = time.process_time()
    for block in range(150_000, 153_000):
        pool.touch(block)
        assert time.process_time() - begin < 1.0, "does something look through the free blocks?"
    pool.release(range(150_000, 153_000))
    assert pool.take(1) == [0]
