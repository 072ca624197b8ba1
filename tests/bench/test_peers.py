"""bench.peers: whose turn it is, what is refused, minivllm's runner. Engines are scripts with times of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from bench.peers import compare, install, report, shapes
from bench.peers.engines import Engine, LeftOut, Running, environment, known_engines
from bench.peers.workloads import WORKLOADS, Workload, draw, quick

ROOT = Path(__file__).parent.parent.parent

# Speaks the protocol of peer_runner, with seconds as told; writes each job to a file that all engines share.
FAKE = """
import json, sys
script = None
def answer(line):
    print(json.dumps(line), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["do"] == "load":
        script = job["options"]
        if "load" in script:
            sys.exit(script["load"])
        parts = {"interpreter": 1, "import": 2, "load": script.get("start", 3), "compile": 0, "first token": 0.5}
        answer({"parts": parts, "settings": {"a": "b"}, "unable": script.get("unable", {})})
        continue
    warm = max(job["num_tokens"]) == 2
    with open(script["log"], "a") as log:
        if not warm:
            log.write(json.dumps([script["name"], job["prompts"], job["num_tokens"]]) + "\\n")
    if script.get("fails") and not warm:
        answer({"error": script["fails"]})
        continue
    short = script.get("short", 0) if not warm else 0
    seconds = 1.0 if warm else (script["seconds"].pop(0) if len(script["seconds"]) > 1 else script["seconds"][0])
    if "hold" in script and not warm:
        held = b"x" * script["hold"]
        del held
    answer({"seconds": seconds, "tokens": [[7] * (n - short) for n in job["num_tokens"]]})
"""
SCORER = """
import sys
sys.path.insert(0, "{peers}")
from peer_runner import serve

class Scorer:
    compile_seconds, settings, unable = 0.0, {{}}, {{}}

    def __init__(self, job):
        pass

    @staticmethod
    def imports():
        pass

    def generate(self, prompts, num_tokens):
        return [[0] * n for n in num_tokens]

    def score(self, texts, starts):
        said = [token for ids, start in zip(texts, starts) for token in ids[start:]]
        return said, [-1.0] * len(said)

serve(Scorer)
"""
SMALL = Workload("2 requests, 4 in, 8 out", 2, (4, 4), (8, 8))


@pytest.fixture
def fakes(tmp_path):
    """engines(name=options, ...), and how to start one."""
    (tmp_path / "fake.py").write_text(FAKE)
    started = []

    def engine(name: str, family: str = "", **options) -> Engine:
        options |= {"log": str(tmp_path / "jobs.jsonl"), "name": name}
        return Engine(name, family or name, str(tmp_path / "fake.py"), "folder", "a fake", options)

    def start(engine: Engine) -> Running:
        running = Running(
            engine, sys.executable, {"model": "", "threads": 1, "max_len": 99}, tmp_path / f"{engine.name}.log"
        )
        started.append(running)
        return running

    yield engine, start
    assert all(running.process.poll() is not None for running in started), "an engine stayed behind"


def measure(engines, start, workloads=None, rounds=3, starts=1) -> dict:
    args = compare.parse(["--rounds", str(rounds), "--starts", str(starts), "--vocab", "100"])
    return compare.run(engines, start, workloads or {"one": SMALL}, args)


def jobs(tmp_path) -> list:
    return [json.loads(line) for line in (tmp_path / "jobs.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------- turns


def test_engines_take_turns_on_the_same_ids_which_are_new_in_every_round(fakes, tmp_path):
    engine, start = fakes
    results = measure([engine("minivllm", seconds=[2]), engine("b", seconds=[4]), engine("c", seconds=[8])], start)
    asked = jobs(tmp_path)
    assert [name for name, *_ in asked] == ["minivllm", "b", "c"] * 3
    rounds = [asked[i : i + 3] for i in (0, 3, 6)]
    assert all(a[1:] == b[1:] == c[1:] for a, b, c in rounds)
    assert len({json.dumps(prompts) for (_, prompts, _), *_ in rounds}) == 3
    assert all(num_tokens == [8, 8] and [len(p) for p in prompts] == [4, 4] for _, prompts, num_tokens in asked)
    runs = results["workloads"]["one"]["runs"]
    assert runs["minivllm"]["rates"] == [8.0] * 3 and runs["c"]["rates"] == [2.0] * 3
    assert [(row["theirs"], row["ratio"]) for row in results["ratios"]] == [("b", 2.0), ("c", 4.0)]


def test_decode_alone_is_what_is_left_without_a_request_of_one_token(fakes, tmp_path):
    engine, start = fakes
    decode = Workload("decode", 1, (4, 4), (9, 9), "decode")
    results = measure([engine("minivllm", seconds=[5, 1] * 3)], start, {"decode": decode})
    assert results["workloads"]["decode"]["runs"]["minivllm"]["rates"] == [8 / 4] * 3
    asked = jobs(tmp_path)
    assert [num_tokens for *_, num_tokens in asked] == [[9], [1]] * 3
    assert asked[0][1] != asked[1][1]  # a prefix cache cannot answer for the second


def test_input_tokens_count_for_prefill(fakes):
    engine, start = fakes
    prefill = Workload("prefill", 3, (10, 10), (1, 1), "input")
    results = measure([engine("minivllm", seconds=[2])], start, {"prefill": prefill})
    assert results["workloads"]["prefill"]["runs"]["minivllm"]["rates"] == [15.0] * 3


def test_an_engine_that_waits_is_stopped_and_none_stays_behind(fakes):
    engine, start = fakes
    running = start(engine("a", seconds=[1]))
    running.pause()
    until = time.monotonic() + 20  # a signal is delivered when the process next has a core
    while psutil.Process(running.process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(LeftOut, match="no answer"):
        running.ask({"do": "generate", "prompts": [[1]], "num_tokens": [3]}, seconds=0.2)
    running.resume()
    assert running._lines.select(20)  # now it answers
    running.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no high-water mark that can be set back")
def test_the_peak_is_of_the_turn_alone(fakes):
    engine, start = fakes
    running = start(engine("a", seconds=[1], hold=96 * 2**20))
    before = running.peak_mib()
    running.ask({"do": "generate", "prompts": [[1]], "num_tokens": [3]})
    assert running.peak_mib() >= before + 90
    running.forget_peak()
    assert running.peak_mib() <= before + 10
    running.close()


# ---------------------------------------------------------------------------------------- what is refused


def test_no_ratio_when_runs_differ_or_are_few():
    steady, wide = [100, 105, 110], [100, 105, 116]
    assert compare.ratio(steady, [50, 50, 50], ("a", "b")) == (2.1, "")
    assert compare.ratio(steady, wide, ("a", "b")) == (None, "runs of b differ by 15%")
    assert compare.ratio([70, 100, 130], steady, ("a", "b")) == (None, "runs of a differ by 60%")
    assert compare.ratio(steady, [50, 50], ("a", "b")) == (None, "b has 2 of 3 runs")


def test_a_run_whose_engine_wavers_says_so_in_the_table_and_in_the_title(fakes, tmp_path):
    engine, start = fakes
    results = measure([engine("minivllm", seconds=[1]), engine("vllm", seconds=[1, 2, 3])], start)
    record = {"params": {"rounds": 3, "model": "m", "threads": 1, "quick": False}, "results": results}
    record |= {"machine": {"cpu": "a cpu"}, "commit": "c", "date": "2026-01-01T"}
    text = report.markdown(record)
    assert "no ratio: runs of vllm differ by 133%" in text and "×" not in text
    written = report.write(record, tmp_path / "peers.json")
    assert [path.suffix for path in written] == [".json", ".md", ".png", ".svg"] and all(
        p.stat().st_size for p in written
    )
    assert report.conclusion(results) == "runs differ too much for a ratio, or are too few"


def test_a_target_is_judged(fakes, monkeypatch):
    engine, start = fakes
    monkeypatch.setattr(compare, "cpu_flags", lambda: {"avx512f"})
    results = measure([engine("minivllm", seconds=[1]), engine("vllm", seconds=[3])], start)
    assert results["ratios"][0]["at_least"] == 3.2 and results["ratios"][0]["ratio"] == 3.0
    assert any(line.endswith("| 3.2 | **not reached** |") for line in report.ratios(results))
    monkeypatch.setattr(compare, "cpu_flags", lambda: {"avx2"})
    assert compare.targets_here()["eight", "minivllm", "vllm"] == 4.0


def test_an_engine_that_gives_other_counts_of_tokens_is_left_out(fakes):
    engine, start = fakes
    results = measure([engine("minivllm", seconds=[1]), engine("b", seconds=[1], short=1)], start)
    assert results["left_out"] == {"b": "it gave 14 tokens for 2 requests, not 16"}
    assert results["ratios"] == [] and results["workloads"]["one"]["runs"]["b"]["rates"] == []


def test_an_engine_that_fails_is_left_out_with_its_words_and_the_others_go_on(fakes):
    engine, start = fakes
    engines = [
        engine("minivllm", seconds=[1]),
        engine("b", seconds=[1], load="no such instruction"),
        engine("c", seconds=[1], fails="ValueError: too long"),
    ]
    results = measure(engines, start)
    left = {"b": "it ended with exit code 1: no such instruction", "c": "ValueError: too long"}
    assert results["left_out"] == left
    assert len(results["workloads"]["one"]["runs"]["minivllm"]["rates"]) == 3


def test_a_workload_that_an_engine_cannot_run_says_why(fakes):
    engine, start = fakes
    engines = [engine("minivllm", seconds=[1]), engine("b", seconds=[1], unable={"batch": "one at a time"})]
    many = Workload("many", 9, (4, 4), (8, 8))
    results = measure(engines, start, {"many": many, "one": SMALL})
    assert results["workloads"]["many"]["runs"]["b"] == {"rates": [], "peak_mib": [], "why": "one at a time"}
    assert [row["workload"] for row in results["ratios"]] == ["one"]


def test_the_slower_setting_of_an_engine_stops_after_the_first_round(fakes):
    engine, start = fakes
    engines = [
        engine("minivllm", seconds=[1]),
        engine("vllm-a", "vllm", seconds=[4]),
        engine("vllm-b", "vllm", seconds=[2]),
    ]
    results = measure(engines, start)
    runs = results["workloads"]["one"]["runs"]
    assert [len(runs[name]["rates"]) for name in ("minivllm", "vllm-a", "vllm-b")] == [3, 1, 3]
    assert [(row["family"], row["theirs"], row["ratio"]) for row in results["ratios"]] == [("vllm", "vllm-b", 2.0)]


def test_quick_engines_start_again_and_slow_ones_do_not(fakes):
    engine, start = fakes
    results = measure([engine("minivllm", seconds=[1]), engine("slow", seconds=[1], start=40)], start, starts=3)
    assert [len(parts) for parts in results["start_seconds"].values()] == [3, 1]
    assert any(line.startswith("| slow | 43.5 (one run) | 1.00 | 2.00 | 40.00 |") for line in report.starts(results))


# ---------------------------------------------------------------------------------------- workloads, environments


def test_workloads_are_those_of_the_table_and_repeat_by_seed():
    for name, workload in WORKLOADS.items():
        requests = draw(name, workload, 0, 1, 100)
        assert requests == draw(name, workload, 0, 1, 100) != draw(name, workload, 1, 1, 100)
        assert requests.num_tokens == draw(name, workload, 0, 2, 100).num_tokens  # each round does the same work
        assert len(requests.prompts) == workload.num_reqs and max(map(max, requests.prompts)) < 100
        low, high = workload.input_len
        assert all(low <= len(prompt) <= high for prompt in requests.prompts)
        assert draw(name, quick(workload), 0, 0, 100).prompts
    assert WORKLOADS["mixed32"].kind == WORKLOADS["mixed64"].kind == "batch" and WORKLOADS["prefill"].kind == "single"


def test_an_engine_inherits_no_setting_of_threads_and_only_ours_sees_this_project(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    engines = known_engines(2)
    assert all("OMP_WAIT_POLICY" not in environment(engine) for engine in engines.values())
    assert environment(engines["minivllm"])["PYTHONPATH"] == str(ROOT)
    assert "PYTHONPATH" not in environment(engines["transformers"])
    assert environment(engines["vllm-unbound"])["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in environment(engines["vllm-bound"])


def test_what_vllm_needs_besides_what_is_not_needed(tmp_path):
    head = "\n".join(
        f"Requires-Dist: {needed}"
        for needed in (
            "regex",
            "torch==2.13.0+cpu; python_version > '3'",
            "torchvision",
            "av; extra == 'audio'",
            "numpy>=2",
        )
    )
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", f"Name: a\n{head}\n\nRequires-Dist: in the description\n")
    assert install.other_requirements(tmp_path / "a.whl") == ["regex", "numpy>=2"]


def test_a_peer_that_cannot_be_installed_leaves_its_reason(tmp_path):
    def refuse(venv: Path) -> None:
        raise install.NotInstalled("pip install x: no such version")

    for name in ("x", "json", "y"):  # environments that are there: making one takes long
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
    assert install.why_not("x", tmp_path) == "not installed: make peers"
    with pytest.raises(install.NotInstalled):
        install.install("x", tmp_path, {"x": install.Peer("x", "x", refuse)})
    assert install.why_not("x", tmp_path) == "pip install x: no such version"
    assert install.install("json", tmp_path, {"json": install.Peer("numpy", "json", lambda venv: None)})
    assert install.why_not("json", tmp_path) == ""
    with pytest.raises(install.NotInstalled, match="no_such_module"):
        install.install("y", tmp_path, {"y": install.Peer("y", "no_such_module", lambda venv: None)})


def test_the_exported_folder_holds_the_same_model_in_bf16(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    size = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    source = tmp_path / "source"
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    folder = install.export_model(str(source), tmp_path)
    exported, original = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (folder, source))
    weights = original.state_dict()
    assert all(torch.equal(v, weights[k].bfloat16().float()) for k, v in exported.state_dict().items())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert (folder / "tokenizer.json").exists()


# ---------------------------------------------------------------------------------------- texts that are scored


def test_a_peer_scores_each_token_by_the_logits_before_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "peers"))
    from run_llama_cpp import LlamaCpp

    logprobs_of = np.log(np.random.default_rng(0).dirichlet(np.ones(8), 16))  # [positions, vocabulary]
    logits = (logprobs_of + 3).astype(np.float32)
    read: list[int] = []
    peer = object.__new__(LlamaCpp)
    peer.llm = SimpleNamespace(reset=read.clear, eval=read.extend, scores=logits)
    likeliest, logprobs = peer.score([[1, 2, 3, 4], [5, 6]], [2, 1])
    assert read == [5, 6]  # each text from its beginning
    assert likeliest == [logits[at].argmax() for at in (1, 2, 0)]
    own = [logprobs_of[1, 3], logprobs_of[2, 4], logprobs_of[0, 6]]
    np.testing.assert_allclose(logprobs, own, atol=1e-6)


def test_a_runner_answers_with_the_scores_of_its_engine(tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text(SCORER.format(peers=ROOT / "bench" / "peers"))
    engine = Engine("a", "a", str(runner), "folder", "a fake")
    running = Running(engine, sys.executable, {"model": ""}, tmp_path / "log")
    try:
        assert running.ask({"do": "score", "texts": [[1, 2, 3]], "starts": [1]}) == {
            "likeliest": [2, 3],
            "logprobs": [-1.0, -1.0],
        }
    finally:
        running.close()


# ---------------------------------------------------------------------------------------- our own runner


def test_the_runner_of_minivllm_gives_the_tokens_of_llm_and_splits_its_start(tmp_path):
    from minivllm import LLM, SamplingParams

    engine = known_engines(1)["minivllm-bf16"]
    job = {"model": "dummy:tiny", "threads": 1, "max_len": 64}
    running = Running(engine, sys.executable, job, tmp_path / "log")
    try:
        assert list(running.parts) == ["interpreter", "import", "load", "compile", "first token"]
        assert all(running.parts[name] > 0 for name in ("interpreter", "import", "load", "first token"))
        assert running.settings["model.quantization"].startswith("none")
        prompts, num_tokens = [[5, 9, 2], [7] * 20], [6, 11]
        answer = running.ask({"do": "generate", "prompts": prompts, "num_tokens": num_tokens})
        with pytest.raises(LeftOut, match="NeverFits"):
            running.ask({"do": "generate", "prompts": [[1] * 99], "num_tokens": [1]})
    finally:
        running.close()
    with LLM("dummy:tiny", dtype="bfloat16", quantization="none", max_model_len=64) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in num_tokens]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert answer["tokens"] == [list(output.outputs[0].token_ids) for output in outputs]
    assert [len(tokens) for tokens in answer["tokens"]] == num_tokens and answer["seconds"] > 0


def test_one_command_measures_and_writes_its_files(tmp_path):
    command = [sys.executable, "-m", "bench.peers", "--model", "dummy:tiny", "--engines", "minivllm", "vllm-bound"]
    command += ["--workloads", "one", "--quick", "--rounds", "1", "--starts", "1", "--threads", "1", "--vocab", "500"]
    command += ["--peers", str(tmp_path), "--out", str(tmp_path / "peers.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "peers.json").read_text())
    assert record["schema"] == "minivllm.bench/1" and record["results"]["left_out"] == {
        "vllm-bound": "not installed: make peers"
    }
    assert len(record["results"]["workloads"]["one"]["runs"]["minivllm"]["rates"]) == 1
    assert "Left out: vllm-bound, not installed" in (tmp_path / "peers.md").read_text()


def test_each_side_of_a_ratio_is_the_best_setting_of_its_family():
    rates = {
        "minivllm": [100.0] * 3,
        "minivllm-prefault": [120.0] * 3,
        "vllm-bound": [40.0] * 3,
        "vllm-unbound": [30.0] * 3,
    }
    family_of = {name: name.split("-")[0] for name in rates}
    runs = {name: {"rates": values} for name, values in rates.items()}
    [row] = compare.all_ratios({"eight": {"runs": runs}}, family_of)
    assert (row["ours"], row["theirs"], row["ratio"], row["at_least"]) == ("minivllm-prefault", "vllm-bound", 3.0, 2.2)


# ---------------------------------------------------------------------------------------- files of a shape


def test_a_shape_becomes_a_file_that_we_read(tmp_path):
    """Of the mixture Q4_K_M, with numbers that stay numbers."""
    from minivllm import LLM, SamplingParams
    from minivllm.kernels.cpu import blocks

    if blocks.unsupported_reason() is not None:
        pytest.skip(blocks.unsupported_reason())
    path = tmp_path / "small.gguf"
    shapes.write_gguf("qwen3-0.6b", path, num_layers=2)
    with LLM(str(path), max_model_len=64, overrides={"kv.num_blocks": 8}) as llm:
        decided = {decision.field: decision.reason for decision in llm.decisions}
        assert decided["model.linear"] == "12 in Q4_K and 3 in Q6_K"
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
        (out,) = llm.generate([{"prompt_token_ids": [300, 301, 302]}], params, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 4
        assert all(-20 < lp.logprob <= 0 for step in out.outputs[0].logprobs for lp in step.values())


def test_only_shapes_of_whole_blocks_become_files(tmp_path):
    assert install.of_shape("smollm2-135m", tmp_path) == "smollm2-135m"
    assert install.of_shape("dummy:tiny", tmp_path) == "dummy:tiny"
    assert install.of_shape("dummy:qwen3-30b-a3b", tmp_path) == "dummy:qwen3-30b-a3b"
    assert install.gguf_file(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    assert shapes.fits("llama-3.2-1b") and shapes.fits("qwen3-4b")
