"""What arithmetic says of a set-up, against its simulation: the least is never undercut, the rate is about it."""

from __future__ import annotations

import pytest

from minivllm.cli.plan import Workload
from minivllm.config import EngineConfig
from minivllm.engine.build.capacity import Question, build_of, explore, reckon
from minivllm.simulate.capacity import Devices, Objective, Prefill, Setup
from minivllm.simulate.figures import Figures
from minivllm.simulate.steady import Lengths
from minivllm.simulate.traces import load_trace
from minivllm.simulate.workload import TraceRequest

HERE = Devices("h100")
SETUPS = {
    "one": Setup(HERE, {}),
    "several": Setup(Devices("l40s", 4), {}),
    "few places": Setup(HERE, {"scheduler.max_num_seqs": 8}),
    "little KV": Setup(HERE, {"kv.num_blocks": 1000}),
    "short steps": Setup(HERE, {"scheduler.max_num_batched_tokens": 192}),
    "stages": Setup(Devices("h100", 1, 2), {}),
    "prompts elsewhere": Setup(HERE, {}, Prefill(HERE, 1, 2, "nvlink4")),
    "guesses": Setup(HERE, {"spec_decode.method": "ngram", "spec_decode.k": 3}),
}
CONFIG = EngineConfig.build("v1", {"model.path": "dummy:llama-3.1-8b"})
WORKLOADS = ("sharegpt", "fixed:prompt=600,output=30", "fixed:prompt=20,output=1")


def question(source, objectives=()):
    return Question(CONFIG, Workload(source, None, 0, 60), objectives)


def simulated(setup, requests) -> Figures:
    return build_of(CONFIG, setup)().run(requests)


@pytest.mark.parametrize("source", WORKLOADS)
@pytest.mark.parametrize("name", SETUPS)
def test_no_request_is_served_in_less_than_the_least_and_one_alone_in_about_it(name, source):
    known = reckon(question(source), SETUPS[name])
    rows = simulated(SETUPS[name], load_trace(source, rate=1e-3, num_requests=40)).rows
    arrival, first, last, num = (rows.column(each) for each in ("arrival", "first", "last", "num_output"))
    gaps = (last - first)[num > 1] / (num - 1)[num > 1]
    slack = 1 - 1e-9
    assert (first - arrival).min() >= slack * known.first_token
    assert not len(gaps) or gaps.min() >= slack * known.token
    assert (last - arrival).min() >= slack * known.answer
    if source.startswith("fixed") and name not in ("prompts elsewhere", "guesses"):
        assert (first - arrival).min() <= 1.05 * known.first_token
        assert not len(gaps) or gaps.min() <= 1.1 * known.token


@pytest.mark.parametrize("name", [name for name in SETUPS if name != "guesses"])
def test_the_rate_is_about_what_a_search_finds(name):
    seconds = 6.0 if name in ("stages", "prompts elsewhere") else 20.0  # these serve many
    workload = Workload("fixed:prompt=600,output=30", seconds, 0, 60)
    asked = Question(CONFIG, workload, [Objective("ttft", "p90", 0.025 * seconds)])
    found = explore(asked, SETUPS[name], 1.0, note=lambda line: None)
    assert found.best is not None
    assert found.best.rate / 1.3 <= reckon(asked, SETUPS[name]).rate <= 1.3 * found.best.rate


def test_a_limit_on_the_time_of_a_step_lowers_the_rate():
    setup = Setup(HERE, {})
    free, bound = (reckon(question("sharegpt", limits), setup) for limits in ((), [Objective("tpot", "p50", 0.008)]))
    assert bound.rate < 0.8 * free.rate and bound.seconds < free.seconds


def test_prompts_that_others_may_have_computed_are_no_least():
    shared = [TraceRequest(i, 1024, 10, (7, i), 512) for i in range(4)]
    lengths = Lengths.of(shared)
    assert lengths.shortest == 1 and lengths.prompt == (4 * 1024 - 3 * 512) / 4


def test_lengths_are_weighed_by_the_steps_in_which_they_are_there():
    lengths = Lengths.of([TraceRequest(0.0, 100, 10), TraceRequest(0.0, 10, 1000)])
    assert (lengths.shortest, lengths.fewest, lengths.output) == (10, 10, 505)
    assert lengths.context == pytest.approx((10 * 105 + 1000 * 510) / 1010)
