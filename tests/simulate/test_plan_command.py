"""`minivllm plan`: what it says, writes and refuses. The workload is short, for the test's sake."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial

import pytest

from minivllm.cli import plan, plan_tables, simulate
from minivllm.cli.plan import Workload
from minivllm.config import EngineConfig
from minivllm.engine.build.capacity import Question, build_of, explore, reckon, trial_of
from minivllm.engine.build.cluster import build_cluster
from minivllm.errors import ConfigError
from minivllm.simulate.capacity import TOLERANCE, Devices, Objective, Prefill, Setup
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.traces import load_trace

MODEL, WORKLOAD = "dummy:llama-3.1-8b", "fixed:prompt=100,output=4"
SHORT = ["--workload", WORKLOAD, "--seconds", "0.1", "--count", "1", "--jobs", "1"]


def run(capsys, *argv):
    code = plan.main([MODEL, *SHORT, *argv])
    return code, capsys.readouterr().out


def ranked(text):
    """The set-ups of the last table."""
    lines = text.splitlines()
    begin = max(number for number, line in enumerate(lines) if line.startswith("set-up"))
    return [line.split()[0] for line in lines[begin + 1 : lines.index("", begin)]]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(plan, "LEAST_REQUESTS", 40)


def test_the_rate_that_is_told_holds_and_a_little_more_does_not(few, capsys, tmp_path):
    file = tmp_path / "plan.json"
    code, text = run(capsys, "--gpu", "h100", "--objective", "ttft_p99=50ms", "tpot_p50=20ms", "--json", str(file))
    assert code == 0 and "h100" in text
    (found,) = json.loads(file.read_text())["set_ups"]
    rate, failing = found["rate"], min(each["rate"] for each in found["trials"] if not each["holds"])
    assert rate < failing <= TOLERANCE * rate * (1 + 1e-9)
    assert found["rate_band"][0] < rate < found["rate_band"][1]
    own = {"model.path": MODEL, "executor.kind": "simulated", "executor.device": "h100"}
    trial = trial_of(
        partial(build_cluster, EngineConfig.build("v1", own)),
        lambda rate: load_trace(WORKLOAD, rate=rate, num_requests=max(40, round(0.1 * rate))),
    )
    first, more = trial(rate), trial(failing)
    assert first["ttft"]["p99"] <= 0.05 and first["tpot"]["p50"] <= 0.02
    assert more["ttft"]["p99"] > 0.05 or more["tpot"]["p50"] > 0.02 or more["queue_grew"]


def test_the_cheaper_device_is_first_and_its_command_serves_it(few, capsys):
    code, text = run(
        capsys,
        "--gpu",
        "h100",
        "h200",
        "--price",
        "h100=1",
        "h200=100",
        "--objective",
        "ttft_p99=100ms",
        "--rate",
        "1e4",
    )
    assert code == 0 and ranked(text) == ["h100", "h200"]
    words = shlex.split(text.splitlines()[-1])
    assert words[:4] == ["python", "-m", "minivllm", "serve"] and words[words.index("--gpu") + 1] == "h100"
    assert int(words[words.index("--replicas") + 1]) >= 2


def test_a_rate_costs_what_the_replicas_cost_that_it_takes(few, capsys, tmp_path):
    file = tmp_path / "plan.json"
    argv = ["--gpu", "h100", "h200", "--objective", "ttft_p99=100ms", "--rate", "2000", "--json", str(file)]
    run(capsys, *argv)
    told = json.loads(file.read_text())
    for found in told["set_ups"]:
        tokens = 2000 * 3600 * 4  # an hour's output
        assert found["rate"] * found["replicas"] == pytest.approx(2000) and found["replicas"] > 1
        assert found["cost_of_1m_tokens"] == pytest.approx(1e6 * found["replicas"] / tokens)
        assert max(t["rate"] for t in found["trials"] if t["holds"]) == found["rate"]
    costs = [found["cost_of_1m_tokens"] for found in told["set_ups"]]
    assert costs == sorted(costs)


def test_a_rate_that_one_serves_takes_one_and_the_dearer_device_is_the_later_one(few, capsys):
    prices = ["--price", "h100=1", "h200=2"]
    _, text = run(capsys, "--gpu", "h200", "h100", *prices, "--objective", "ttft_p99=1s", "--rate", "5")
    assert ranked(text) == ["h100", "h200"] and "1 x 5 (1 to 1)" in text
    assert "--replicas" not in text.splitlines()[-1]


def test_options_are_tried_each_with_each(few, capsys, tmp_path):
    file = tmp_path / "plan.json"
    vary = ["--vary", "scheduler.max_num_seqs=4,64", "scheduler.max_num_batched_tokens=512,2048"]
    run(capsys, *vary, "--objective", "latency_p99=500ms", "--json", str(file))
    told = json.loads(file.read_text())
    options = [tuple(found["options"].values()) for found in told["set_ups"]]
    assert sorted(options) == [(4, 512), (4, 2048), (64, 512), (64, 2048)]
    rates = dict(zip(options, (found["rate"] for found in told["set_ups"]), strict=True))
    assert min(rates[64, 512], rates[64, 2048]) > max(rates[4, 512], rates[4, 2048])
    assert told["front"] and all(
        earlier["cost"] > later["cost"] for earlier, later in zip(told["front"], told["front"][1:], strict=False)
    )


@pytest.mark.parametrize("objective", ["tpot_p50=0.001ms", "ttft_mean=1ms", "latency_p99=3ms"])
def test_what_no_device_can_do_is_told_by_arithmetic_and_is_an_exit_code(objective, capsys, monkeypatch):
    monkeypatch.delattr(Cluster, "run")
    code, text = run(capsys, "--objective", objective)
    assert code == 1 and f"none holds, {objective.partition('_')[0]} is at least" in text
    assert "No set-up meets the objectives at any rate." in text


def test_what_arithmetic_allows_and_no_trial_reaches_is_told_too(few, capsys):
    code, text = run(capsys, "--objective", "ttft_p99=8ms")
    assert code == 1 and "h100: none holds" in text


class Raw(io.RawIOBase):
    """What has left this process."""

    def __init__(self):
        super().__init__()
        self.text = ""

    def writable(self):
        return True

    def write(self, data):
        self.text += bytes(data).decode()
        return len(data)


def test_arithmetic_and_each_row_leave_for_a_pipe_before_the_next_is_simulated(few, monkeypatch):
    seen, raw, explore = [], Raw(), plan._explore

    def watched(*asked):
        seen.append(raw.text)
        return explore(*asked)

    monkeypatch.setattr(plan, "_explore", watched)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw, 1 << 20)))
    plan.main([MODEL, *SHORT, "--gpu", "h100", "h200", "--objective", "ttft_p99=1s", "--rate", "5"])
    first, second = seen
    assert first.splitlines()[0].split() == " ".join(plan_tables.ARITHMETIC).split()
    assert [line.split()[0] for line in first.splitlines()[1:3]] == ["h100", "h200"]
    assert second.removeprefix(first) == "h100: 1 x 5 requests/s (1 to 1)\n"


def test_each_trial_is_told_on_standard_error(few, capsys):
    plan.main([MODEL, *SHORT, "--objective", "ttft_p99=50ms"])
    lines = capsys.readouterr().err.splitlines()
    assert {line.partition("requests/s ")[2] for line in lines} == {"hold", "are too many"}


def test_several_processes_find_what_one_finds(few, capsys, tmp_path):
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file, jobs in zip(files, "12", strict=True):
        argv = ["--gpu", "h100", "h200", "l40s", "--objective", "ttft_p99=1s", "--jobs", jobs, "--json", str(file)]
        run(capsys, *argv)
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())


def test_ctrl_c_ends_it_and_its_processes_without_a_traceback(tmp_path):
    argv = [MODEL, "--gpu", "h100", "h200", "--count", "1", "--seconds", "30", "--jobs", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    plan_ = subprocess.Popen([sys.executable, "-m", "minivllm", "plan", *argv], **pipes, start_new_session=True)
    assert plan_.stderr is not None
    plan_.stderr.readline()  # a trial has been told, by a process that goes on with the next one
    os.killpg(plan_.pid, signal.SIGINT)
    _, said = plan_.communicate()  # which ends when none of them has the pipe any more
    assert plan_.returncode == 130 and "interrupted" in said and "Traceback" not in said


def test_a_trial_lasts_as_long_as_ten_requests_and_a_queue_has_the_time_to_grow():
    """On an L40S that is full a request takes ten seconds: at a rate half too high no queue is there in twenty."""
    lasted, workload = [], Workload("sharegpt", None, 0, 40)

    def requests(rate, seconds):
        lasted.append(seconds)
        return workload(rate, seconds)

    config = EngineConfig.build("v1", {"model.path": "llama-3.1-8b"})
    question = Question(config, requests, [Objective("ttft", "p99", 1.0)], rate=1.0)
    setup = Setup(Devices("l40s"), {})
    long = 10 * reckon(question, setup).seconds
    explore(question, setup, 1.0, note=lambda line: None)
    assert long in lasted and long > 50
    runs = [build_of(config, setup)().run(workload(15.0, seconds), gives_up=True) for seconds in (20.0, long)]
    assert [figures.queue_grew for figures in runs] == [False, True]


def test_a_set_up_that_cannot_be_is_told_beside_those_that_can(few, capsys):
    code, text = run(capsys, "--count", "1", "3", "--objective", "ttft_p99=100ms")
    assert code == 0 and "3xh100: executor.device: 3 devices" in text


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--gpu", "h10"], 'no device "h10". Did you mean "h100"'),
        (["--objective", "ttft=1s"], 'no objective "ttft"'),
        (["--price", "h200=1"], '"h200" is not among the devices'),
        (["--gpu", "h100", "h200", "--price", "h100=1"], "none for h200"),
        (["--price", "h100=free"], "a number above 0"),
        (["--vary", "kv.dtype"], "an option, = and its values"),
        (["--vary", "kv.dtyp=int8"], "kv.dtyp"),
        (["--workload", "sharegtp"], "sharegpt"),
        (["--prefill-replicas", "1"], "come together"),
        (["--kv-wire", "ib-400"], "are of --prefill-replicas"),
        (["--prefill-replicas", "1", "--decode-replicas", "1", "--kv-wire", "ib-40"], 'no wire "ib-40"'),
        (["--prefill-replicas", "1", "--decode-replicas", "1", "--prefill-gpu", "h20"], 'no device "h20"'),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_mistake_is_one_sentence_before_anything_is_simulated(argv, what, monkeypatch):
    from minivllm.errors import UserError

    def simulated(*_):
        raise AssertionError

    monkeypatch.setattr(Cluster, "run", simulated)
    with pytest.raises(UserError, match=what):
        plan.main([MODEL, *SHORT, *argv])


def test_a_plot_is_drawn(few, capsys, tmp_path):
    file = tmp_path / "plan.svg"
    run(capsys, "--objective", "ttft_p99=100ms", "--plot", str(file))
    assert "tokens a second of one user" in file.read_text() or file.stat().st_size > 10_000


def test_how_many_devices_there_are_is_no_kind_of_device(few, capsys):
    with pytest.raises(ConfigError, match="share a model is --count"):
        run(capsys, "--gpu", "2xh100")


STAGES, ELSEWHERE = "2x1xh100", "1 prefill 2xh100 + 2 decode h100"


def test_stages_and_prompts_elsewhere_stand_beside_the_others_with_what_simulates_them(few, capsys, tmp_path):
    file, record = tmp_path / "plan.json", tmp_path / "run.json"
    sides = ["--prefill-replicas", "1", "--decode-replicas", "2", "--prefill-count", "2", "--kv-wire", "nvlink4"]
    argv = ["--count", "1", "2x1", *sides, "--objective", "ttft_p99=50ms", "--set", "kv.block_size=32"]
    code, text = run(capsys, *argv, "--json", str(file))
    told = {each["name"]: each for each in json.loads(file.read_text())["set_ups"]}
    assert code == 0 and told.keys() == {"h100", STAGES, ELSEWHERE, f"1 prefill 2xh100 + 2 decode {STAGES}"}
    costs = [each["cost_of_1m_tokens"] for each in told.values()]
    assert costs == sorted(costs)
    assert all(told[name]["command"] in text for name in ("h100", STAGES))
    for name, parts in ((STAGES, {"num_replicas": 1}), (ELSEWHERE, {"num_prefill_replicas": 1})):
        words = shlex.split(told[name]["command"])
        assert words[:4] == ["python", "-m", "minivllm", "simulate"]
        simulate.main([*words[4:], "--num-requests", "40", "--json", str(record)])
        ran = json.loads(record.read_text())
        assert parts.items() <= ran.items() and ran["config"]["kv.block_size"] == 32
        assert ran["config"]["executor.device"] == name.rpartition(" ")[2] and ran["result"]["ttft"]["p99"] <= 0.05
    assert ran["prefill"] == {"executor.device": "2xh100"} and ran["num_decode_replicas"] == 2


def test_an_hour_of_a_set_up_is_one_of_each_device_in_it():
    prices = {"h100": 2.0, "a100-80": 1.0}
    assert Setup(Devices("h100", 4, 2), {}).price(prices) == 16.0
    prefill = Prefill(Devices("a100-80", 2), 3, 2, "ib-200")
    setup = Setup(Devices("h100", 4), {}, prefill)
    assert (setup.price(prices), setup.num_devices) == (3 * 2 * 1.0 + 2 * 4 * 2.0, 14)
    alike = Setup(Devices("a100-80"), {}, prefill)
    assert (alike.price(prices), alike.num_devices) == (8.0, 8)


def test_one_stage_is_no_pipeline(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "--count", "1x2")
    assert "one stage is no pipeline" in capsys.readouterr().err
