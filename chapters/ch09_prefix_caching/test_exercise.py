"""The tests of chapter 9's exercise. They need no model. The first is the example of vLLM's documentation."""

from __future__ import annotations

from exercise import OutOfBlocks, PrefixCache

FIRST = "ABCDEFGHIJKLMNO"


def test_ten_blocks_as_in_vllm():
    cache = PrefixCache(num_blocks=10, block_size=4)
    first = cache.admit(FIRST)
    assert first == [0, 1, 2, 3]
    cache.publish(FIRST, first)
    first.append(cache.take())  # it grows by two tokens: block 3 is full, block 4 begun
    cache.publish(FIRST + "PQ", first)
    second = cache.admit("ABCDEFGHIJwxyz")
    assert second == [0, 1, 5, 6], "ten tokens are equal, and two blocks of them are full"
    cache.publish("ABCDEFGHIJwxyz", second)
    cache.release(first)
    cache.release(second)
    assert list(cache.free) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    assert cache.admit("ABCDEFGHIJKLabcdefghijklmnopq") == [0, 1, 2, 7, 8, 9, 4, 3]
    assert list(cache.free) == [6, 5]


def known(prompt: str, num_blocks: int = 6) -> PrefixCache:
    """A cache that remembers a prompt, whose request has ended."""
    cache = PrefixCache(num_blocks, block_size=2)
    table = cache.admit(prompt)
    cache.publish(prompt, table)
    cache.release(table)
    return cache


def test_a_prompt_is_never_found_whole():
    cache = known("abcd")
    assert cache.lookup("abcd") == [0]
    assert cache.lookup("abcde") == [0, 1]
    assert cache.lookup("") == cache.lookup("a") == []


def test_a_block_counts_only_behind_its_own_beginning():
    cache = known("abcdef")
    assert cache.lookup("xxcdefg") == []
    assert cache.lookup("abxxefg") == [0]


def test_blocks_that_are_found_are_not_taken_for_the_rest():
    cache = known("abcd", num_blocks=3)
    (other,) = cache.admit("x")  # the one that nobody had; now the oldest free blocks are those of "abcd"
    assert other == 2
    try:
        cache.admit("abcdef")  # two found, one to take: there is none
    except OutOfBlocks:
        pass
    else:
        raise AssertionError("a block was given twice")
    cache.release([other])
    assert cache.admit("abcdef") == [0, 1, 2]


def test_found_blocks_are_held_before_others_are_taken():
    cache = known("abcd", num_blocks=4)
    cache.release(cache.admit("wxyz"))  # the free blocks are now 1, 0, 3, 2
    table = cache.admit("abcdefgh")
    assert table[:2] == [0, 1] and sorted(table) == [0, 1, 2, 3]
    assert cache.names == [1, 1, 1, 1] and not cache.free


def test_a_refusal_changes_nothing():
    cache = known("abcd", num_blocks=3)
    before = (list(cache.names), list(cache.free), dict(cache.block_of))
    try:
        cache.admit("abcdefghijkl")
    except OutOfBlocks:
        pass
    else:
        raise AssertionError("six blocks out of three")
    assert (cache.names, list(cache.free), cache.block_of) == before


def test_two_that_run_share_a_block_until_both_have_ended():
    cache = known("abcd")
    one, two = cache.admit("abx"), cache.admit("aby")
    assert one[0] == two[0] == 0 and cache.names[0] == 2
    cache.release(one)
    assert 0 not in cache.free
    cache.release(two)
    assert 0 in cache.free
