import sys
from itertools import takewhile
from operator import eq
from random import Random

import pytest

from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.prefix_hash import HashPrefix, sha256_cbor, xxhash_cbor
from minivllm.kv.prefix_radix import RadixPrefix
from minivllm.kv.swap import Auto, Recompute, Swap
from minivllm.plan import StepPlan
from minivllm.request import Item, Request, SamplingParams


@pytest.fixture(params=["hash", "radix"], autouse=True)
def default_index(request, monkeypatch):
    """Every rule of sharing holds for every index."""
    make = {"hash": lambda: HashPrefix(seed="test"), "radix": RadixPrefix}[request.param]
    monkeypatch.setattr(sys.modules[__name__], "make_index", make)


make_index = None


def manager(num_blocks=10, block_size=4, index=None):
    return PagedKVManager(num_blocks, block_size, index or make_index())


def request(req_id, tokens, **fields):
    tokens = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return Request(req_id, fields.pop("params", SamplingParams()), tokens, len(tokens), **fields)


def compute(kv, req, new_tokens=None, start=None):
    """lookup, allocate, run, commit: as a scheduler does."""
    start = kv.lookup(req) if req.id not in kv.tables else req.num_computed_tokens
    new_tokens = req.num_tokens - start if new_tokens is None else new_tokens
    blocks = kv.allocate(req, new_tokens)
    if blocks is not None:
        req.num_computed_tokens = start + new_tokens
        kv.commit(req)
    kv.check()
    return blocks


@pytest.mark.parametrize("num_tokens, num_blocks", [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_request_wastes_less_than_one_block(num_tokens, num_blocks):
    kv = manager()
    assert len(compute(kv, request("a", num_tokens))) == num_blocks


def test_a_block_is_added_only_when_the_last_one_is_full():
    kv, req = manager(), request("a", 3)
    compute(kv, req)
    gained = []
    for token in range(3, 12):
        req.token_ids.append(token)
        gained.append(len(compute(kv, req)))
    assert gained == [0, 1, 0, 0, 0, 1, 0, 0, 0]


def test_allocation_is_all_or_nothing():
    kv = manager(num_blocks=3)
    compute(kv, request("a", 8))
    b = request("b", [9] * 8)
    assert compute(kv, b) is None
    assert kv.usage.num_free == 1
    assert "b" not in kv.tables


def test_lookahead_slots_are_allocated_but_never_published():
    kv, req = manager(), request("a", 7)
    kv.lookup(req)
    assert len(kv.allocate(req, 7, lookahead=4)) == 3
    req.num_computed_tokens = 7
    kv.commit(req)
    assert kv.tables["a"].num_published == 1
    kv.check()


def test_equal_prompts_share_full_blocks():
    kv, a, b = manager(), request("a", 10), request("b", 10)
    blocks = compute(kv, a)
    assert kv.lookup(b) == 8
    assert compute(kv, b)[:2] == blocks[:2]
    assert [kv.pool.ref_counts[block] for block in blocks] == [2, 2, 1]


@pytest.mark.parametrize("num_tokens, num_found", [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_that_is_known_whole_is_computed(num_tokens, num_found):
    """Else there were no logits."""
    kv = manager()
    compute(kv, request("a", 9))
    assert kv.lookup(request("b", num_tokens)) == num_found


def test_a_freed_prefix_is_found_until_it_is_overwritten():
    kv, a = manager(num_blocks=4), request("a", 12)
    compute(kv, a)
    kv.free(a)
    assert kv.usage.num_cached == 3
    assert kv.lookup(request("b", 13)) == 12
    compute(kv, request("c", [7] * 8))  # takes the block never used and then the tail of a's prefix
    assert kv.lookup(request("d", 13)) == 8
    kv.check()


def test_suffixes_are_evicted_before_their_prefix():
    kv, a = manager(num_blocks=3), request("a", 12)
    compute(kv, a)
    kv.free(a)
    for length in (8, 4, 0):
        kv._take(1)
        assert kv.lookup(request(f"l{length}", 13)) == length


def test_a_found_block_that_is_free_counts_against_the_room():
    kv, a = manager(num_blocks=3), request("a", 9)
    compute(kv, a)
    kv.free(a)
    b = request("b", 13)  # needs 4 blocks: 2 found free ones and 2 more, and the pool has 3
    assert kv.lookup(b) == 8
    assert kv.allocate(b, 5) is None
    assert kv.usage.num_free == 3
    kv.check()


def test_equal_blocks_computed_side_by_side_are_both_kept():
    kv, a, b = manager(), request("a", 8), request("b", 8)
    kv.lookup(a), kv.lookup(b)
    kv.allocate(a, 8), kv.allocate(b, 8)
    for req in (a, b):
        req.num_computed_tokens = 8
        kv.commit(req)
    assert kv.tables["a"].blocks != kv.tables["b"].blocks
    kv.free(a)
    kv.check()
    for _ in range(8):
        kv._take(1)  # everything but b's blocks is overwritten
    assert kv.lookup(request("c", 9)) == 8
    assert kv._found["c"].blocks == kv.tables["b"].blocks


@pytest.mark.parametrize("other", [{"adapter": "x"}, {"cache_salt": "x"}])
def test_adapter_and_salt_divide_the_cache(other):
    kv = manager()
    compute(kv, request("a", 8))
    assert kv.lookup(request("b", 9, **other)) == 0
    compute(kv, request("c", 8, **other))
    assert kv.lookup(request("d", 9, **other)) == 8


def items_of(draw, num_tokens: int) -> tuple[Item, ...]:
    """Here and there in a prompt, of three kinds that look alike: "ab" and "a" begin equal, but are two digests."""
    items, at = [], 0
    while (at := at + draw.randint(0, 6)) < num_tokens:
        length = draw.randint(1, 6)
        if at + length > num_tokens:
            break
        items.append(Item(at, length, draw.choice(["a", "b", "ab"])))
        at += length
    return tuple(items)


def inputs_of(req) -> list:
    """What a model is given at each position."""
    inputs = list(req.token_ids)
    for item in req.items:
        inputs[item.offset : item.end] = [(item.digest, i) for i in range(item.length)]
    return [(req.adapter, req.cache_salt, value) for value in inputs]


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_shared_as_far_as_all_inputs_are_equal(seed):
    """Never a wrong item's, wherever it lies; and the same item in the same place is found. Placeholders are equal."""
    draw, kv = Random(seed), manager(num_blocks=400)
    seen: list = []
    for i in range(40):
        options = {"adapter": draw.choice(["", "x"]), "cache_salt": draw.choice(["", "x"])} if seed % 3 == 0 else {}
        req = request(str(i), [0] * 17, items=items_of(draw, 17), **options)
        if seen and draw.random() < 0.5:
            req.items = draw.choice(seen)[1]
        inputs = inputs_of(req)
        num_equal = [sum(1 for _ in takewhile(bool, map(eq, inputs, old))) for old, _ in seen]
        expected = min(max(num_equal, default=0), 16) // 4 * 4
        assert kv.lookup(req) == expected
        compute(kv, req)
        seen.append((inputs, req.items))


def test_an_item_elsewhere_is_another_and_so_is_its_beginning():
    kv = manager(num_blocks=60)
    places = [(0, 8), (1, 8), (4, 8), (0, 4), (0, 6), (5, 2)]
    for i, (offset, length) in enumerate(places):
        assert not i or kv.lookup(request("x", [0] * 9, items=(Item(offset, length, "b"),))) < 8
        compute(kv, request(str(i), [0] * 9, items=(Item(offset, length, "a"),)))
    for offset, length in places:
        assert kv.lookup(request("y", [0] * 9, items=(Item(offset, length, "a"),))) == 8


def test_two_salts_never_share_a_block_and_equal_salts_do():
    """Also those that are equal once they are joined to an adapter's name, or look like another's encoding."""
    spaces = [("", ""), ("", "a"), ("a", ""), ("", "aa"), ("a", "a"), ("aa", ""), ("", "\0"), ("\0", ""), ("", "['a']")]
    kv, blocks = manager(num_blocks=4 * len(spaces)), {}
    for i, (adapter, salt) in enumerate(spaces):
        req = request(f"first {i}", 8, adapter=adapter, cache_salt=salt)
        assert kv.lookup(req) == 0
        compute(kv, req)
        blocks[adapter, salt] = kv.tables[req.id].blocks
    assert len({block for found in blocks.values() for block in found}) == 2 * len(spaces)
    for i, (adapter, salt) in enumerate(spaces):
        req = request(f"second {i}", 9, adapter=adapter, cache_salt=salt)
        compute(kv, req)
        assert kv.tables[req.id].blocks[:2] == blocks[adapter, salt]


def test_prompt_logprobs_recompute_the_prompt():
    kv = manager()
    compute(kv, request("a", 8))
    assert kv.lookup(request("b", 9, params=SamplingParams(prompt_logprobs=1))) == 0


def test_without_an_index_nothing_is_shared():
    kv = manager(index=NoPrefix())
    a = request("a", 8)
    compute(kv, a)
    kv.free(a)
    assert kv.lookup(request("b", 8)) == 0
    assert kv.usage.num_cached == 0


def test_equal_tokens_after_different_beginnings_have_different_keys():
    index = HashPrefix(seed="test")
    keys = [index.keys(request(str(i), [i, 2, 3, 4, 9, 9, 9, 9]), 2, 4) for i in (0, 1)]
    assert keys[0][1] != keys[1][1]


@pytest.mark.parametrize("key_hash, size", [(sha256_cbor, 32), (xxhash_cbor, 16)])
def test_keys_depend_on_the_secret_root_and_are_strong(key_hash, size):
    req_keys = [HashPrefix(key_hash, seed).keys(request("a", 4), 1, 4) for seed in ("s", "s", "t", None, None)]
    assert all(len(key) == size for (key,) in req_keys)
    assert req_keys[0] == req_keys[1]
    assert len({key for (key,) in req_keys}) == 4


@pytest.mark.parametrize("num_computed, copies", [(8, []), (7, [(1, 2)])])
def test_a_fork_shares_what_is_full_and_copies_the_block_it_will_write(num_computed, copies):
    kv, parent = manager(index=NoPrefix()), request("a", 8)
    compute(kv, parent)
    child = request("b", 9 if num_computed == 8 else 8)
    assert kv.fork(parent, child) == num_computed
    blocks = kv.allocate(child, 1)
    assert blocks[: num_computed // 4] == kv.tables["a"].blocks[: num_computed // 4]
    assert kv.moves.copies == copies
    kv.check()
    for req in (parent, child):
        kv.free(req)
        kv.check()
    assert kv.usage.num_free == 10


def test_a_fork_that_goes_before_it_has_run_takes_its_copy_along():
    """The block may be given to somebody else in the same step: then the copy would overwrite it."""
    kv, parent = manager(index=NoPrefix()), request("a", 7)
    compute(kv, parent)
    child, other = request("b", 8), request("c", 8)
    for req in (child, other):
        kv.fork(parent, req)
        kv.allocate(req, 0)
    assert len(kv.moves.copies) == 2
    kv.free(child)
    assert kv.moves.copies == [(kv.tables["a"].blocks[-1], kv.tables["c"].blocks[-1])]
    kv.check()


def test_a_manager_that_does_not_share_forks_leaves_them_to_the_prefix_index():
    kv, parent = PagedKVManager(10, 4, make_index(), shares_forks=False), request("a", 7)
    compute(kv, parent)
    child = request("b", 8)
    assert kv.fork(parent, child) == 0 and kv.lookup(child) == 4
    kv.allocate(child, 4)
    assert not kv.moves.copies
    kv.check()


def test_forking_without_room_for_the_copy_changes_nothing():
    kv, parent = manager(num_blocks=2, index=NoPrefix()), request("a", 7)
    compute(kv, parent)
    child = request("b", 7)
    kv.fork(parent, child)
    assert kv.allocate(child, 1) is None and not kv.moves.copies
    kv.check()


def swapping(num_blocks=6, num_host_blocks=8):
    return PagedKVManager(num_blocks, 4, NoPrefix(), num_host_blocks, Swap())


def test_swapped_blocks_return_with_all_their_tokens():
    kv, req = swapping(), request("a", 10)
    device = list(compute(kv, req))
    kv.free(req, keep=True)
    kv.check()
    assert kv.usage.num_free == 6
    out = list(kv.moves.swap_out)
    assert [source for source, _ in out] == device
    kv.moves.drain(StepPlan(0))
    assert kv.lookup(req) == 10
    req.token_ids.append(5)
    back = kv.allocate(req, 1)
    assert kv.moves.swap_in == [(host, block) for (_, host), block in zip(out, back, strict=True)]
    kv.check()


def test_blocks_that_a_group_shares_are_moved_once_and_stay_shared():
    kv, parent, child = swapping(), request("a", 9), request("b", 9)
    compute(kv, parent)
    kv.fork(parent, child)
    assert len(kv.allocate(child, 1)) == 3
    child.num_computed_tokens = 9
    shared = kv.tables["a"].blocks[:2]
    for req in (child, parent):
        kv.free(req, keep=True)
    assert len(kv.moves.swap_out) == 4 and len({source for source, _ in kv.moves.swap_out}) == 4
    assert sum(count == 2 for count in kv.swap.pool.ref_counts) == len(shared)
    kv.moves.drain(StepPlan(0))
    for req in (parent, child):
        kv.lookup(req)
        req.num_computed_tokens = 0
        req.token_ids.append(1)
        assert kv.allocate(req, 1) is not None
    assert kv.tables["a"].blocks[:2] == kv.tables["b"].blocks[:2]
    assert len(kv.moves.swap_in) == 4
    kv.check()


def test_a_full_host_means_recompute_and_says_so():
    kv, req = swapping(num_host_blocks=1), request("a", 9)
    compute(kv, req)
    kv.free(req, keep=True)
    assert not kv.moves.swap_out and kv.lookup(req) == 0
    assert kv.moves.notes == ["preempt a: recompute (3 host blocks needed, 1 free)"]


@pytest.mark.parametrize(
    "policy, note, num_out",
    [
        (Recompute(), "recompute (as configured)", 0),
        (Swap(), "swap (as configured)", 3),
        (Auto(1e-3, 1e-3), "swap (9 tokens recomputed in 9.00 ms, 3 blocks moved twice in 6.00 ms)", 3),
        (Auto(1e-3, 2e-3), "recompute (9 tokens recomputed in 9.00 ms, 3 blocks moved twice in 12.00 ms)", 0),
    ],
)
def test_a_policy_decides_whether_kv_is_moved_and_the_trace_says_why(policy, note, num_out):
    kv, req = PagedKVManager(6, 4, NoPrefix(), 3, policy), request("a", 9)
    compute(kv, req)
    kv.free(req, keep=True)
    assert kv.moves.notes == [f"preempt a: {note}"] and len(kv.moves.swap_out) == num_out
    assert kv.lookup(req) == (9 if num_out else 0)
    kv.check()


@pytest.mark.parametrize("num_free, new_tokens, returns", [(3, 3, True), (3, 4, False), (4, 4, True), (2, 1, False)])
def test_who_is_on_the_host_returns_once_there_is_room_for_it_and_its_step(num_free, new_tokens, returns):
    """9 tokens are three blocks, the last of which has room for three more."""
    kv, req = swapping(num_blocks=6), request("a", 9)
    compute(kv, req)
    kv.free(req, keep=True)
    kv.moves.drain(StepPlan(0))
    compute(kv, request("b", [7] * 4 * (6 - num_free)))
    req.token_ids += [1] * new_tokens
    assert kv.lookup(req) == 9
    assert (kv.allocate(req, new_tokens) is not None) == returns
    assert kv.usage.num_free == (num_free - -(-(9 + new_tokens) // 4) if returns else num_free)
    kv.check()


def test_two_requests_that_are_forgotten_together_give_all_their_host_blocks_back():
    kv, reqs = swapping(), [request("a", 8), request("b", [7] * 8)]
    for req in reqs:
        compute(kv, req)
        kv.free(req, keep=True)
    kv.moves.drain(StepPlan(0))
    for req in reqs:
        kv.free(req)
    kv.check()
    kv.swap._reclaim()
    assert kv.swap.pool.num_free == 8


def test_a_host_block_that_was_emptied_is_not_written_in_the_same_step():
    kv, a, b = swapping(num_blocks=8, num_host_blocks=2), request("a", 8), request("b", [7] * 8)
    compute(kv, a), compute(kv, b)
    kv.free(a, keep=True)
    kv.moves.drain(StepPlan(0))
    a.token_ids.append(1)
    kv.lookup(a)
    kv.allocate(a, 1)  # its host blocks are read in the coming step
    kv.free(b, keep=True)
    assert not kv.moves.swap_out and kv.lookup(b) == 0


def test_forgetting_a_request_on_the_host_frees_its_blocks():
    kv, req = swapping(), request("a", 9)
    compute(kv, req)
    kv.free(req, keep=True)
    kv.free(req)
    kv.check()
    kv.moves.drain(StepPlan(0))
    kv.swap._reclaim()
    assert kv.swap.pool.num_free == 8


@pytest.mark.parametrize("num_tokens, swaps", [(4, False), (20, False), (40, True)])
def test_auto_takes_the_cheaper_way_and_gives_the_figures(num_tokens, swaps):
    req = request("a", num_tokens)
    req.num_computed_tokens = num_tokens
    wanted, reason = Auto(seconds_per_token=1e-3, seconds_per_block=5e-3).swaps(req, 2)
    assert wanted == swaps
    assert reason == f"{num_tokens} tokens recomputed in {num_tokens:.2f} ms, 2 blocks moved twice in 20.00 ms"


def test_the_tree_shrinks_when_blocks_are_overwritten():
    index = RadixPrefix()
    kv, a = manager(num_blocks=4, index=index), request("a", 12)
    compute(kv, a)
    kv.free(a)
    assert len(index.root.children) == 1
    kv._take(4)
    assert not index.root.children and not index._node_of


def test_freeing_a_request_without_blocks_is_no_error():
    kv = manager()
    kv.free(request("a", 4))
    kv.check()
