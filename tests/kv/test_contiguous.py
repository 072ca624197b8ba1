import random

import pytest

from minivllm.kv.contiguous import (
    Buddies,
    ContiguousKVManager,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.kv.waste import Waste, paged_waste
from minivllm.request import Request, SamplingParams


def request(req_id, num_prompt, max_tokens=16, num_output=0):
    """num_output tokens sampled, and all but the last one in the cache."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    req = Request(req_id, params, list(range(num_prompt + num_output)), num_prompt)
    req.num_computed_tokens = num_prompt + num_output - 1 if num_output else 0
    return req


def admit(kv, req):
    """As a scheduler does: the first allocation of a request is asked with nothing computed."""
    computed, req.num_computed_tokens = req.num_computed_tokens, 0
    blocks = kv.allocate(req, req.num_tokens - kv.lookup(req))
    req.num_computed_tokens = computed
    kv.check()
    return blocks


class SlowBuddies:
    """The buddy system by its definition: a run of 2**k blocks may begin at each multiple of 2**k at which the pool's
    largest-first division has a run that holds it; it is free if no block of it is taken. What is split is found, not
    stored."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.taken = {}  # start -> order

    def places(self, order):
        roots, start = [], 0
        for k in reversed(range(self.num_blocks.bit_length())):
            if self.num_blocks >> k & 1:
                roots.append(range(start, start := start + (1 << k)))
        return [s for root in roots for s in range(root.start, root.stop - (1 << order) + 1, 1 << order)]

    def is_free(self, start, order):
        return not any(
            s < start + (1 << order) and start < s + (1 << taken_order) for s, taken_order in self.taken.items()
        )

    def can_take(self, order):
        return [s for s in self.places(order) if self.is_free(s, order)]


@pytest.mark.parametrize("num_blocks", [1, 2, 13, 32, 100])
@pytest.mark.parametrize("seed", range(4))
def test_random_use_agrees_with_the_slow_model(num_blocks, seed):
    rng = random.Random(seed)
    fast, slow = Buddies(num_blocks), SlowBuddies(num_blocks)
    for _ in range(200):
        if slow.taken and rng.random() < 0.45:
            start = rng.choice(sorted(slow.taken))
            fast.give(start, slow.taken.pop(start))
        else:
            order = rng.randrange(num_blocks.bit_length() + 1)
            possible = slow.can_take(order)
            assert fast.has(order) == bool(possible)
            start = fast.take(order)
            assert (start is None) == (not possible)
            if start is not None:
                assert start in possible
                slow.taken[start] = order
        fast.check()
        assert fast.num_free == num_blocks - sum(1 << order for order in slow.taken.values())
    for start, order in slow.taken.items():
        fast.give(start, order)
    assert sorted(fast.runs()) == sorted(Buddies(num_blocks).runs())


def test_a_pool_that_is_no_power_of_two_begins_as_its_binary_digits():
    assert list(Buddies(13).runs()) == [(12, 0), (8, 2), (0, 3)]
    assert Buddies(13).max_order == 3


def test_the_smallest_run_that_is_long_enough_is_split():
    buddies = Buddies(13)
    assert [buddies.take(0), buddies.take(1), buddies.take(3)] == [12, 8, 0]
    assert list(buddies.runs()) == [(10, 1)]


def test_a_run_merges_with_its_buddy_and_with_no_other_neighbour():
    buddies = Buddies(4)
    starts = [buddies.take(0) for _ in range(4)]
    assert sorted(starts) == [0, 1, 2, 3]
    buddies.give(1, 0), buddies.give(2, 0)  # neighbours, but halves of different pairs
    assert not buddies.has(1)
    buddies.give(3, 0)
    assert (2, 1) in buddies.runs()
    buddies.give(0, 0)
    assert list(buddies.runs()) == [(0, 2)]


@pytest.mark.parametrize(
    "prompt, output, expected",
    [(10, 25, {"max": 100, "pow2": 42, "oracle": 34}), (90, 25, {"max": 100, "pow2": 100, "oracle": 99})],
)
def test_what_each_policy_reserves(prompt, output, expected):
    """The paper's own example of Pow2: an output of 25 tokens reserves 32. No policy reserves beyond the model."""
    req = request("a", prompt, output)
    policies = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}
    assert {name: policy(req, 100) for name, policy in policies.items()} == expected


@pytest.mark.parametrize("policy", [reserve_max, reserve_pow2, reserve_oracle])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 31, 32, 33, 99, None])
def test_no_reservation_is_too_short_or_beyond_the_model(policy, max_tokens):
    for num_prompt in range(1, 100):
        req = request("a", num_prompt, max_tokens)
        assert req.num_final_slots(100) <= policy(req, 100) <= 100


def test_a_table_names_consecutive_blocks_and_never_grows():
    kv = ContiguousKVManager(16, 4, reserve_oracle, 100)
    req = request("a", 9, max_tokens=12)  # 20 slots, 5 blocks, a run of 8
    assert list(kv.allocate(req, 9)) == [0, 1, 2, 3, 4]
    assert kv.usage.num_free == 8
    for computed in range(9, 20):
        req.num_computed_tokens = computed
        assert kv.allocate(req, 1) == ()
        kv.commit(req)
        kv.check()
    assert kv.lookup(req) == 0
    kv.free(req, keep=True)
    kv.free(req)
    assert kv.usage.num_free == 16
    kv.check()


def test_what_is_in_flight_counts_against_the_run():
    kv = ContiguousKVManager(16, 4, reserve_oracle, 100)
    req = request("a", 6, max_tokens=3)  # 8 slots
    kv.allocate(req, 6)
    req.num_in_flight = 6
    assert kv.allocate(req, 2) == () and kv.allocate(req, 3) is None
    req.num_computed_tokens, req.num_in_flight = 6, 1
    assert kv.allocate(req, 1) == () and kv.allocate(req, 2) is None


def test_a_run_is_not_extended_for_drafts():
    kv = ContiguousKVManager(16, 4, reserve_oracle, 100)
    req = request("a", 6, max_tokens=3)
    assert kv.allocate(req, 6, lookahead=3) is None
    assert kv.usage.num_free == 16
    assert len(kv.allocate(req, 6, lookahead=2)) == 2
    req.num_computed_tokens = 6
    assert kv.allocate(req, 1, lookahead=1) == ()
    assert kv.allocate(req, 1, lookahead=2) is None


def test_allocation_is_all_or_nothing_and_free_blocks_may_not_suffice():
    kv = ContiguousKVManager(8, 1, reserve_oracle, 100)
    a, b, c = request("a", 2, 1), request("b", 2, 1), request("c", 2, 1)
    assert [list(admit(kv, r)) for r in (a, b, c)] == [[0, 1], [2, 3], [4, 5]]
    kv.free(b)
    assert kv.usage.num_free == 4
    assert admit(kv, request("d", 3, 2)) is None  # four slots are free, no four in a row
    kv.free(a)
    assert list(admit(kv, request("d", 3, 2))) == [0, 1, 2, 3]


@pytest.mark.parametrize("reservation", [reserve_max, reserve_pow2, reserve_oracle])
@pytest.mark.parametrize("seed", range(3))
def test_runs_never_overlap_and_all_come_back(reservation, seed):
    rng = random.Random(seed)
    kv = ContiguousKVManager(150, 4, reservation, 120)
    live = {}
    for i in range(300):
        if live and rng.random() < 0.45:
            kv.free(live.pop(rng.choice(list(live))))
        else:
            req = request(str(i), rng.randrange(1, 60), rng.randrange(1, 60))
            if admit(kv, req) is not None:
                live[req.id] = req
        kv.check()
    for req in live.values():
        kv.free(req)
    kv.check()
    assert kv.usage.num_free == 150 and not kv.runs


# --- waste, by hand

LIVE = {"a": request("a", 5, max_tokens=6, num_output=2), "b": request("b", 3, max_tokens=3, num_output=0)}
FINAL = {"a": 11, "b": 6}
# a: 6 slots filled, 10 in the end. b: nothing yet, 5 in the end.


@pytest.mark.parametrize(
    "reservation, expected",
    [
        # a holds 20 slots (5 blocks, run of 8 = 32 slots), b as well: 64 slots in all, none free.
        (reserve_max, Waste(6 / 64, (4 + 5) / 64, (10 + 15) / 64, (12 + 12) / 64)),
        # a: 5 + 8 = 13 -> 4 blocks = 16 slots, run of 4. b: 3 + 4 = 7 -> 2 blocks = 8 slots, run of 2.
        (reserve_pow2, Waste(6 / 64, (4 + 5) / 64, (6 + 3) / 64, 0.0)),
        # a: 10 -> 3 blocks = 12 slots, run of 4. b: 5 -> 2 blocks = 8 slots.
        (reserve_oracle, Waste(6 / 64, (4 + 5) / 64, (2 + 3) / 64, 4 / 64)),
    ],
)
def test_waste_of_a_contiguous_pool_computed_by_hand(reservation, expected):
    kv = ContiguousKVManager(16, 4, reservation, 20)
    for req in LIVE.values():
        assert admit(kv, req) is not None
    waste = kv.waste(LIVE, FINAL)
    assert waste == pytest.approx(expected)
    assert waste.free == pytest.approx(kv.usage.num_free / 16)


def test_the_oracle_with_blocks_of_one_token_has_no_internal_waste():
    kv = ContiguousKVManager(64, 1, reserve_oracle, 20)
    for req in LIVE.values():
        admit(kv, req)
    assert kv.waste(LIVE, FINAL) == pytest.approx(Waste(6 / 64, 9 / 64, 0.0, (6 + 3) / 64))


def test_free_slots_are_external_waste_if_the_next_request_cannot_have_them():
    kv = ContiguousKVManager(16, 4, reserve_pow2, 64)
    for req in LIVE.values():
        admit(kv, req)  # runs of 4 and 2: free are 2 and 8
    assert kv.waste(LIVE, FINAL, request("n", 16, 16)).external == 0
    assert kv.waste(LIVE, FINAL, request("n", 16, 17)).external == pytest.approx(10 / 16)
    assert kv.waste(LIVE, FINAL, request("n", 16, 17)).free == pytest.approx(0)


def test_what_an_ended_request_still_holds_is_internal_waste():
    kv = ContiguousKVManager(16, 4, reserve_pow2, 64)
    paged = PagedKVManager(16, 4, NoPrefix())
    for req in LIVE.values():
        admit(kv, req), admit(paged, req)
    assert kv.waste({}, FINAL) == pytest.approx(Waste(0, 0, 24 / 64, 0))
    assert paged_waste(paged, {}, FINAL) == pytest.approx(Waste(0, 0, 12 / 64, 0))


def test_waste_of_a_paged_pool_computed_by_hand():
    kv = PagedKVManager(16, 4, NoPrefix())
    for req in LIVE.values():
        admit(kv, req)  # a: 7 tokens are known, 2 blocks, of whose 8 slots 6 are filled. b: 3 tokens, 1 block
    assert paged_waste(kv, LIVE, FINAL) == pytest.approx(Waste(6 / 64, (2 + 4) / 64, 0, 0))
    assert paged_waste(kv, LIVE, {"a": 8, "b": 4}) == pytest.approx(Waste(6 / 64, (1 + 3) / 64, (1 + 1) / 64, 0))
    assert paged_waste(kv, LIVE, FINAL, request("n", 52)).external == 0
    assert paged_waste(kv, LIVE, FINAL, request("n", 53)).external == pytest.approx(13 / 16)


def test_a_shared_block_counts_once():
    kv = PagedKVManager(8, 4, HashPrefix(seed="test"))
    a, b = request("a", 8, num_output=1), request("b", 9, num_output=1)
    admit(kv, a)
    kv.commit(a)
    b.num_computed_tokens = 0
    assert kv.lookup(b) == 8
    assert len(kv.allocate(b, 2)) == 3
    b.num_computed_tokens = 9
    # a: 8 of 12 slots, the last block for the output token to come. b: the same two blocks, and one slot of another.
    waste = paged_waste(kv, {"a": a, "b": b}, {"a": 10, "b": 11})
    assert waste == pytest.approx(Waste(9 / 32, (1 + 1) / 32, (3 + 2) / 32, 0))
