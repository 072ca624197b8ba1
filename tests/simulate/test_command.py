"""`minivllm simulate`, as it is typed."""

from __future__ import annotations

import json

import pytest

from minivllm.cli.simulate import main
from minivllm.errors import ConfigError, TraceError, UserError
from minivllm.simulate.host import HOSTS, HostCost, parse_host
from minivllm.simulate.objectives import parse_objectives

SMALL = ["dummy:llama-3.1-8b", "--gpu", "h100", "--set", "kv.num_blocks=400", "--max-model-len", "600"]
SMALL += ["--num-requests", "40"]


def test_the_same_command_writes_the_same_bytes(tmp_path, capsys):
    asked = [
        *SMALL,
        "--replicas",
        "3",
        "--rate",
        "50",
        "--output-len",
        "20",
        "--slo",
        "ttft=50ms",
        "--host",
        "minivllm",
    ]
    for name in ("one", "two"):
        assert main([*asked, "--json", str(tmp_path / name)]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    shown = capsys.readouterr().out
    assert "3 replicas behind prefix" in shown and "TTFT" in shown and "objectives met" in shown
    record = json.loads((tmp_path / "one").read_text())
    assert record["workload"]["trace"] == "fixed:prompt=512,output=20"
    assert record["result"]["num_finished"] == 40 and record["result"]["attained"] == 1.0


def test_json_on_the_standard_output_is_all_that_is_there(capsys):
    main([*SMALL, "--output-len", "2", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["host"] == {"step": 0.0, "request": 0.0}


def test_a_file_of_requests_is_run_at_the_rate_that_is_asked_for(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": i, "prompt_tokens": 50 + i, "output_tokens": 2} for i in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([*SMALL, "--trace", str(trace), "--rate", "100", "--json", "-"])
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["num_finished"] == 20 and 0.18 < result["seconds"] < 0.3
    trace.write_text(trace.read_text() + '{"arrival": 20, "prompt_tokens": 0, "output_tokens": 2}\n')
    with pytest.raises(TraceError, match="line 21"):
        main([*SMALL, "--trace", str(trace)])


def test_what_a_reader_must_know_is_said_in_a_sentence(tmp_path, capsys):
    main([*SMALL, "--rate", "2000", "--max-num-seqs", "2", "--output-len", "20"])
    assert "The queue grew throughout: " in capsys.readouterr().out
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,5000,2\n0,590,100\n0,20,2\n")
    main([*SMALL, "--trace", str(trace)])
    shown = capsys.readouterr().out
    assert "1 requests can never run and were refused: the prompt has 5000 tokens" in shown
    assert "1 answers were cut" in shown


@pytest.mark.parametrize(
    "asked, says",
    [
        (["dummy:qwen3-30b-a3b", "--gpu", "rtx-4090"], "of weights, and "),
        ([*SMALL, "--input-len", "700"], "none of the 40 requests can run: the prompt has 700 tokens"),
        ([*SMALL, "--host", "minivlm"], 'no host "minivlm". Did you mean "minivllm"?'),
        ([*SMALL, "--trace", "sharegtp"], 'Did you mean "sharegpt"?'),
        ([*SMALL, "--executor", "uni", "--set", "executor.device=none"], "executor.kind"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(asked, says):
    with pytest.raises(UserError, match="(?s)" + says.replace("?", r"\?")):
        main(asked)


@pytest.mark.parametrize(
    "asked",
    [["--trace", "sharegpt", "--input-len", "9"], ["--link-us", "-1"], ["--slo", "ttft=5"], ["--slo", "e2e=5s"]],
)
def test_flags_that_cannot_be_are_refused_before_anything_is_built(asked, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *asked])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_a_host_is_a_name_or_two_numbers_of_microseconds():
    assert parse_host("200,5") == HostCost(200 / 1e6, 5 / 1e6)
    assert parse_host("none").seconds(100) == 0.0 and parse_host("minivllm") is HOSTS["minivllm"]
    for wrong in ("200", "1,2,3", "-1,2", "nan,1", "a,b"):
        with pytest.raises(ConfigError, match="no host"):
            parse_host(wrong)


def test_an_objective_is_a_name_and_a_time():
    assert parse_objectives(["ttft=500ms", "tpot=0.25s"], ("ttft", "tpot")) == {"ttft": 0.5, "tpot": 0.25}
