"""`minivllm plan`: what it says, writes and refuses. The workload is short, for the test's sake."""

from __future__ import annotations

import json
import shlex
from functools import partial

import pytest

from minivllm.cli import plan, simulate
from minivllm.config import EngineConfig
from minivllm.engine.build.capacity import trial_of
from minivllm.engine.build.cluster import build_cluster
from minivllm.errors import ConfigError
from minivllm.simulate.capacity import TOLERANCE, Devices, Prefill, Setup
from minivllm.simulate.traces import load_trace

MODEL, WORKLOAD = "dummy:llama-3.1-8b", "fixed:prompt=100,output=4"
SHORT = ["--workload", WORKLOAD, "--seconds", "0.1", "--count", "1"]


def run(capsys, *argv):
    code = plan.main([MODEL, *SHORT, *argv])
    return code, capsys.readouterr().out


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(plan, "LEAST_REQUESTS", 40)


def test_the_rate_that_is_told_holds_and_a_little_more_does_not(few, capsys, tmp_path):
    file = tmp_path / "plan.json"
    code, text = run(capsys, "--gpu", "h100", "--objective", "ttft_p99=50ms", "tpot_p50=20ms", "--json", str(file))
    assert code == 0 and "h100" in text
    (found,) = json.loads(file.read_text())["set_ups"]
    rate, failing = found["rate"], min(each["rate"] for each in found["trials"] if not each["holds"])
    assert rate < failing <= TOLERANCE * rate
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
    heads = [line.split()[0] for line in text.splitlines()[1:3]]
    assert code == 0 and heads == ["h100", "h200"]
    words = shlex.split(text.splitlines()[-1])
    assert words[:4] == ["python", "-m", "minivllm", "serve"] and words[words.index("--gpu") + 1] == "h100"
    assert int(words[words.index("--replicas") + 1]) >= 2


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


def test_what_no_device_can_do_is_told_and_is_an_exit_code(few, capsys):
    code, text = run(capsys, "--objective", "tpot_p50=0.001ms")
    assert code == 1 and "none holds" in text and "No set-up meets the objectives at any rate." in text


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

    monkeypatch.setattr(plan, "_explore", lambda config, setup, requests, *_: list(requests(1.0)))
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
