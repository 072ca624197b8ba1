"""An engine lives in the seconds of the clock that it was built with, be they real or not."""

import json

import pytest

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.engine.messages import Report
from minivllm.engine.metrics import Metrics
from minivllm.errors import ConfigError

OPTIONS = {
    "model.path": "dummy:tiny",
    "model.dtype": "float32",
    "executor.num_threads": 1,
    "debug.recent_steps": 9,
    "scheduler.max_num_seqs": 1,  # so the second prompt waits for the first one's end
}
STEP, START = 0.5, 1000.0
ANSWER = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class VirtualClock:
    """Stands still but where a step is submitted, which takes STEP seconds."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now

    def drive(self, core) -> None:
        submit = core.executor.submit

        def takes_time(plan):
            self.now += STEP
            return submit(plan)

        core.executor.submit = takes_time


class Counting:
    """Tells metrics what a server would tell them."""

    def __init__(self, metrics: Metrics, core) -> None:
        self.metrics, self.core = metrics, core

    def on_add(self, req, step) -> None:
        self.metrics.on_add(req)

    def on_step(self, plan, out, deltas, times) -> None:
        joined = [join.req_id for join in plan.joins]
        self.metrics.on_report(Report(deltas, self.core.stats, joined, plan.total_tokens, times))

    def close(self) -> None: ...


def run(path):
    clock = VirtualClock()
    with LLM(overrides={**OPTIONS, "debug.trace": str(path)}, clock=clock) as llm:
        clock.drive(llm._core)
        metrics = Metrics("tiny", llm.clock)
        llm._core.observers.append(Counting(metrics, llm._core))
        outputs = llm.generate([[1, 2, 3], [4, 5]], ANSWER, use_tqdm=False)
        for output in outputs:
            metrics.on_request_end("length", output.metrics, len(output.prompt_token_ids), 3)
        look = llm._link.engine.live.look()
        recent = llm._link.engine.recent.snapshot(9)
    return outputs, metrics, look, recent, [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("first") / "trace.jsonl")


def test_a_request_arrives_waits_and_ends_in_the_clocks_seconds(ran):
    first, second = (output.metrics for output in ran[0])
    assert first.arrival_time == second.arrival_time == START
    assert (first.first_token_time, first.finished_time) == (START + STEP, START + 3 * STEP)
    assert (second.first_token_time, second.finished_time) == (START + 4 * STEP, START + 6 * STEP)
    assert first.itls == second.itls == [STEP, STEP]


def test_metrics_count_in_the_clocks_seconds(ran):
    metrics = ran[1]
    assert metrics.queue.sum == 0 + 3 * STEP  # the second one's
    assert metrics.ttft.sum == STEP + 4 * STEP and metrics.e2e.sum == 3 * STEP + 6 * STEP
    assert metrics.itl.sum == 4 * STEP and metrics.tpot.sum == 2 * STEP


def test_traces_and_the_live_view_tell_the_clocks_time(ran):
    _, _, look, recent, records = ran
    assert look.now == START + 6 * STEP
    steps = [record for record in records if record["type"] == "step"]
    assert [step["t"] for step in steps] == [STEP * n for n in range(1, 7)]
    assert all(step["times"] == {"schedule": 0, "execute": 1e3 * STEP, "update": 0} for step in steps)
    assert [record["t"] for record in recent["records"] if record["type"] == "step"] == [step["t"] for step in steps]


def test_two_runs_on_a_virtual_clock_leave_the_same_trace(ran, tmp_path):
    assert run(tmp_path / "trace.jsonl")[4] == ran[4]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_core_elsewhere_cannot_read_a_clock_of_ones_own(kind):
    with pytest.raises(ConfigError, match="clock of your own"):
        kind(overrides={**OPTIONS, "engine.core": "process"}, clock=VirtualClock())
