"""A recorded run is done again. Here it is made up: each step takes a second, so that all times are known by heart."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from layer_tables import write_tables

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path.insert(0, str(BENCH))  # only while importing: bench/attention.py would hide tests/attention

import lockstep  # noqa: E402
import simulate  # noqa: E402
import vllm_run  # noqa: E402

sys.path.remove(str(BENCH))

from minivllm.config import EngineConfig  # noqa: E402
from minivllm.engine.build.cluster import build_cluster  # noqa: E402
from minivllm.engine.build.engine import build_over  # noqa: E402
from minivllm.engine.build.simulated import SimulatedWorkerBuilder  # noqa: E402
from minivllm.errors import UserError  # noqa: E402
from minivllm.simulate.clock import VirtualClock  # noqa: E402
from minivllm.simulate.cost import Numbers, RankCost, Step  # noqa: E402
from minivllm.simulate.devices import find_device  # noqa: E402
from minivllm.simulate.host import NO_HOST  # noqa: E402
from minivllm.simulate.models import MODELS  # noqa: E402
from minivllm.simulate.prompts import Prompts  # noqa: E402
from minivllm.simulate.shape import read_shape  # noqa: E402
from minivllm.simulate.timeline import TimelineExecutor  # noqa: E402
from minivllm.simulate.workload import TraceRequest  # noqa: E402

LAYERS = 4  # of dummy:tiny
RANKS = {"model.path": "qwen3-30b-a3b", "executor.device": "4xh100+dp", "engine.router": "round_robin"}
STEP = {"embedding": 1e6, "qkv_proj": 0, "o_proj": 0, "down_proj": 0}  # one second, whatever is in it
HOST = 1.7e9  # what time it was, by another clock than the engine's
# When it arrives, is queued, has its first and its last token; lengths. A step is one second, two are in flight: who
# comes while one runs is planned at its end, behind the next one.
SERVED = [(0.0, 0.0, 1.0, 5.0, 40, 5), (0.5, 1.0, 3.0, 4.0, 30, 2), (20.0, 20.0, 21.0, 21.0, 7, 1)]


def write_run(folder: Path, meta=None, config=None, served=SERVED) -> Path:
    folder.mkdir()
    asked = {"tensor_parallel_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    meta = {"model": "some/Tiny", "engine_kwargs": asked, "kv_cache": {"num_gpu_blocks": 101}} | (meta or {})
    machine = {"hardware": "RTX4090", "npu_mem": {"mem_size": 24}}
    config = {"link_bw": 16, "link_latency": 1000, "nodes": [{"instances": [machine]}]} | (config or {})
    lines = [
        {
            "request_id": f"bench-{i}", "input_toks": num_in, "output_toks": num_out, "arrival_time": HOST + arrival,
            "queued_ts": queued, "scheduled_ts": queued, "first_token_ts": first, "last_token_ts": last,
        }
        for i, (arrival, queued, first, last, num_in, num_out) in enumerate(served)
    ]  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeseries.csv").write_text("t,running,waiting,kv_cache_pct\n1.0,1,0,3.0\n2.0,2,0,5.0\n")
    return folder


@pytest.fixture
def tables(tmp_path) -> Path:
    return write_tables(tmp_path / "tables_tp1", STEP, {"lm_head": 0}, attention=0)


def results(folder: Path, tables: Path, asked: str = "auto") -> dict:
    run = vllm_run.read_run(folder)
    model = simulate.find_shape(run, None)
    prompts, source = simulate.make_prompts(run, model, asked)
    found = simulate.results_of(run, simulate.simulate(run, [tables], model, prompts), source)
    return found | {(figure["metric"], figure["of"]): figure for figure in found["figures"]}


def test_a_run_that_went_as_the_rules_say_has_no_error(tmp_path, tables):
    done = forked.run(
        "bench/simulate.py", "--run", str(write_run(tmp_path / "run")), "--tables", str(tables),
        env=os.environ | {"PYTHONPATH": str(BENCH.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    line = json.loads(line)
    for metric in simulate.METRICS:
        assert line[f"{metric}_mean_error_percent"] == line[f"{metric}_p99_error_percent"] == 0, line
    assert line["seconds"] > 0 and line["results"]["kv_blocks"] == 100 and line["results"]["requests"] == 3


def test_without_asynchronous_scheduling_nobody_waits_for_a_second_step(tmp_path, tables):
    meta = {"resolved_config": {"scheduler_config": {"async_scheduling": False}}}
    found = results(write_run(tmp_path / "run", meta), tables)
    assert found["ttft", "mean"]["simulated_ms"] == pytest.approx(1000)  # the second: queued at 1, first token at 2


EXPERT_PARALLEL = {"data_parallel_size": 2, "enable_expert_parallel": True}
MIXTURE = {"model": "some/Tiny-MoE", "resolved_config": {"parallel_config": EXPERT_PARALLEL}}


def test_cores_that_share_experts_step_together_and_requests_go_where_fewest_are(tmp_path):
    tables = write_tables(tmp_path / "tables_tp1", STEP, {"lm_head": 0}, attention=0, experts=0)
    run = vllm_run.read_run(write_run(tmp_path / "run", MIXTURE, {"link_latency": 0, "link_bw": 1e9}))
    prompts, _ = simulate.make_prompts(run, "dummy:tiny-moe", "auto")
    simulated = simulate.simulate(run, [tables], "dummy:tiny-moe", prompts)
    found = {metric: of.figures(metric) for metric, of in simulate.compare(run, simulated).items()}
    assert all(abs(figure["error_percent"]) < 0.01 for figures in found.values() for figure in figures)
    assert simulated.num_blocks == 101 // 2 - 1  # vLLM tells those of all together
    assert [max(running for _, running, *_ in series) for series in simulated.series] == [1, 1]


def test_a_step_of_all_begins_when_the_last_has_submitted_it_and_the_one_before_has_ended():
    group = lockstep.Lockstep(2, lambda steps: 1.0 + sum(step is None for step in steps))
    group.submit(0, 5.0, "work")
    group.submit(1, 7.0, "work")
    group.submit(0, 7.5, "more")
    group.submit(1, 7.2, None)
    assert [group.end(0), group.end(1)] == [8.0, 10.0]


def test_ranks_of_the_cluster_go_as_those_of_recorded_runs_do():
    """Two accounts of the same rule, this one with each rank asked in turn: the last step of all ends when it does
    there."""
    config = EngineConfig.build("v1", {"executor.kind": "simulated", "engine.overlap": 2, **RANKS})
    lengths = [(20, 30), (300, 12), (900, 40), (33, 7), (5, 1)]
    coming = [TraceRequest(0.0, *each) for each in lengths]
    cluster = build_cluster(config)
    cluster.run(coming)
    expected = max(replica.clock.now for replica in cluster.replicas)

    device = find_device(RANKS["executor.device"])
    cost, taken = RankCost(device, read_shape(MODELS[RANKS["model.path"]]), Numbers("bfloat16", 2, 2)), []

    def seconds(steps):
        alone = max(cost.own_seconds(step or replace(Step.of(1), num_samples=0)) for step in steps)
        return alone + cost.shared_seconds(sum(int(step.num_new.sum()) if step else 1 for step in steps))

    class Taken(RankCost):
        taken: Step | None = None

        def step_seconds(self, step: Step) -> float:
            self.taken = step
            return 0.0

    def make_cost(*of):
        taken.append(Taken(*of))
        return taken[-1]

    group, ranks = lockstep.Lockstep(device.count, seconds), []
    for number in range(device.count):
        host, stopwatch = VirtualClock(), VirtualClock()
        worker = SimulatedWorkerBuilder(config, clock=stopwatch, make_cost=make_cost, is_rank=True).build()
        inner = TimelineExecutor(worker, stopwatch, host, NO_HOST)
        queue = lockstep.RankQueue(inner, host, group, number, taken[-1])
        ranks.append(lockstep.Rank(build_over(queue, config, clock=host).core, queue))
    prompts = Prompts(1000)
    lockstep.drive(ranks, [(0.0, prompts.request(i, asked)) for i, asked in enumerate(coming)])
    assert max(rank.queue.host() for rank in ranks) == pytest.approx(expected, rel=1e-9)


def test_the_worst_figure_comes_first(tmp_path, tables):
    served = [SERVED[0], (0.5, 1.0, 2.0, 4.0, 30, 2), SERVED[2]]  # measured a second sooner than it is simulated
    figures = results(write_run(tmp_path / "run", served=served), tables)["figures"]
    off = [abs(figure["error_percent"]) for figure in figures]
    assert off == sorted(off, reverse=True) and off[0] > 20 and len(off) == 12


def test_requests_that_were_not_measured_are_served_and_not_compared(tmp_path, tables):
    served = [*SERVED, (40.0, 40.0, None, None, 5, 3)]
    found = results(write_run(tmp_path / "run", served=served), tables)
    assert found["requests"] == 4 and found["latency", "mean"]["error_percent"] == 0


def test_a_pool_that_the_run_does_not_tell_is_what_memory_leaves_beside_weights_and_forwards(tmp_path, tables):
    tables_of = simulate.read_tables(tables)
    run = vllm_run.read_run(write_run(tmp_path / "run", {"model": "meta-llama/Llama-3.1-8B", "kv_cache": {}}))
    num_blocks = simulate.count_blocks(run, "dummy:llama-3.1-8b", tables_of)
    assert num_blocks == pytest.approx(2588 * 1.1, rel=0.1)  # vLLM's on this device: with another budget
    small = vllm_run.read_run(
        write_run(tmp_path / "small", {"model": "Qwen/Qwen3-32B", "kv_cache": {}, "engine_kwargs": {}})
    )
    with pytest.raises(UserError, match="no room for KV on RTX4090 beside the weights"):
        simulate.count_blocks(small, "qwen3-32b", tables_of)


def test_prompts_of_a_known_workload_share_as_much_as_its_own_and_no_more(tmp_path, monkeypatch):
    known = tmp_path / "known.json"
    known.write_text(json.dumps({"workloads": {"abc": {"name": "chats", "shared": [[1, 0, 25]]}}}))
    monkeypatch.setattr(simulate, "WORKLOADS", known)
    run = vllm_run.read_run(write_run(tmp_path / "run", {"dataset_hash": "abc"}))
    (first, second, _), source = simulate.make_prompts(run, "dummy:tiny", "auto")
    assert [len(first), len(second)] == [40, 30] and "chats" in source
    assert first[:25] == second[:25] and first[25] != second[25]
    (first, second, _), _ = simulate.make_prompts(run, "dummy:tiny", "unshared")
    assert first[0] != second[0]


def test_prompts_may_be_given(tmp_path):
    run = vllm_run.read_run(write_run(tmp_path / "run"))
    file = tmp_path / "workload.jsonl"
    tokens = [[i + 1] * request.num_prompt for i, request in enumerate(run.requests)]
    file.write_text("".join(json.dumps({"input_tok_ids": each}) + "\n" for each in tokens))
    assert simulate.make_prompts(run, "dummy:tiny", str(file))[0] == tokens
    file.write_text(file.read_text().replace("[2,", "["))
    with pytest.raises(UserError, match=r"workload.jsonl:2: its tokens are not the 30"):
        simulate.make_prompts(run, "dummy:tiny", str(file))


@pytest.mark.parametrize(
    "name, size, sizes",
    [("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
     ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b", None),
     ("Qwen/Qwen3-32B", "qwen3-32b", [1, 2, 4, 8, 16])],
)  # fmt: skip
def test_a_model_is_known_by_its_name_and_vllm_captures_sizes_by_its_limit(tmp_path, name, size, sizes):
    run = vllm_run.read_run(write_run(tmp_path / "run", {"model": name}))
    assert simulate.find_shape(run, None) == size
    assert simulate.capture_sizes(run) == (sizes or [1, 2, 4, 8, 16])


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("requests.jsonl", lambda text: text.replace('"input_toks": 30', '"input_toks": 0'), "requests.jsonl:2: input"),
        ("requests.jsonl", lambda text: text.replace("\n", "\n{\n", 1), "requests.jsonl:2: no JSON"),
        ("requests.jsonl", lambda text: text.replace('"queued_ts": 1.0', '"queued_ts": 9.0'), "requests.jsonl:2: its"),
        ("requests.jsonl", lambda text: "", "requests.jsonl: no request"),
        ("timeseries.csv", lambda text: text + "3.0,x,0,1\n", "timeseries.csv:4"),
        ("meta.json", lambda text: text.replace("blocks\": 101", "blocks\": 1"), "num_gpu_blocks is 1, where"),
        ("meta.json", lambda text: text.replace("max_num_seqs", "data_parallel_size"), "data_parallel_size=8 is"),
        ("meta.json", lambda text: text.replace("some/Tiny", "some/Unheard"), "its sizes are not known here"),
        ("meta.json", lambda text: text.replace('"max_num_seqs": 8', '"max_num_seqs": 0'), "max_num_seqs is 0"),
        ("meta.json", lambda text: text.replace("parallel_size\": 1", "parallel_size\": 2"), "tensor_parallel_size=2"),
        ("meta.json", lambda text: text.replace("}}", '}, "data_parallel_size": 2}', 1)[:-1], "meta.json:1: no JSON"),
        ("config.json", lambda text: "{}", "config.json: no device"),
        ("config.json", None, "config.json: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_sentence_with_file_and_line(tmp_path, tables, name, change, says):
    folder = write_run(tmp_path / "run")
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(UserError, match=says):
        results(folder, tables)
