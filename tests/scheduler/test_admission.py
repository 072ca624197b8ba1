import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.runs import LONGEST, engine_with, run_workload

from minivllm.kv.base import KVUsage
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.admission import AdmitAll, FullPrompt, PredictedPeak, Watermark, peak_blocks
from minivllm.scheduler.phased import PhasedScheduler
from minivllm.scheduler.unified import UnifiedScheduler

# --- predicted peak


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12), st.sampled_from((1, 4, 16))
)
@settings(deadline=None)
def test_the_peak_is_what_a_simulation_step_by_step_finds(growing, block_size):
    worst = 0
    for step in range(max(r for _, r in growing) + 1):
        worst = max(worst, sum(-(-(u + step) // block_size) for u, r in growing if r >= step))
    assert peak_blocks(growing, block_size) == worst


def test_the_peak_of_lightllms_formula_in_slots():
    # by remaining: (u 4, r 10), (u 6, r 5), (u 20, r 1) -> max(4 + 10, 10 + 2 * 5, 30 + 3 * 1)
    assert peak_blocks([(6, 5), (20, 1), (4, 10)], 1) == 33
    assert peak_blocks([], 1) == 0


def running(num_prompt, num_output, max_tokens):
    req = Request("r", SamplingParams(max_tokens=max_tokens), [0] * (num_prompt + num_output), num_prompt)
    req.num_computed_tokens = req.num_tokens - 1
    return req


def test_a_newcomer_waits_for_the_one_whose_end_makes_room():
    peak = PredictedPeak(block_size=1, max_model_len=LONGEST)
    new = Request("n", SamplingParams(max_tokens=10), [0] * 10, 10)
    usage = KVUsage(num_total=41, num_free=20)
    # The other fills 21 slots after this step, and 29 eight steps on, when the newcomer has 11 + 8: 48 in all.
    assert peak.peak(new, 10, [running(20, 1, 10)]) == 48
    assert not peak.admits(new, 10, [running(20, 1, 10)], usage)
    # Near its end it fills 28, and then 29 beside the newcomer's 12; after that the newcomer has the pool to itself.
    assert peak.peak(new, 10, [running(20, 8, 10)]) == 41
    assert peak.admits(new, 10, [running(20, 8, 10)], usage)


def test_who_is_still_being_prefilled_counts_with_all_that_it_will_hold():
    peak = PredictedPeak(block_size=1, max_model_len=LONGEST)
    part = Request("p", SamplingParams(max_tokens=10), [0] * 30, 30, num_computed_tokens=8)
    new = Request("n", SamplingParams(max_tokens=2), [0] * 5, 5)
    assert peak.peak(new, 5, [part]) == 39 + 7
    assert peak.peak(new, 3, [part]) == 39 + 6


@pytest.mark.parametrize("num_computed", [8, 28])
@pytest.mark.parametrize("new_tokens", [3, 5])
def test_what_a_prefill_will_hold_is_counted_in_whole_blocks_of_each_group_of_layers(num_computed, new_tokens):
    part = Request("p", SamplingParams(max_tokens=10), [0] * 30, 30, num_computed_tokens=num_computed)
    new = Request("n", SamplingParams(max_tokens=2), [0] * 5, 5)
    peak = PredictedPeak(block_size=4, max_model_len=LONGEST)
    assert peak.peak(new, new_tokens, [part]) == 10 + 2
    for num_groups in (1, 3):
        admitted = [
            peak.admits(new, new_tokens, [part], KVUsage(num_groups * 12 - less, 0, num_groups=num_groups))
            for less in (0, 1)
        ]
        assert admitted == [True, False]


def test_a_token_in_flight_counts_as_if_it_were_there():
    peak = PredictedPeak(block_size=1, max_model_len=LONGEST)
    new = Request("n", SamplingParams(max_tokens=10), [0] * 10, 10)
    for num_known in (1, 5, 9):
        ahead = running(20, num_known, 10)
        ahead.num_in_flight = 1
        assert peak.peak(new, 10, [ahead]) == peak.peak(new, 10, [running(20, min(num_known + 1, 9), 10)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [7, 64, 512])
def test_with_the_predicted_peak_nobody_is_ever_preempted(seed, block_size, budget):
    num_blocks = 160 // block_size
    engine = engine_with(UnifiedScheduler, PredictedPeak(block_size, LONGEST), num_blocks, block_size, budget)
    run_workload(engine, seed)
    assert engine.core.stats.num_preempted == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block_size", [1, 4])
def test_with_the_predicted_peak_nobody_is_ever_preempted_in_phases_either(seed, block_size):
    engine = engine_with(PhasedScheduler, PredictedPeak(block_size, LONGEST), 160 // block_size, block_size, 100)
    run_workload(engine, seed)
    assert engine.core.stats.num_preempted == 0


def test_without_it_the_same_workload_preempts():
    num_preempted = []
    for seed in range(6):
        engine = engine_with(UnifiedScheduler, AdmitAll(), 160, 1)
        run_workload(engine, seed)
        num_preempted.append(engine.core.stats.num_preempted)
    assert min(num_preempted) > 0


class ReserveForAll:
    """What a contiguous pool does: whoever runs counts with all that it will ever hold."""

    def admits(self, req, new_tokens, running, usage):
        slots = sum(r.num_final_slots(LONGEST) for r in (*running, req))
        return slots <= usage.num_total * usage.block_size


def test_the_predicted_peak_finishes_sooner_than_reserving_for_all_and_preempts_as_little():
    """Requests at different points of their lives do not reach their ends together."""
    num_steps = {}
    for admission in (PredictedPeak(1, LONGEST), ReserveForAll()):
        engine = engine_with(UnifiedScheduler, admission, 160, 1)
        run_workload(engine, seed=0)
        assert engine.core.stats.num_preempted == 0
        num_steps[type(admission)] = engine.core.stats.num_steps
    assert num_steps[PredictedPeak] < 0.95 * num_steps[ReserveForAll]


# --- watermark


def least_free(admission, req, new_tokens, **usage):
    """The least number of free blocks, of 4 tokens, with which req is let in."""
    total = usage.pop("num_total", 100)
    usages = (KVUsage(total, free, block_size=4, **usage) for free in range(total + 1))
    return next(u.num_free for u in usages if admission.admits(req, new_tokens, [running(8, 1, 4)], u))


@pytest.mark.parametrize("fraction, num_blocks, kept", [(0.01, 100, 1), (0.01, 99, 0), (0.1, 99, 9), (0.5, 10, 5)])
def test_the_watermark_stays_free_after_an_admission(fraction, num_blocks, kept):
    new = Request("n", SamplingParams(), [0] * 13, 13)
    assert least_free(Watermark(fraction), new, 13, num_total=num_blocks) == 4 + kept


def test_the_watermark_is_a_hundredth_beside_the_chunk_that_is_computed_now():
    new = Request("n", SamplingParams(), [0] * 30, 30)
    assert least_free(Watermark(), new, 5, num_total=250) == 2 + 2


@pytest.mark.parametrize("admission, wanted", [(Watermark(), 1), (FullPrompt(), 0)], ids=["watermark", "whole prompt"])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_prompt_takes_whole_blocks_of_each_group_of_layers(admission, wanted, num_groups):
    new = Request("n", SamplingParams(), [0] * 13, 13)
    assert least_free(admission, new, 13, num_groups=num_groups) == 4 * num_groups + wanted


def test_a_preempted_request_counts_with_all_its_tokens():
    new = Request("n", SamplingParams(), [0] * 13, 13, num_preemptions=1)
    assert not Watermark(0.5).admits(new, 1, [running(8, 1, 4)], KVUsage(8, 7, block_size=4))
    assert Watermark(0.5).admits(new, 1, [running(8, 1, 4)], KVUsage(8, 8, block_size=4))


@pytest.mark.parametrize("scheduler", [UnifiedScheduler, PhasedScheduler])
def test_under_a_watermark_each_step_that_admits_beside_others_leaves_it_free(scheduler):
    engine = engine_with(scheduler, Watermark(0.2), 40, 4, budget=100)
    schedule = engine.scheduler.schedule

    def checked(now):
        plan = schedule(now)
        if plan.joins and len(engine.scheduler.running) > 1:
            assert engine.kv.usage.num_free >= 8
        return plan

    engine.scheduler.schedule = checked
    run_workload(engine, 0)


def test_a_request_that_would_be_alone_is_always_admitted():
    engine = engine_with(UnifiedScheduler, Watermark(1.0), 20, 4)
    engine.add("a", [1] * 60, max_tokens=3, min_tokens=3)
    engine.add("b", [1] * 60, max_tokens=3, min_tokens=3)
    engine.run()
    assert engine.core.stats.num_preempted == 0


# --- the whole prompt


def test_a_prompt_enters_only_if_all_of_it_finds_room_though_a_chunk_would():
    new = Request("n", SamplingParams(max_tokens=10), [0] * 33, 33)
    usage = KVUsage(num_total=10, num_free=2, block_size=16)
    assert not FullPrompt().admits(new, 8, [running(20, 1, 10)], usage)
    usage.num_free = 3
    assert FullPrompt().admits(new, 8, [running(20, 1, 10)], usage)


def test_who_comes_back_needs_room_for_what_it_has_said_too():
    back = Request("b", SamplingParams(max_tokens=10), [0] * 33, 30, num_preemptions=1)
    assert not FullPrompt().admits(back, 3, [running(20, 1, 10)], KVUsage(10, 2, block_size=16))


def test_long_prompts_in_pieces_push_each_other_out_less():
    num_preempted = {}
    for admission in (AdmitAll(), FullPrompt()):
        engine = engine_with(UnifiedScheduler, admission, 160, 1, budget=7)
        run_workload(engine, seed=0)
        num_preempted[type(admission)] = engine.core.stats.num_preempted
    assert num_preempted[FullPrompt] < num_preempted[AdmitAll]
