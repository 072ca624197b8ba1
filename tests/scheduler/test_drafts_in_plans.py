"""Drafts as a plan has them: what there is budget for, what is accepted, what is planned behind a step in flight."""

from scheduler.direct import plan_and_update, request, scheduler_of

from minivllm.plan import StepOutput

DRAFTS = {"a": [11, 12, 13, 14, 15], "b": [21, 22], "c": [31]}


def with_drafts(names="abc", budget=12, **options):
    """Each has 3 tokens of prompt, 1 of output, and drafts."""
    scheduler = scheduler_of(budget=budget, **options)
    for name in names:
        scheduler.add(request(name, [ord(name)] * 3, max_tokens=50))
    plan = scheduler.schedule(0.0)
    assert list(plan.num_tokens) == list(names)
    scheduler.update(plan, StepOutput({name: [1] for name in names}, drafts={name: DRAFTS[name] for name in names}))
    scheduler.check()
    return scheduler


def test_drafts_take_what_the_budget_has_beside_a_token_for_each_request_behind():
    for budget, wanted in ((12, {"a": 6, "b": 3, "c": 2}), (9, {"a": 6, "b": 2, "c": 1})):
        plan = with_drafts(budget=budget).schedule(0.0)
        assert plan.num_tokens == wanted
        assert plan.drafts == {name: DRAFTS[name][: num - 1] for name, num in wanted.items() if num > 1}
        assert plan.stats.num_drafted == sum(wanted.values()) - 3
    assert with_drafts("ab", budget=6).schedule(0.0).num_tokens == {"a": 5, "b": 1}


def test_a_request_goes_on_behind_the_last_draft_that_was_accepted():
    scheduler = with_drafts()
    out = StepOutput({"a": [11, 12, 99], "b": [21, 22, 23], "c": [5]}, drafts={"c": [41]})
    plan, deltas = plan_and_update(scheduler, out)
    assert [delta.token_ids for delta in deltas] == list(out.tokens.values()) and plan.stats.num_accepted == 4
    assert {name: req.num_computed_tokens for name, req in scheduler.requests.items()} == {"a": 6, "b": 6, "c": 4}
    plan, _ = plan_and_update(scheduler, StepOutput({"a": [1], "b": [1], "c": [1]}))
    assert plan.num_tokens == {"a": 1, "b": 1, "c": 2} and plan.start == {"a": 6, "b": 6, "c": 4}
    assert {name: req.num_computed_tokens for name, req in scheduler.requests.items()} == {"a": 7, "b": 7, "c": 5}


def test_drafts_for_which_there_was_no_budget_are_not_kept_for_another_step():
    scheduler = scheduler_of(budget=1)
    scheduler.add(request("a", 1, max_tokens=50))
    plan_and_update(scheduler, StepOutput({"a": [1]}, drafts=DRAFTS))
    assert scheduler.requests["a"].drafts == DRAFTS["a"]
    plan, _ = plan_and_update(scheduler, StepOutput({"a": [50]}))
    assert plan.num_tokens == {"a": 1} and plan.drafts == {} and scheduler.requests["a"].drafts == []


def test_a_proposer_finds_slots_behind_a_requests_tokens():
    for lookahead, num_blocks in ((0, 1), (5, 3)):
        scheduler = scheduler_of(lookahead=lookahead)
        scheduler.add(request("a", 3, max_tokens=50))
        plan_and_update(scheduler), plan_and_update(scheduler)
        assert len(scheduler.kv.blocks_of("a")) == num_blocks  # 4 tokens, and as many slots more


def test_a_step_behind_one_in_flight_is_planned_for_the_most_that_it_can_be_and_becomes_what_it_was():
    scheduler = scheduler_of(budget=20, num_drafts_ahead=3)
    for name in "ab":
        scheduler.add(request(name, [ord(name)] * 3, max_tokens=50))
    scheduler.add(request("long", [9] * 30, max_tokens=50))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first.num_tokens == {"a": 3, "b": 3, "long": 14} and first.ahead == {}
    assert second.num_tokens == {"a": 4, "b": 4, "long": 12} and second.ahead == {"a": 3, "b": 3}
    assert second.start == {"a": 3, "b": 3, "long": 14} and second.stats.num_drafted == 0
    third = scheduler.schedule(0.0)
    assert third.start == {"a": 7, "b": 7, "long": 26}  # if all that nobody has proposed yet were accepted
    scheduler.check()
    scheduler.hold(["b"])  # it wants nothing of any of them now
    scheduler.update(first, StepOutput({"a": [1], "b": [1]}, drafts={"a": [11, 12], "b": [21]}))
    scheduler.check()
    scheduler.update(second, StepOutput({"a": [11, 50], "b": [1]}))
    scheduler.check()
    assert second.num_tokens["a"] == 3 and second.drafts == {"a": [11, 12]}
    assert (second.stats.num_drafted, second.stats.num_accepted) == (2, 1)
    assert scheduler.requests["a"].token_ids == [97, 97, 97, 1, 11, 50]
    assert scheduler.requests["a"].num_computed_tokens == 5 and scheduler.requests["a"].drafts == []
    scheduler.update(third, StepOutput({"a": [51], "b": [1], "long": [1]}))
    scheduler.check()
    assert (third.start["a"], third.num_tokens["a"]) == (5, 1) and scheduler.requests["a"].num_computed_tokens == 6
