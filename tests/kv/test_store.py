"""K and V in host memory: what comes back from there is what was computed, and the scheduler is told as of a cache."""

from __future__ import annotations

from random import Random

import pytest

from minivllm.kv.prefix_hash import HashPrefix
from minivllm.kv.store import BlockStore, StoredKV, StoredSendingKV
from minivllm.plan import StepPlan
from minivllm.request import Request, SamplingParams

SIZE = 4


def managed(num_blocks: int, store: BlockStore, kind: type = StoredKV):
    return kind(num_blocks, SIZE, HashPrefix(seed="test"), store=store)


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, SamplingParams(), tokens, len(tokens))


class Machine:
    """What blocks hold: of each its tokens and all before them. It does what plans say, as a runner would."""

    def __init__(self, kv: StoredKV, host: dict[int, tuple]):
        self.kv, self.device, self.host = kv, {}, host

    def run(self, req: Request) -> int:
        """Tokens found; the others are computed, and each block that was found is right."""
        found = self.kv.lookup(req)
        assert self.kv.allocate(req, req.num_tokens - found) is not None
        plan = StepPlan(0, {}, {})
        self.kv.moves.drain(plan)
        for source, target in plan.swap_out:
            self.host[target] = self.device[source]
        for source, target in plan.swap_in:
            self.device[target] = self.host[source]
        blocks = self.kv.tables[req.id].blocks
        for i, block in enumerate(blocks):
            content = tuple(req.token_ids[: (i + 1) * SIZE])
            if (i + 1) * SIZE <= found:
                assert self.device[block] == content, "found, and not what the request says"
            self.device[block] = content
        req.num_computed_tokens = req.num_tokens
        self.kv.commit(req)
        self.kv.check()
        return found


def gone_from_the_device(num_blocks: int) -> Machine:
    """With as many blocks, of which one request's went to the next one: 16 tokens from 0 on are on the host alone."""
    machine = Machine(managed(num_blocks, BlockStore(16)), {})
    for name, first, end in (("a", 0, 16), ("b", 50, 50 + SIZE * num_blocks)):
        assert machine.run(req := request(name, list(range(first, end)))) == 0
        machine.kv.free(req)
    return machine


def test_what_the_device_has_lost_comes_back_from_the_host():
    machine = gone_from_the_device(4)
    assert machine.run(request("c", [*range(12), 99])) == 12 and machine.kv.num_fetched == 3


def test_who_is_on_the_device_is_not_fetched():
    kv = managed(8, BlockStore(16))
    machine = Machine(kv, {})
    machine.run(request("a", list(range(9))))
    assert machine.run(request("b", list(range(12)))) == 8 and not kv.num_fetched


def test_what_one_manager_computed_another_finds():
    store, host = BlockStore(16), {}
    first, second = (Machine(managed(8, store, kind), host) for kind in (StoredSendingKV, StoredKV))
    first.run(request("a", list(range(13))))
    first.run(request("b", [77]))  # its plan writes what the one before computed
    assert second.run(request("c", list(range(20)))) == 12 and second.kv.num_fetched == 3


def test_a_sender_keeps_what_it_has_fetched_until_it_is_sent():
    store, host = BlockStore(16), {}
    kv = managed(8, store, StoredSendingKV)
    req = request("a", list(range(13)))
    Machine(kv, host).run(req)
    kv.free(req)
    assert kv.num_lent == 4
    kv.sent("a")
    assert kv.pool.num_free == 8


def test_who_comes_back_from_the_host_grows_like_any_other_and_has_room_for_drafts():
    kv, req = gone_from_the_device(6).kv, request("c", list(range(15)))
    assert kv.lookup(req) == 12
    assert len(kv.allocate(req, 3, lookahead=2)) == 5, "three blocks from the host, and two for 3 tokens and 2 drafts"
    assert len(kv.moves.swap_in) == 3
    req.num_computed_tokens = 15
    req.token_ids += [1] * 6
    assert len(kv.allocate(req, 6)) == 1
    kv.check()


def test_all_that_a_step_computed_is_written_in_the_next_one():
    kv = managed(8, BlockStore(16))
    for name, tokens in (("a", list(range(8))), ("b", list(range(50, 54)))):
        req = request(name, tokens)
        kv.allocate(req, req.num_tokens - kv.lookup(req))
        req.num_computed_tokens = req.num_tokens
        kv.commit(req)
    assert sorted(block for block, _ in kv.moves.swap_out) == [0, 1, 2]


def test_who_leaves_before_it_was_admitted_leaves_nothing():
    kv, late = gone_from_the_device(4).kv, request("c", list(range(16)))
    assert kv.lookup(late) == 12
    kv.free(late)
    assert not kv._stored and not kv._found


def test_the_beginning_outlives_what_follows_it_and_the_oldest_goes_first():
    store = BlockStore(3)
    assert [i for i, _ in store.put("abcde")] == [0, 1, 2]
    assert len(store.match("abc")) == 3
    store.put("x")
    assert len(store.match("abc")) == 2 and len(store.match("x")) == 1
    store.check()


def test_a_store_without_room_keeps_nothing():
    store = BlockStore(0)
    assert store.put("ab") == [] and store.match("ab") == [] and len(store) == 0


@pytest.mark.parametrize("num_slots", [1, 5, 40])
def test_whatever_comes_and_goes_nobody_reads_what_it_did_not_compute(num_slots):
    rng = Random(num_slots)
    kv = managed(12, BlockStore(num_slots))
    machine, live = Machine(kv, {}), []
    for number in range(300):
        stem = [rng.randrange(3)] * rng.randrange(1, 14)
        req = request(str(number), stem + [rng.randrange(5) for _ in range(rng.randrange(1, 6))])
        while len(live) == 2 or (live and rng.random() < 0.4):
            kv.free(live.pop(rng.randrange(len(live))))
        machine.run(req)
        live.append(req)
    assert (kv.num_fetched > 20) == (num_slots == 40), "fewer slots than blocks of the device have nothing else"
