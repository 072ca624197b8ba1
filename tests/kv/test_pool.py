import random

import pytest

from minivllm.errors import OutOfBlocks
from minivllm.kv.pool import BlockPool


def test_the_oldest_free_block_is_taken_first():
    pool = BlockPool(5)
    assert pool.take(3) == [0, 1, 2]
    assert pool.release([1, 0]) == [1, 0]
    assert list(pool.free_list()) == [3, 4, 1, 0]
    assert pool.take(3) == [3, 4, 1]
    pool.check()


def test_a_block_in_the_middle_of_the_free_list_can_be_touched():
    pool = BlockPool(4)
    pool.touch(2)
    pool.touch(2)
    assert list(pool.free_list()) == [0, 1, 3]
    assert pool.release([2]) == []
    assert pool.release([2]) == [2]
    assert list(pool.free_list()) == [0, 1, 3, 2]
    pool.check()


def test_asking_for_too_many_blocks_takes_none():
    pool = BlockPool(3)
    with pytest.raises(OutOfBlocks, match="asked for 4 blocks, 3 of 3"):
        pool.take(4)
    assert pool.num_free == 3
    pool.check()


def test_freeing_a_free_block_is_a_defect():
    with pytest.raises(AssertionError, match="freed more often"):
        BlockPool(2).release([0])


def test_the_free_list_equals_a_plain_list_under_random_use():
    rng, pool, model, held = random.Random(0), BlockPool(17), list(range(17)), []
    for _ in range(2000):
        action = rng.choice(("take", "release", "touch"))
        if action == "take" and (n := rng.randint(0, len(model))):
            assert pool.take(n) == model[:n]
            held += [[b, 1] for b in model[:n]]
            del model[:n]
        elif action == "release" and held:
            entry = rng.choice(held)
            entry[1] -= 1
            pool.release([entry[0]])
            if not entry[1]:
                held.remove(entry)
                model.append(entry[0])
        elif action == "touch":
            block = rng.randrange(17)
            pool.touch(block)
            if block in model:
                model.remove(block)
                held.append([block, 1])
            else:
                next(e for e in held if e[0] == block)[1] += 1
        assert list(pool.free_list()) == model
    pool.check()


@pytest.mark.parametrize("num_blocks", [1_000, 1_000_000])
def test_take_touch_and_release_do_not_walk_the_pool(num_blocks, monkeypatch):
    """Counted in link operations, not in seconds: one block costs the same in a pool of any size."""
    pool, links = BlockPool(num_blocks), []
    link = BlockPool._link
    monkeypatch.setattr(BlockPool, "_link", lambda self, a, b: (links.append(1), link(self, a, b)))
    pool.touch(num_blocks // 2)
    pool.release([num_blocks // 2])
    pool.release(pool.take(1))
    assert len(links) == 6
