"""Policies and admissions of other systems: what each decides, by its own rule. That none of them changes an output:
tests/conformance."""

import pytest
from fakes import FakeEngine, oracle
from scheduler.runs import LONGEST, engine_with, plans, run_workload

from minivllm.config import PRESETS
from minivllm.kv.base import KVUsage
from minivllm.request import BeamSearchParams, Request, SamplingParams
from minivllm.scheduler.gather import HalfFull, ServedRatio
from minivllm.scheduler.phased import PhasedScheduler
from minivllm.scheduler.reserve import ReserveAll, ReservePrompt, ReserveShare
from minivllm.scheduler.unified import UnifiedScheduler

PHASED = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False}


def engine_of(num_blocks=1000, **options):
    return FakeEngine(num_blocks, LONGEST, **{"kv.block_size": 4, "kv.prefix": "none", **options})


def add(engine, req_id, num_prompt=8, max_tokens=10, beginning=()):
    own = [int(c, 36) for c in req_id] + [1] * (num_prompt - len(req_id))
    prompt = [*beginning, *own]
    return engine.add(req_id, prompt, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)


# --- groups


@pytest.mark.parametrize(
    "num_waiting, num_running, num_decodes, wanted",
    [
        (1, 3, 1, True),  # 0.3 * 3 is less than one request
        (1, 7, 1, False),
        (2, 7, 1, True),
        (1, 100, 18, False),
        (1, 100, 19, True),
        (50, 100, 0, False),  # a prefill has just been
    ],
)
def test_tgi_waits_for_a_share_of_those_that_run_or_twenty_steps(num_waiting, num_running, num_decodes, wanted):
    assert ServedRatio().is_time(num_waiting, num_running, num_decodes) == wanted


@pytest.mark.parametrize("num_waiting, num_running, wanted", [(1, 3, True), (1, 4, False), (3, 8, False), (4, 8, True)])
def test_lmdeploy_waits_for_four_or_half_of_the_places(num_waiting, num_running, wanted):
    assert HalfFull(max_num_seqs=8).is_time(num_waiting, num_running, 0) == wanted


def test_between_two_of_tgis_prefills_everybody_decodes_once():
    engine = engine_of(**PHASED, **{"scheduler.policy": "served_ratio", "scheduler.max_num_batched_tokens": LONGEST})
    for name in "abc":
        add(engine, name, num_prompt=50, max_tokens=9)
    assert plans(engine, 5) == [{"a": 50}, {"a": 1}, {"b": 50}, {"a": 1, "b": 1}, {"c": 50}]


def test_a_request_waits_for_others_and_not_for_ever():
    engine = engine_of(**PHASED, **{"scheduler.policy": "served_ratio"})
    for name in "abcdefgh":
        add(engine, name, max_tokens=60)
    engine.step()
    add(engine, "y", max_tokens=60)
    seen = plans(engine, 25)
    assert [i for i, plan in enumerate(seen) if "y" in plan and plan["y"] > 1] == [19]
    add(engine, "z", max_tokens=60)
    assert "z" not in plans(engine, 1)[0]
    add(engine, "x", max_tokens=60)
    assert plans(engine, 1) == [{"z": 8, "x": 8}]


def test_who_is_alone_in_the_queue_of_an_idle_engine_does_not_wait():
    for policy in ("served_ratio", "half_full"):
        engine = engine_of(**PHASED, **{"scheduler.policy": policy})
        add(engine, "a", max_tokens=1)
        assert plans(engine) == [{"a": 8}]
        add(engine, "b", max_tokens=2)
        assert plans(engine) == [{"b": 8}, {"b": 1}]


# --- Sarathi's


def test_decodes_come_first_and_a_prompt_gets_what_is_left():
    for policy, late in (("decodes_first", {"b": 6, "a": 1, "c": 1}), ("fcfs", {"b": 8})):
        engine = engine_of(**{"scheduler.policy": policy, "scheduler.max_num_batched_tokens": 8})
        add(engine, "a", num_prompt=4, max_tokens=30)
        add(engine, "c", num_prompt=4, max_tokens=30)
        engine.step()
        add(engine, "b", num_prompt=40, max_tokens=5)
        engine.scheduler.reorder({"b": (-1,)})  # a prompt that was begun before the others decoded
        engine.step()
        assert plans(engine, 1)[0] == late


# --- SGLang's order


def order_of(engine):
    engine.core.scheduler.schedule(0.0)
    return [req.id for req in engine.scheduler.waiting[::-1]]


def sglang(**options):
    return engine_of(**PHASED, **{"scheduler.policy": "longest_prefix", "kv.prefix": "radix", **options})


def test_the_longest_cached_beginning_is_served_first():
    engine = sglang(**{"scheduler.max_num_seqs": 1})
    long, short = list(range(40, 80)), list(range(20, 36))
    add(engine, "a", beginning=long, max_tokens=1)
    add(engine, "b", beginning=short, max_tokens=1)
    plans(engine)
    for name, beginning in (("c", ()), ("d", short), ("e", long), ("f", ())):
        add(engine, name, beginning=beginning, max_tokens=1)
    assert [name for plan in plans(engine) for name in plan] == ["e", "d", "c", "f"]


def test_of_those_that_begin_alike_one_is_computed_first_and_the_others_find_it():
    engine = sglang(**{"scheduler.max_num_seqs": 2})
    common = list(range(40, 76))
    for name, beginning in (("a", common), ("b", common), ("c", ()), ("d", common)):
        add(engine, name, beginning=beginning, max_tokens=1)
    seen = plans(engine)
    assert [set(plan) for plan in seen] == [{"a", "c"}, {"b", "d"}]
    assert seen[0] == {"a": 44, "c": 8} and seen[1] == {"b": 8, "d": 8}


def test_other_tenants_beginnings_are_not_waited_for():
    engine = sglang(**{"scheduler.max_num_seqs": 2})
    prompt = list(range(40, 80))
    engine.add("a", prompt, max_tokens=1, cache_salt="one")
    engine.add("b", prompt, max_tokens=1, cache_salt="other")
    add(engine, "c", max_tokens=1)
    assert set(plans(engine, 1)[0]) == {"a", "b"}


def test_a_queue_of_more_than_128_is_served_as_it_stands():
    engine = sglang(**{"scheduler.max_num_seqs": 1})
    add(engine, "a", beginning=list(range(40, 80)), max_tokens=1)
    plans(engine)
    for i in range(129):
        add(engine, f"r{i:03}", max_tokens=1)
    add(engine, "z", beginning=list(range(40, 80)), max_tokens=1)
    assert [*plans(engine, 1)[0], *plans(engine, 1)[0], *plans(engine, 1)[0]] == ["r000", "r001", "z"]


@pytest.mark.parametrize(
    "num_common, num_cached, waits",
    [
        (32, 0, False),  # too short to be worth a wait
        (33, 0, True),
        (40, 32, True),
        (40, 36, False),  # the rest of so long a beginning is computed at once
    ],
)
def test_who_could_share_more_than_32_tokens_that_are_not_cached_waits(num_common, num_cached, waits):
    engine, common = sglang(**{"scheduler.max_num_seqs": 2}), [1 + i for i in range(num_common)]
    if num_cached:
        engine.add("before", common[:num_cached], max_tokens=1)
        plans(engine)
    for name in "ab":
        engine.add(name, common, max_tokens=1)
    add(engine, "c", max_tokens=1)
    assert set(plans(engine, 1)[0]) == ({"a", "c"} if waits else {"a", "b"})


def test_a_search_is_served_in_its_turn_among_those_that_nothing_is_cached_of():
    engine = sglang(**{"scheduler.max_num_seqs": 1})
    engine.add_beams("b", [9] * 8, BeamSearchParams(beam_width=1, max_tokens=1))
    add(engine, "c", max_tokens=1)
    assert [name for plan in plans(engine) for name in plan] == ["b", "c"]


def test_two_that_do_not_fit_together_do_not_push_each_other_out_for_ever():
    engine = FakeEngine(20, LONGEST, **{"kv.block_size": 4, "kv.prefix": "radix", "scheduler.policy": "longest_prefix"})
    wanted = {}
    for i in range(12):
        prompt = [i % 3] * 9 + [i] * 12
        wanted[str(i)] = oracle(prompt, engine.add(str(i), prompt, max_tokens=40, min_tokens=40), LONGEST)
    assert engine.run(max_steps=12 * 45) == wanted
    assert engine.core.stats.num_preempted > 0


# --- room that is set aside


@pytest.mark.parametrize("scheduler", [UnifiedScheduler, PhasedScheduler])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_with_room_for_all_outputs_nobody_is_ever_preempted(scheduler, block_size):
    for seed, budget in enumerate((7, 512) if scheduler is UnifiedScheduler else (100,)):
        engine = engine_with(scheduler, ReserveAll(LONGEST), 160 // block_size, block_size, budget)
        run_workload(engine, seed)
        assert engine.core.stats.num_preempted == 0


def running(num_prompt, num_output, max_tokens, name="r", computed=None):
    req = Request(name, SamplingParams(max_tokens=max_tokens), [0] * (num_prompt + num_output), num_prompt)
    req.num_computed_tokens = req.num_tokens - 1 if computed is None else computed
    return req


def least_free(admission, req, others, block_size=1, num_groups=1):
    """The least number of free blocks with which req is let in."""
    usages = (KVUsage(200, free, 0, block_size, num_groups) for free in range(200))
    return next(usage.num_free for usage in usages if admission.admits(req, req.num_tokens, others, usage))


def test_tgi_sets_aside_all_that_may_be_written():
    new = Request("n", SamplingParams(max_tokens=10), [0] * 5, 5)
    assert least_free(ReserveAll(LONGEST), new, [running(20, 1, 10)]) == 14 + 9  # the other holds 20 slots of its 29


def test_sarathi_sets_aside_the_rest_of_prompts_and_a_hundredth():
    new = Request("n", SamplingParams(max_tokens=10), [0] * 5, 5)
    assert least_free(ReservePrompt(), new, [running(20, 0, 10, computed=8)]) == 5 + 12 + 2
    other = running(20, 5, 10)
    assert least_free(ReservePrompt(), new, [other]) == 5 + 1 + 2
    other.num_in_flight = 1
    assert least_free(ReservePrompt(), new, [other]) == 5 + 2, "its room for that is taken"


@pytest.mark.parametrize(
    "admission, own, others",
    [(ReserveAll(LONGEST), 4, 3), (ReservePrompt(0.0), 2, 1), (ReserveShare(LONGEST), 4, 2)],
    ids=["all", "prompt", "share"],
)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_room_is_set_aside_in_whole_blocks_of_each_group_of_layers(admission, own, others, num_groups):
    new = Request("n", SamplingParams(max_tokens=10), [0] * 5, 5)
    other = running(20, 1, 10)  # it holds 5 blocks of 4, and knows 21 of its 29 tokens
    assert least_free(admission, new, [other], 4, num_groups) == num_groups * (own + others)


def test_sglangs_share_falls_by_steps_and_rises_with_a_preemption():
    admission = ReserveShare(LONGEST)
    new = Request("n", SamplingParams(max_tokens=11), [0] * 5, 5)
    other = running(20, 1, 41, name="o")  # 39 slots to come beside the 21 that it knows, of which it holds 20
    assert least_free(admission, new, [other]) == 15 + 1 + int(0.7 * 39)
    assert admission.share == 0.7
    other.token_ids += [0] * 10  # ten steps
    other.num_computed_tokens += 10
    assert least_free(admission, new, [other]) == 15 + 1 + int(0.69 * 29)
    assert admission.share == pytest.approx(0.7 - 10 * (0.7 - 0.098) / 600)
    new.num_preemptions = 1
    admission.admits(new, 5, [other], KVUsage(200, 100))
    assert admission.share == pytest.approx((11 + 20) / (11 + 29 + 1))
    before = admission.share
    admission.admits(new, 5, [other], KVUsage(200, 100))
    assert admission.share == before, "one preemption counts once"


def test_sglang_counts_a_newcomer_whole_until_its_first_token():
    new = Request("n", SamplingParams(max_tokens=11), [0] * 5, 5)
    just_in = running(20, 0, 41, computed=20)
    assert least_free(ReserveShare(LONGEST), new, [just_in]) == 15 + 40
    just_in.token_ids.append(0)
    assert least_free(ReserveShare(LONGEST), new, [just_in]) == 15 + 1 + int(0.7 * 39)


@pytest.mark.parametrize("others", [[], [running(20, 1, 2)]], ids=["nobody", "one that asks for its last token"])
def test_of_sglangs_share_there_is_none_of_what_is_not_to_come(others):
    new = Request("n", SamplingParams(max_tokens=1), [0] * 5, 5)
    admission = ReserveShare(LONGEST)
    assert least_free(admission, new, others) == 5 + len(others)
    assert admission.share == 0.7


def test_sglangs_share_after_a_preemption_is_that_of_all_who_run_and_falls_again():
    admission = ReserveShare(LONGEST)
    new = Request("n", SamplingParams(max_tokens=11), [0] * 5, 5, num_preemptions=1)
    others = [running(20, 4, 51, name="a"), running(20, 6, 55, name="b")]
    usage = KVUsage(200, 100)
    admission.admits(new, 5, others, usage)
    share = (4 + 6 + 2 * 20) / (50 + 54 + 1)
    assert admission.share == pytest.approx(share)
    others[0].token_ids += [0] * 7
    admission.admits(new, 5, others, usage)
    assert admission.share == pytest.approx(share - 7 * (0.7 - 0.098) / 600), "the same preemption counts no more"
    new.num_preemptions = 2
    admission.admits(new, 5, [running(20, 9, 10, name="c")], usage)
    assert admission.share == 1.0, "never more than all"


def test_sglang_lets_more_in_than_tgi():
    num_steps = {}
    for admission in (ReserveAll(LONGEST), ReserveShare(LONGEST)):
        engine = engine_with(UnifiedScheduler, admission, 160, 1)
        run_workload(engine, seed=1)
        num_steps[type(admission)] = engine.core.stats.num_steps
    assert num_steps[ReserveShare] < num_steps[ReserveAll]


# --- presets


@pytest.mark.parametrize("name", ["tgi", "sglang", "lightllm", "lmdeploy", "sarathi"])
def test_a_systems_preset_changes_timing_never_output(name):
    small = {"kv.block_size": min(4, PRESETS[name].overrides.get("kv.block_size", 4))}
    engine = FakeEngine(120 // small["kv.block_size"], LONGEST, **{**PRESETS[name].overrides, **small})
    run_workload(engine, seed=2)
    engine.scheduler.check()


# --- time


@pytest.mark.parametrize("policy", ["fcfs", "fair", "longest_prefix", "half_full"])
def test_the_time_of_a_step_reaches_the_scheduler_inside(policy):
    engine, seen = FakeEngine(**{"scheduler.policy": policy}), []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda now: (seen.append(now), schedule(now))[1]
    engine.now = 3.0
    add(engine, "a")
    engine.step()
    engine.step()
    assert seen == [4.0, 5.0]
