"""scheduler.policy=fair: what a client gets beside the others, in tokens and in steps."""

import random
from collections import Counter

import pytest
from fakes import FakeEngine, beam_oracle

from minivllm.request import BeamSearchParams, Request, SamplingParams
from minivllm.scheduler.fair import OUTPUT_WEIGHT, Fair

LONG = {"max_tokens": 12, "min_tokens": 12}


def fair(**options):
    return FakeEngine(60, max_model_len=80, **{"scheduler.policy": "fair", **options})


def flood(engine, client, num_requests, length=30, **params):
    for i in range(num_requests):
        fill = [ord(client), i % 100, i // 100]
        engine.add(f"{client}{i}", (fill * length)[:length], client=client, **(params or LONG))


def steps_until_end(engine, name):
    steps = 0
    while name not in engine.reasons:
        engine.step()
        steps += 1
    return steps


def order_of_first_tokens(engine):
    """The clients, in the order in which their requests get their first token."""
    seen = {}
    while len(seen) < len(engine.tokens):
        engine.step()
        seen |= {name: None for name, tokens in engine.tokens.items() if tokens}
    return [name[0] for name in seen]


@pytest.mark.parametrize("num_seqs", [2, 8])
@pytest.mark.parametrize("kind, blocks", [("unified", 60), ("unified", 24), ("phased", 60), ("phased", 36)])
@pytest.mark.parametrize("length", [3, 60])
@pytest.mark.parametrize("flooding", [(70, 8), (10, 64)], ids=["long prompts", "long outputs"])
def test_beside_a_flood_a_single_request_takes_twice_its_steps_alone_and_one_more_at_most(
    kind, num_seqs, blocks, length, flooding
):
    """V0's scheduler, which computes a prompt whole, keeps to it while the pool has room for one request of each."""
    options = {
        "scheduler.kind": kind,
        "scheduler.chunked_prefill": kind == "unified",
        "scheduler.max_num_seqs": num_seqs,
        "scheduler.max_num_batched_tokens": 16 if kind == "unified" else 80,
    }
    single = {"prompt": [5] * length, "client": "b", "max_tokens": 3, "min_tokens": 3}
    alone = FakeEngine(blocks, max_model_len=80, **options)
    alone.add("single", **single)
    steps_alone = steps_until_end(alone, "single")
    for begun in (0, 1, 7, 40):
        engine = FakeEngine(blocks, max_model_len=80, **{"scheduler.policy": "fair"}, **options)
        flood(engine, "a", 60, flooding[0], max_tokens=flooding[1], min_tokens=flooding[1])
        for _ in range(begun):
            engine.step()
        engine.add("single", **single)
        assert steps_until_end(engine, "single") <= 2 * steps_alone + 1, begun


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds_where_places_memory_and_budget_are_short(seed):
    """Any number of places, of blocks from those of one request on, of steps in flight, of sequences to a prompt. A
    budget of two tokens a place: with less, what a prompt leaves to those that run is more than half of it."""
    rng = random.Random(seed)
    num_seqs, budget = rng.choice([1, 2, 3, 8]), rng.choice([16, 40])
    options = {
        "scheduler.max_num_seqs": num_seqs,
        "scheduler.max_num_batched_tokens": budget,
        "overlap": rng.choice([1, 2]),
    }
    options |= {
        "num_blocks": rng.choice([20, 24, 36, 200]),
        "max_model_len": 80,
        "kv.prefix": rng.choice(["none", "hash"]),
    }
    num_output, (length, num_flooding) = rng.choice([1, 3, 12]), rng.choice([(70, 8), (10, 64), (3, 3), (40, 40)])
    single = {
        "prompt": [5] * rng.choice([1, 3, 20, 60]),
        "client": "b",
        "max_tokens": num_output,
        "min_tokens": num_output,
    }
    alone, engine = FakeEngine(**options), FakeEngine(**options, **{"scheduler.policy": "fair"})
    alone.add("single", **single)
    num_each = rng.choice([1, 4, 16])
    for i in range(48):
        prompt, group = [1, i // num_each] * 40, f"g{i // num_each}" if num_each > 1 else ""
        engine.add(f"a{i}", prompt[:length], client="a", group=group, max_tokens=num_flooding, min_tokens=num_flooding)
    for _ in range(rng.choice([0, 1, 2, 3, 7, 20, 40])):
        engine.step()
    engine.add("single", **single)
    assert steps_until_end(engine, "single") <= 2 * steps_until_end(alone, "single") + 1


def test_one_place_goes_from_client_to_client_and_back_without_waste():
    """Whoever comes to its line anew takes the place of a flood once. What that flood has done is computed again once
    for each, and no more."""
    engine = fair(**{"scheduler.max_num_seqs": 1})
    flood(engine, "a", 10)
    for i in range(30):
        engine.step()
        engine.add(f"{'bcd'[i % 3]}{i}", [9, i], client="bcd"[i % 3], **LONG)
    assert engine.core.stats.num_preempted <= 3
    served = order_of_first_tokens(engine)
    assert served[:20].count("a") >= 2, "who was overtaken is served in its turn"
    assert engine.core.stats.num_preempted <= 3


def test_under_fcfs_the_same_request_waits_for_the_flood():
    engine = FakeEngine(60, max_model_len=80, **{"scheduler.max_num_seqs": 2, "scheduler.max_num_batched_tokens": 16})
    flood(engine, "a", 60)
    engine.add("single", [5] * 3, client="b", **LONG)
    assert steps_until_end(engine, "single") > 300


def test_two_floods_are_served_in_turn_whoever_came_first():
    engine = fair(**{"scheduler.max_num_seqs": 2})
    flood(engine, "a", 20)
    flood(engine, "b", 20)
    served = order_of_first_tokens(engine)
    assert all(abs(Counter(served[:n])["a"] - Counter(served[:n])["b"]) <= 2 for n in range(40))


def test_tokens_are_shared_and_not_requests():
    """a's requests make three times the work of b's: about three of b's are served for each."""
    engine = fair(**{"scheduler.max_num_seqs": 2})
    flood(engine, "a", 20, length=54, max_tokens=36, min_tokens=36)
    flood(engine, "b", 60, length=18, max_tokens=12, min_tokens=12)
    while sum(name[0] == "a" for name in engine.reasons) < 10:
        engine.step()
    ended = Counter(name[0] for name in engine.reasons)
    assert 24 <= ended["b"] <= 36


def test_a_limit_that_is_not_used_up_costs_nothing():
    """a asks for 70 tokens and stops after 4; b asks for the 4 that it gets."""
    engine = fair(**{"scheduler.max_num_seqs": 2})
    for i in range(40):
        engine.add(f"a{i}", [1, i], client="a", max_tokens=70, min_tokens=4, stop_token_ids=tuple(range(100)))
        engine.add(f"b{i}", [2, i], client="b", max_tokens=4, min_tokens=4)
    while sum(name[0] == "b" for name in engine.reasons) < 30:
        engine.step()
    assert Counter(name[0] for name in engine.reasons)["a"] >= 20


def test_a_pause_saves_up_no_claim():
    engine = fair(**{"scheduler.max_num_seqs": 2})
    flood(engine, "a", 30)
    for _ in range(150):
        engine.step()
    before = sum(name[0] == "a" for name in engine.reasons)
    flood(engine, "b", 30)
    while len(engine.reasons) < before + 12:
        engine.step()
    ended = Counter(name[0] for name in list(engine.reasons)[before:])
    assert ended["a"] >= 4, "who was away is served level with the others, and not first until it has caught up"


def test_one_client_alone_is_served_by_arrival():
    engine, reference = fair(), FakeEngine(60, max_model_len=80)
    for each in (engine, reference):
        flood(each, "a", 12)
        each.run()
    assert list(engine.reasons) == list(reference.reasons)
    assert engine.core.stats.num_preempted == reference.core.stats.num_preempted


def test_a_client_takes_one_place_and_no_more():
    engine = fair(**{"scheduler.max_num_seqs": 4})
    flood(engine, "a", 8)
    for _ in range(3):
        engine.step()
    flood(engine, "b", 8)
    for _ in range(3):
        engine.step()
        assert Counter(req.client for req in engine.scheduler.running) == {"a": 3, "b": 1}
    assert engine.core.stats.num_preempted == 1


def test_more_clients_than_places_take_nobodys_place():
    engine = fair(**{"scheduler.max_num_seqs": 2})
    for i in range(9):
        engine.add(f"r{i}", [i] * 5, client=f"t{i}", **LONG)
        engine.step()
    engine.run()
    assert engine.core.stats.num_preempted == 0


def test_a_new_prompt_leaves_every_running_request_its_token():
    engine = fair(**{"scheduler.max_num_batched_tokens": 16})
    flood(engine, "a", 4, length=4)
    engine.step()
    engine.step()
    engine.add("b", [9] * 60, client="b", **LONG)
    for _ in range(3):
        before = {name: len(tokens) for name, tokens in engine.tokens.items()}
        engine.step()
        assert all(len(engine.tokens[name]) == before[name] + 1 for name in ("a0", "a1", "a2", "a3"))


def test_nothing_is_kept_of_clients_that_have_left(monkeypatch):
    from minivllm.scheduler import fair as module

    monkeypatch.setattr(module, "MAX_CLIENTS", 5)
    engine, rng = fair(), random.Random(0)
    engine.add("long", [1] * 10, client="always", max_tokens=60, min_tokens=60)
    for i in range(40):
        engine.add(f"r{i}", [i] * 5, client=f"t{i}", max_tokens=rng.choice((1, 3)))
        engine.step()
    policy = engine.scheduler.policy
    assert len(policy._mean_output) == 5
    engine.run()
    assert not (policy._live or policy._starts or policy._ends)


def test_a_request_that_is_let_in_finds_its_prefix_and_is_counted():
    engine = fair(**{"scheduler.max_num_seqs": 2, "kv.prefix": "hash"})
    engine.add("first", [9] * 16, client="b", max_tokens=1)
    engine.run()
    flood(engine, "a", 4, length=10, max_tokens=60, min_tokens=60)
    for _ in range(3):
        engine.step()
    before = engine.core.stats.prefix_queries, engine.core.stats.prefix_hits
    engine.add("second", [9] * 20, client="b", **LONG)
    engine.step()
    assert engine.scheduler.requests["second"].num_cached_tokens == 16
    assert (engine.core.stats.prefix_queries, engine.core.stats.prefix_hits) == (before[0] + 20, before[1] + 16)


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one():
    engine = fair(**{"scheduler.max_num_batched_tokens": 4})
    flood(engine, "a", 5, length=70, max_tokens=3)
    engine.step()
    engine.add("short", [9, 9], client="b", max_tokens=1)
    assert steps_until_end(engine, "short") == 1


@pytest.mark.parametrize(
    "running, waiting, wanted",
    [
        ("aaab", "", ["a2", "a1"]),
        ("aab", "", ["a1"]),
        ("aabb", "", ["b1", "a1"]),
        ("ab", "", []),
        ("ab", "a", ["a0"]),
        ("ab", "ba", ["a0", "b0"]),
        ("aab", "a", ["a1", "a0"]),
    ],
)
def test_a_newcomer_takes_the_place_of_who_has_more_than_one_the_last_first_and_then_of_a_flood(
    running, waiting, wanted
):
    engine, seen = fair(**{"scheduler.max_num_seqs": len(running)}), []
    arrived = Counter()
    for client in running + waiting:
        engine.add(f"{client}{arrived[client]}", [ord(client)] * 5, client=client, **LONG)
        arrived[client] += 1
    engine.step()
    let_in = engine.scheduler.let_in

    def watched(req, at_cost_of):
        seen.append((req.id, [victim.id for victim in at_cost_of]))
        let_in(req, at_cost_of)

    engine.scheduler.let_in = watched
    engine.add("new", [9] * 5, client="z", **LONG)
    engine.step()
    assert seen == [("new", wanted)]
    assert ("new" in engine.core.plan.num_tokens) == bool(wanted)


def test_who_is_let_in_is_counted_beside_those_that_find_a_place_and_who_is_not_is_not_counted():
    engine = fair(**{"scheduler.max_num_seqs": 3, "kv.prefix": "hash"})
    for name in "bc":
        engine.add(name, [ord(name)] * 16, client=name, max_tokens=1)
    engine.run()
    engine.add("first", [1] * 5, client="a", **LONG)
    engine.step()
    for name in "bc":
        engine.add(name * 2, [ord(name)] * 20, client=name, **LONG)
    engine.step()
    stats = engine.core.plan.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (40, 32)
    for name in "def":
        engine.add(name, [1] * 5, client=name, **LONG)
        engine.step()
        assert engine.core.plan.stats.prefix_queries == 0, "nobody has a place to spare"


def test_a_search_is_one_request_of_its_client():
    beam, outlived = BeamSearchParams(beam_width=3, max_tokens=8), set()
    for i in range(4):
        engine, prompt = fair(**{"scheduler.max_num_seqs": 4}), [3, 1, 4, i]
        flood(engine, "a", 6)
        ids = engine.add_beams("b", prompt, beam)
        while ids[0] not in engine.reasons:
            engine.step()
            outlived.add(ids[0] not in engine.scheduler.requests and ids[0] not in engine.reasons)
        assert [engine.tokens[each] for each in ids] == beam_oracle(prompt, beam, engine.max_model_len)
        engine.run()
        assert not engine.scheduler.policy._live
    assert outlived == {False, True}, "a beam goes on without the request that it was forked from"


def test_an_aborted_request_is_not_charged_for_the_output_that_it_has_not_made():
    engine = fair(**{"scheduler.max_num_seqs": 1})
    engine.add("other", [1] * 5, client="b", **LONG)
    engine.step()
    flood(engine, "a", 2, length=10)
    assert engine.scheduler.requests["a1"].order[0] == 10 + OUTPUT_WEIGHT * 12
    engine.core.abort(["a0"])
    assert "a0" not in engine.scheduler.requests
    assert engine.scheduler.requests["a1"].order[0] == 10
    engine.run()
    assert engine.reasons.keys() == {"other", "a1"}


# --- the line of a client


class Line:
    """A policy, and requests of 10 tokens that come and go. The client "other" has one that stays."""

    def __init__(self, stays=True):
        self.policy, self.live, self.num_arrived = Fair(), {}, 0
        if stays:
            self.arrive("other")

    def arrive(self, client, num_output=0, max_tokens=50, group="", num_cached=0):
        """Its start."""
        name, self.num_arrived = f"{client}{self.num_arrived}", self.num_arrived + 1
        tokens = [1] * 10 + [2] * num_output
        req = Request(name, SamplingParams(max_tokens=max_tokens), tokens, 10, client=client, group=group)
        req.order = self.policy.order(req, self.num_arrived)
        req.num_cached_tokens = num_cached
        self.live[name] = req
        return req.order[0]

    def leave(self, client):
        """The first of its requests."""
        name = next(name for name, req in self.live.items() if req.client == client)
        del self.live[name]
        return self.policy.left(name, [])


def cost(num_output, num_prompt=10):
    return num_prompt + OUTPUT_WEIGHT * num_output


@pytest.mark.parametrize("num_cached", [0, 8])
def test_what_follows_a_request_starts_behind_what_it_has_cost(num_cached):
    line = Line()
    assert line.arrive("a", num_output=4, num_cached=num_cached) == 0
    assert line.arrive("a") == cost(50)
    line.leave("a")
    assert line.arrive("a") == cost(4, 10 - num_cached) + cost(50), "what the cache gave made no work"


def test_an_output_is_taken_to_be_as_long_as_its_clients_were_in_the_mean_and_no_longer_than_it_may_be():
    line = Line()
    for num_output in (10, 20):
        line.arrive("a", num_output)
        line.leave("a")
    starts = [line.arrive("a", max_tokens=max_tokens) for max_tokens in (None, 50, 3, 50)]
    assert [b - a for a, b in zip(starts, starts[1:], strict=False)] == pytest.approx([cost(11), cost(11), cost(3)])
    assert line.arrive("b", max_tokens=None) == 0
    assert line.arrive("b", max_tokens=None) == cost(256), "of whom nothing is known"


def test_sequences_of_one_prompt_start_together_and_each_makes_the_line_longer():
    line = Line()
    assert [line.arrive("a", group="g") for _ in range(3)] == [0, 0, 0]
    assert line.arrive("a", group="h") == 3 * cost(50)
    assert line.arrive("a", group="h") == 3 * cost(50)
    assert line.arrive("a") == 5 * cost(50)
    assert line.arrive("a") == 6 * cost(50)


def test_many_clients_do_not_make_one_forget_who_owes_work_or_is_served(monkeypatch):
    from minivllm.scheduler import fair as module

    monkeypatch.setattr(module, "MAX_CLIENTS", 1)
    line = Line()
    line.arrive("a", num_output=4)
    line.leave("a")
    assert line.arrive("a") == cost(4), "it has left, and comes again before the others have caught up"

    line = Line(stays=False)
    line.arrive("z")
    line.arrive("a")
    line.arrive("a", max_tokens=1)
    line.leave("z")
    line.leave("a")  # with much less than was thought: its line ends before its other request began
    assert line.arrive("b") == cost(50)
    assert not line.leave("a"), "it was still served"


def test_a_policy_that_is_out_of_step_with_its_scheduler_is_found():
    engine = fair()
    engine.add("a", [1] * 5, client="a", **LONG)
    engine.add("b", [1] * 5, client="b", **LONG)
    engine.core.scheduler.check()
    requests = engine.scheduler.requests
    other, requests["a"] = requests["a"], requests["b"]
    with pytest.raises(AssertionError, match="^a request is not the one that was taken in"):
        engine.scheduler.policy.check(requests)
    requests["a"] = other
    other.order = (-1.0, 0, 0)
    with pytest.raises(AssertionError, match="^a request is not on its client's line"):
        engine.scheduler.policy.check(requests)
