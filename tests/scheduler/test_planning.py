"""What a plan says, and to whom blocks and budget go, by schedulers without an engine around them."""

import pytest
from scheduler.direct import plan_and_update, request, scheduler_of

from minivllm.errors import BadRequest, NeverFits
from minivllm.plan import Join, StepOutput, StepStats
from minivllm.request import Item, SamplingParams
from minivllm.scheduler.phased import PhasedScheduler
from minivllm.scheduler.policy import DecodesFirst
from minivllm.scheduler.static import StaticScheduler
from minivllm.scheduler.unified import UnifiedScheduler

WHOLE = {"chunked_prefill": False}
KINDS = {
    "unified": (UnifiedScheduler, {}),
    "unified, whole": (UnifiedScheduler, WHOLE),
    "phased": (PhasedScheduler, WHOLE),
    "static": (StaticScheduler, WHOLE),
}


def ids(requests):
    return "".join(req.id for req in requests)


# --- the plan's columns


def test_a_plan_is_numbered_and_counts_what_was_found_taken_and_left():
    scheduler = scheduler_of(num_blocks=16, max_num_seqs=2)
    scheduler.add(request("a", 10, max_tokens=2))
    first, _ = plan_and_update(scheduler)
    assert first.stats == StepStats(
        num_running=1, num_free_blocks=13, num_total_blocks=16, num_used_slots=10, prefix_queries=10
    )
    for name in "bcd":
        scheduler.add(request(name, 10))
    second, _ = plan_and_update(scheduler)
    assert second.stats == StepStats(
        num_running=2,
        num_waiting=2,
        num_free_blocks=12,  # b shares two of its three
        num_total_blocks=16,
        num_used_slots=11 + 10,
        prefix_queries=10,
        prefix_hits=8,
    )
    third, _ = plan_and_update(scheduler)  # a has ended, and c takes its place: one block of its own, as b has
    assert third.stats.num_free_blocks == 12 and (third.stats.prefix_queries, third.stats.prefix_hits) == (10, 8)
    assert third.stats.num_used_slots == 11 + 10 and third.leaves == ["a"]
    assert [plan.step for plan in (first, second, third)] == [0, 1, 2]


def test_a_plan_counts_the_free_blocks_that_hold_a_prefix_yet():
    scheduler = scheduler_of(num_blocks=16)
    scheduler.add(request("a", 10, max_tokens=1))
    plan_and_update(scheduler)
    plan, _ = plan_and_update(scheduler)
    assert (plan.stats.num_free_blocks, plan.stats.num_cached_blocks) == (16, 2)
    scheduler.add(request("b", 10)), scheduler.add(request("c", 9))
    plan, _ = plan_and_update(scheduler)  # both find these
    assert (plan.stats.prefix_queries, plan.stats.prefix_hits) == (10 + 9, 8 + 8)
    assert (plan.stats.num_free_blocks, plan.stats.num_cached_blocks) == (12, 0)


def test_a_join_is_all_that_a_worker_must_know_of_a_request():
    scheduler = scheduler_of()
    params = {"max_tokens": 3, "temperature": 0.5}
    scheduler.add(request("a", [5, 6, 7], adapter="lora", cache_salt="salt", **params))
    plan, _ = plan_and_update(scheduler)
    assert plan.joins == [Join("a", [5, 6, 7], 3, SamplingParams(**params), "lora", "salt")]
    scheduler.preempt(scheduler.requests["a"])
    plan = scheduler.schedule(0.0)
    (join,) = plan.joins
    assert (join.token_ids, join.num_prompt_tokens) == ([5, 6, 7, 1], 3)
    scheduler.update(plan, StepOutput({"a": [2]}))
    assert join.token_ids == [5, 6, 7, 1]  # what came later is another plan's affair


def test_what_stands_in_a_prompt_comes_with_whoever_joins_and_goes_with_whoever_leaves():
    scheduler = scheduler_of()
    picture = (Item(1, 2, "cat"),)
    scheduler.add(request("a", 6, max_tokens=1, items=picture))
    plans = [plan_and_update(scheduler)[0] for _ in range(2)]
    assert plans[0].joins[0].items == picture
    assert [(plan.encode, plan.forget) for plan in plans] == [(["cat"], []), ([], ["cat"])]


def test_those_preempted_between_two_plans_are_counted_in_the_next_one_beside_its_own():
    scheduler = scheduler_of(num_blocks=8)
    for name in "abcd":
        scheduler.add(request(name, [ord(name)] * 8, max_tokens=9))
    plan_and_update(scheduler)
    scheduler.hold(["d"])
    scheduler.kv.allocate(scheduler.requests["c"], 8)  # drafts that it did not get, say: the pool is full again
    first, _ = plan_and_update(scheduler)
    assert first.stats.num_preempted == 2 and ids(scheduler.running) == "ab"  # c made room for a and b: one is enough
    assert first.num_tokens == {"a": 1, "b": 1} == {name: len(blocks) for name, blocks in first.new_blocks.items()}
    assert first.start == {"a": 8, "b": 8}
    second, _ = plan_and_update(scheduler)
    assert second.stats.num_preempted == 0


@pytest.mark.parametrize("kind", [UnifiedScheduler, PhasedScheduler])
def test_the_one_served_last_gives_way_first_and_nobody_new_comes_in_its_place(kind):
    scheduler = scheduler_of(kind, num_blocks=9, chunked_prefill=kind is UnifiedScheduler)
    for name in "abc":
        scheduler.add(request(name, [ord(name)] * 12, max_tokens=9))
    plan_and_update(scheduler)
    scheduler.add(request("d", [4]))
    scheduler.reorder({"d": (-1,)})
    plan, _ = plan_and_update(scheduler)
    assert ids(scheduler.running) == "ab" and ids(reversed(scheduler.waiting)) == "dc"
    assert plan.num_tokens == {"a": 1, "b": 1} and plan.leaves == ["c"] and plan.stats.num_preempted == 1
    plan, _ = plan_and_update(scheduler)
    assert "d" in plan.num_tokens and plan.leaves == []


def test_one_for_whom_nobody_else_can_make_room_goes_itself():
    scheduler = scheduler_of(num_blocks=4)
    scheduler.add(request("a", [1] * 7, max_tokens=9)), scheduler.add(request("b", [2] * 8, max_tokens=9))
    plan_and_update(scheduler)
    plan, _ = plan_and_update(scheduler)
    assert plan.num_tokens == {"a": 1} and ids(scheduler.running) == "a" and ids(scheduler.waiting) == "b"
    assert scheduler.requests["b"].num_preemptions == 1


def test_each_of_those_who_made_room_in_one_plan_is_counted():
    scheduler = scheduler_of(num_blocks=6)
    for name, num_tokens in (("a", 8), ("b", 8), ("c", 2), ("d", 2)):
        scheduler.add(request(name, [ord(name)] * num_tokens, max_tokens=9))
    plan_and_update(scheduler)
    plan, _ = plan_and_update(scheduler)
    assert plan.num_tokens == {"a": 1, "b": 1} and plan.stats.num_preempted == 2


# --- groups


def group(scheduler, *names, prompt=10, **params):
    for name in names:
        of_group = {"group": "g"} if name.startswith("g") else {}
        scheduler.add(request(name, [ord(name[0])] * prompt, **{"max_tokens": 8, **of_group, **params}))


def test_others_do_not_wait_for_a_group_whose_prompt_is_being_computed():
    scheduler = scheduler_of(PhasedScheduler, **WHOLE)
    group(scheduler, "g0", "g1", "x")
    assert plan_and_update(scheduler)[0].num_tokens == {"g0": 10, "x": 10}
    plan, _ = plan_and_update(scheduler)
    # Of the 8 tokens that the prefix index has and the 9 that are its relative's, the more.
    assert plan.num_tokens == {"g0": 1, "x": 1, "g1": 1} and plan.start["g1"] == 9


def test_as_many_of_a_group_fork_at_once_as_the_budget_has_tokens():
    scheduler = scheduler_of(PhasedScheduler, budget=20, **WHOLE)
    group(scheduler, *(f"g{i}" for i in range(7)), prompt=4)
    plan_and_update(scheduler)
    assert list(plan_and_update(scheduler)[0].num_tokens) == [f"g{i}" for i in range(7)]
    scheduler = scheduler_of(PhasedScheduler, budget=5, **WHOLE)
    group(scheduler, *(f"g{i}" for i in range(7)), prompt=4, max_tokens=2)
    plan_and_update(scheduler)
    assert list(plan_and_update(scheduler)[0].num_tokens) == ["g0", "g1", "g2", "g3", "g4"]


def test_a_group_forks_as_soon_as_its_prompt_is_there_though_a_later_step_is_in_flight():
    scheduler = scheduler_of(PhasedScheduler, **WHOLE)
    group(scheduler, "g0", "g1")
    prefill, decode = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert prefill.num_tokens == {"g0": 10} and decode.num_tokens == {"g0": 1}
    scheduler.update(prefill, StepOutput({"g0": [1]}))
    group(scheduler, "x")
    assert scheduler.schedule(0.0).num_tokens == {"g0": 1, "g1": 1}  # before the prompt that came later


def test_a_group_goes_whole_even_if_one_of_it_is_in_the_plan_already():
    scheduler = scheduler_of(PhasedScheduler, num_blocks=8, **WHOLE)
    group(scheduler, "g0", prompt=7), group(scheduler, "x"), group(scheduler, "g1", prompt=7)
    plan = next(plan for _ in range(9) if (plan := plan_and_update(scheduler)[0]).stats.num_preempted)
    assert plan.stats.num_preempted == 2 and plan.leaves == ["g1", "g0"]
    for column in (plan.num_tokens, plan.start, plan.new_blocks):
        assert list(column) == ["x"]
    assert ids(reversed(scheduler.waiting)) == "g0g1"


# --- the budget


def test_a_running_prompt_leaves_a_token_to_each_behind_it_if_the_policy_spares_them():
    scheduler = scheduler_of(budget=12, policy=DecodesFirst())
    for name in "abc":
        scheduler.add(request(name, [ord(name)] * 2))
    plan_and_update(scheduler)
    scheduler.add(request("long", [9] * 40))
    scheduler.add(request("last", [8]))
    scheduler.reorder({"long": (-1,), "last": (-2,)})
    plan, _ = plan_and_update(scheduler)
    assert plan.num_tokens == {"a": 1, "b": 1, "c": 1, "last": 1, "long": 8}
    plan, _ = plan_and_update(scheduler)
    assert plan.num_tokens == {"last": 1, "long": 8, "a": 1, "b": 1, "c": 1}


def test_a_running_prompt_gets_one_token_at_least_and_no_more_if_all_others_are_wanted():
    scheduler = scheduler_of(budget=4, policy=DecodesFirst())
    for name in "abc":
        scheduler.add(request(name, [ord(name)]))
    plan_and_update(scheduler)
    scheduler.add(request("long", [9] * 3))
    scheduler.reorder({"long": (-1,)})
    plan_and_update(scheduler)
    assert plan_and_update(scheduler)[0].num_tokens == {"long": 1, "a": 1, "b": 1, "c": 1}


class Refuses:
    """An admission that has no room for b, and writes down what it was asked."""

    def __init__(self):
        self.asked = []

    def admits(self, req, new_tokens, running, usage):
        self.asked.append((req.id, new_tokens, ids(running), usage))
        return req.id != "b"


@pytest.mark.parametrize("kind, options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("refuses", [Refuses, None])
def test_who_finds_no_room_is_not_overtaken_by_those_who_would(kind, options, refuses):
    admission = refuses and refuses()
    scheduler = scheduler_of(kind, num_blocks=64 if refuses else 8, admission=admission, **options)
    for name, num_tokens in (("a", 16), ("b", 20), ("c", 2)):
        scheduler.add(request(name, [ord(name)] * num_tokens, max_tokens=9))
    plan, _ = plan_and_update(scheduler)
    assert plan.num_tokens == {"a": 16} and ids(reversed(scheduler.waiting)) == "bc"
    if admission:  # who would be alone is not asked for
        assert admission.asked == [("b", 20, "a", scheduler.kv.usage)]


@pytest.mark.parametrize("kind, options", KINDS.values(), ids=KINDS)
def test_prompts_that_fill_the_budget_to_its_last_token_run_together(kind, options):
    for last, wanted in ((3, "abc"), (4, "ab")):
        scheduler = scheduler_of(kind, budget=12, **options)
        for name, num_tokens in (("a", 4), ("b", 5), ("c", last)):
            scheduler.add(request(name, [ord(name)] * num_tokens, max_tokens=5))
        plan, _ = plan_and_update(scheduler)
        assert "".join(plan.num_tokens)[: len(wanted)] == wanted
        assert plan.total_tokens == (12 if last == 3 or options != WHOLE else 9)


@pytest.mark.parametrize("kind, options", KINDS.values(), ids=KINDS)
def test_as_many_run_as_there_are_places_or_tokens_in_a_step(kind, options):
    for max_num_seqs, budget, wanted in ((3, 9, 3), (9, 3, 3)):
        scheduler = scheduler_of(kind, max_num_seqs=max_num_seqs, budget=budget, **options)
        for i in range(5):
            scheduler.add(request(str(i), [50 + i], max_tokens=3))
        assert [plan_and_update(scheduler)[0].total_tokens for _ in range(2)] == [wanted, wanted]


@pytest.mark.parametrize("kind, options", KINDS.values(), ids=KINDS)
def test_an_engine_with_nothing_to_do_makes_empty_plans(kind, options):
    scheduler = scheduler_of(kind, **options)
    scheduler.check()
    for _ in range(2):
        plan, deltas = plan_and_update(scheduler)
        assert (plan.num_tokens, plan.joins, plan.leaves, deltas) == ({}, [], [], [])


# --- steps in flight


def test_nothing_is_planned_behind_the_last_token_that_a_request_may_have():
    scheduler = scheduler_of(max_model_len=8)
    scheduler.add(request("short", 2, max_tokens=2)), scheduler.add(request("a", [7] * 5, max_tokens=50))
    plans = [scheduler.schedule(0.0) for _ in range(4)]
    assert [plan.num_tokens for plan in plans] == [{"short": 2, "a": 5}, {"short": 1, "a": 1}, {"a": 1}, {}]
    assert [plan.start for plan in plans] == [{"short": 0, "a": 0}, {"short": 2, "a": 5}, {"a": 6}, {}]
    assert [plan.num_in_flight for plan in plans] == [0, 1, 2, 3]
    for plan in plans:
        scheduler.check()
        scheduler.update(plan, StepOutput({name: [1] for name in plan.num_tokens}))
    assert not scheduler.requests
    scheduler.check()


def test_a_plan_that_has_not_run_gives_its_requests_back_to_the_queue():
    scheduler = scheduler_of()
    scheduler.add(request("gone", 2, max_tokens=1)), plan_and_update(scheduler)
    for name in "abc":
        scheduler.add(request(name, 6))
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    scheduler.hold(["b"])  # what it had in flight is dropped already, and it is preempted no second time
    for plan in plans:
        assert scheduler.update(plan, StepOutput(is_lost=True)) == []
        scheduler.check()
    assert not scheduler.running and [req.num_preemptions for req in scheduler.requests.values()] == [1, 1, 1]
    plan, _ = plan_and_update(scheduler)
    assert sorted(set(plan.leaves)) == ["a", "b", "c", "gone"]  # who was to be told so by a plan that did not run
    assert plan.num_tokens == {"a": 6, "c": 6}


# --- refusals


def refusal(scheduler, req):
    with pytest.raises(BadRequest) as caught:
        scheduler.add(req)
    assert req.id not in scheduler.requests or scheduler.requests[req.id] is not req
    return type(caught.value), caught.value.param, str(caught.value)


@pytest.mark.parametrize(
    "options, req, kind, param, message",
    [
        ({}, request("a", 0), BadRequest, "prompt", "the prompt is empty"),
        (
            {},
            request("a", 20),
            NeverFits,
            "prompt",
            "the prompt has 20 tokens, which leaves no room for output: max_model_len is 20 tokens",
        ),
        (
            {"num_blocks": 3},
            request("a", 6, max_tokens=8),
            NeverFits,
            "max_tokens",
            "prompt and output may reach 13 tokens; the KV pool holds 12. "
            "Lower max_tokens or give the pool more blocks (kv.num_blocks, kv.memory)",
        ),
        (
            {"budget": 12, "chunked_prefill": False},
            request("a", 6, max_tokens=8),
            NeverFits,
            "max_tokens",
            "prompt and output may reach 13 tokens, which one step must be able to recompute; "
            "without chunked prefill a step takes 12. "
            "Raise scheduler.max_num_batched_tokens or turn scheduler.chunked_prefill on",
        ),
        ({}, request("in use", 6), BadRequest, "request_id", 'request id "in use" is in use'),
    ],
)
def test_a_refusal_says_what_is_wrong_with_which_parameter_and_what_to_change(options, req, kind, param, message):
    scheduler = scheduler_of(max_model_len=20, **options)
    scheduler.add(request("in use", 1, max_tokens=1))
    assert refusal(scheduler, req) == (kind, param, message)


@pytest.mark.parametrize(
    "options, prompt, params",
    [
        ({}, 19, {}),
        ({"num_blocks": 3}, 6, {"max_tokens": 7}),
        ({"budget": 12, "chunked_prefill": False}, 6, {"max_tokens": 7}),
        ({"budget": 12}, 6, {"max_tokens": 8}),
    ],
)
def test_what_just_fits_is_taken(options, prompt, params):
    scheduler = scheduler_of(max_model_len=20, **options)
    scheduler.add(request("a", prompt, **params))
    plan_and_update(scheduler)


def test_a_group_is_refused_only_for_what_its_own_sequences_take_together():
    scheduler = scheduler_of(PhasedScheduler, num_blocks=6, **WHOLE)
    scheduler.add(request("other", 9, max_tokens=4)), scheduler.add(request("h#0", 9, max_tokens=4, group="h"))
    scheduler.add(request("g#0", 9, max_tokens=4, group="g"))
    scheduler.add(request("g#1", 9, max_tokens=4, group="g"))  # three blocks each: the pool
    assert refusal(scheduler, request("g#2", 9, max_tokens=4, group="g")) == (
        NeverFits,
        "n",
        "the 3 sequences of this request run together and may reach 36 tokens, more than fit into a KV pool of 6 "
        "blocks of 4 tokens. Lower n or max_tokens, or give the pool more blocks",
    )


@pytest.mark.parametrize("num_blocks, are_taken", [(5, False), (6, True)])
def test_a_group_fits_if_its_blocks_do_though_they_are_not_full(num_blocks, are_taken):
    """15 tokens, and four blocks hold 16: three sequences that share nothing take six."""
    scheduler = scheduler_of(PhasedScheduler, num_blocks=num_blocks, **WHOLE)
    scheduler.add(request("g#0", 3, max_tokens=3, group="g"))
    scheduler.add(request("g#1", 3, max_tokens=3, group="g"))
    third = request("g#2", 3, max_tokens=3, group="g")
    if not are_taken:
        assert refusal(scheduler, third)[:2] == (NeverFits, "n")
        return
    scheduler.add(third)
    for _ in range(10):
        plan_and_update(scheduler)
    assert not scheduler.requests
