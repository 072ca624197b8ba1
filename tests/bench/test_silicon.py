"""Points of servers, predicted by tables that are made up: so that the times are known by heart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from operator_tables import attention, products, write_table

ROOT = Path(__file__).parent.parent.parent
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))  # only while importing: bench/attention.py would hide tests/attention

import operators  # noqa: E402
import silicon  # noqa: E402

sys.path.remove(str(BENCH))

from minivllm.errors import ConfigError, TraceError  # noqa: E402
from minivllm.simulate.cost import Step  # noqa: E402
from minivllm.simulate.devices import DEVICES  # noqa: E402
from minivllm.simulate.host import NO_HOST, HostCost  # noqa: E402

HEAD = "backend_version,model,system,precision,isl,osl,concurrency,tp,attention_dp,moe_tp,moe_ep,ttft_ms,tpot_ms"
LLAMA = "0.19.0,meta-llama/Llama-3.1-8B,h100_sxm,,100,10,1,1,1,1,1,20,10"
LAYERS = 32  # of Llama 3.1 8B, each with four products; and the LM head
PREFILL, DECODE, PRODUCT = 0.5, 0.125, 0.01  # ms


@pytest.fixture
def tables(tmp_path) -> Path:
    folder = tmp_path / "tables"
    write_table(folder, "h100_sxm", "gemm", products("bfloat16", PRODUCT))
    write_table(folder, "h100_sxm", "context_attention", attention(False, 32, 8, 128, PREFILL))
    write_table(folder, "h100_sxm", "generation_attention", attention(True, 32, 8, 128, DECODE))
    return folder


def write_points(tmp_path: Path, *rows: str, head: str = HEAD) -> Path:
    path = tmp_path / "points.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def points(tmp_path: Path, *rows: str) -> list[silicon.Point]:
    return silicon.read_points(write_points(tmp_path, *rows))


def step_ms(tables: Path, point: silicon.Point, num_new: int, start: int) -> float:
    """By tables, and by formulas what they do not have."""
    kernels, numbers = silicon.kernels_of("llama-3.1-8b", "", "h100_sxm")
    own = operators.Tables(tables, "h100_sxm"), kernels, point.split, silicon.CAPTURE_SIZES, NO_HOST
    cost = operators.OperatorCost(*own, DEVICES["h100"], silicon.shape_of("llama-3.1-8b"), numbers)
    return 1e3 * cost.step_seconds(Step(np.array([num_new]), np.array([start]), 1))


# --------------------------------------------------------------------------------------------------------------- grids


def test_a_grid_is_a_line_in_logarithms():
    grid = operators.Grid([np.array([1.0, 4.0, 16.0])], np.array([1.0, 2.0, 4.0]))
    assert [grid(size) for size in (1, 2, 4, 16, 64)] == pytest.approx([1, 2**0.5, 2, 4, 8])


def test_below_the_first_point_a_kernel_takes_what_it_takes_there():
    assert operators.Grid([np.array([4.0, 16.0])], np.array([2.0, 4.0]))(1) == pytest.approx(2)


def test_the_faster_of_two_kernels_counts():
    assert operators.Grid([np.array([1.0, 1.0, 4.0])], np.array([3.0, 1.0, 2.0]))(1) == pytest.approx(1)


def test_a_point_that_was_not_measured_lies_between_the_others():
    sizes = np.array([[1.0, 1.0], [1.0, 4.0], [4.0, 1.0], [16.0, 1.0], [16.0, 4.0]])  # (4, 4) is missing
    grid = operators.Grid(list(sizes.T), np.array([1.0, 1.0, 2.0, 4.0, 4.0]))
    assert grid(4, 4) == pytest.approx(2)


def test_a_grid_of_two_sizes_over_one():
    rows = [(m, n) for m in (1, 8) for n in (1, 8)]
    grid = operators.Grid([np.array(axis, float) for axis in zip(*rows, strict=True)], np.array([1.0, 8.0, 8.0, 64.0]))
    assert grid.line(4)(2) == pytest.approx(grid(2, 4)) == pytest.approx(8)


# --------------------------------------------------------------------------------------------------------------- steps


def test_a_step_is_what_its_operators_take(tables, tmp_path):
    (point,) = points(tmp_path, LLAMA)
    kernels, numbers = silicon.kernels_of("llama-3.1-8b", "", "h100_sxm")
    own = operators.Tables(tables, "h100_sxm"), kernels, point.split, [], NO_HOST
    cost = operators.OperatorCost(*own, DEVICES["h100"], silicon.shape_of("llama-3.1-8b"), numbers)
    measured = LAYERS * (4 * PRODUCT + DECODE) + PRODUCT
    elementwise = 1e3 * sum(
        count * cost.seconds(work) for count, work in cost._operations(1, 1) if isinstance(work, operators.Work)
    )
    assert 0 < elementwise < 2  # small kernels, which no table has
    assert step_ms(tables, point, 1, 50) == pytest.approx(measured + elementwise, rel=1e-3)
    assert not cost.by_formulas


def test_a_host_that_is_waited_for_is_part_of_each_step(tables, tmp_path):
    (point,) = points(tmp_path, LLAMA)
    kernels, numbers = silicon.kernels_of("llama-3.1-8b", "", "h100_sxm")

    def cost(host: HostCost) -> operators.OperatorCost:
        own = operators.Tables(tables, "h100_sxm"), kernels, point.split, [], host
        return operators.OperatorCost(*own, DEVICES["h100"], silicon.shape_of("llama-3.1-8b"), numbers)

    start = np.array([10, 20])
    more = cost(HostCost(0.25, 0.5)).run_seconds(start, 3) - cost(NO_HOST).run_seconds(start, 3)
    assert more == pytest.approx(3 * (0.25 + 2 * 0.5))


def test_what_no_table_has_is_by_formulas_and_said_so(tables, tmp_path):
    (tables / "h100_sxm-vllm-1.0-generation_attention_perf.parquet").unlink()
    (point,) = points(tmp_path, LLAMA)
    assert silicon.predict(tables, point).by_formulas == ("decode attention",)


# --------------------------------------------------------------------------------------------------------- predictions


def test_one_client_waits_for_the_front_end_and_its_prompt(tables, tmp_path):
    (point,) = points(tmp_path, LLAMA)
    found = silicon.predict(tables, point)
    lengths = [num_prompt for num_prompt, _ in silicon.lengths_of(point)]
    front = 1e3 * np.mean([silicon.FrontEnd.REQUEST + silicon.FrontEnd.TOKEN * length for length in lengths])
    assert found.ttft == pytest.approx(front + np.mean([step_ms(tables, point, n, 0) for n in lengths]), rel=1e-6)
    assert found.tpot == pytest.approx(step_ms(tables, point, 1, 95), rel=1e-3)


def test_who_comes_while_a_step_runs_waits_for_it_and_where_one_is_planned_ahead_for_the_next(tables, tmp_path):
    (ahead,) = points(tmp_path, LLAMA.replace(",1,1,1,1,1,20", ",4,1,1,1,1,20"))
    (alone,) = points(tmp_path, LLAMA.replace("0.19.0", "0.12.0").replace(",1,1,1,1,1,20", ",4,1,,,,20"))
    assert ahead.is_async and not alone.is_async
    assert ahead.case[:-1] == alone.case[:-1]
    longer = silicon.predict(tables, ahead).ttft - silicon.predict(tables, alone).ttft
    step = step_ms(tables, ahead, 1, 95)
    assert 0 < longer < 1.5 * step


def test_prompts_of_other_clients_come_between_a_requests_tokens(tables, tmp_path):
    (point,) = points(tmp_path, LLAMA.replace(",1,1,1,1,1,20", ",8,1,1,1,1,20"))
    found = silicon.predict(tables, point)
    assert len(silicon.lengths_of(point)) == silicon.ROUNDS * 8
    assert found.tpot > step_ms(tables, point, 1, 95)


@pytest.mark.parametrize(
    ("said", "split"),
    [
        ((4, 1, 4, 1), (4, 1, 4, 1)),  # tensor parallelism
        ((4, 1, 1, 4), (4, 1, 1, 4)),  # experts over the same devices
        ((2, 2, 1, 4), (1, 2, 1, 2)),  # two devices, each an engine core
        ((4, 4, 1, 16), (1, 4, 1, 4)),
        ((8, 8, 1, 8), (1, 8, 1, 8)),
        ((1, 8, 1, 8), (1, 8, 1, 8)),
        ((2, 4, 1, 8), (2, 4, 1, 8)),  # which is not modelled
        ((4, 1, 1, 1), (4, 1, 4, 1)),  # a dense model
    ],
)
def test_how_a_model_lies_on_devices(said, split):
    assert silicon._split(*said) == split


@pytest.mark.parametrize(
    ("model", "precision", "system", "linear", "experts", "cached"),
    [
        ("llama-3.1-70b", "fp8", "h200_sxm", "fp8", None, "fp8"),
        ("llama-3.1-70b", "fp8", "h100_sxm", "fp8", None, "bfloat16"),
        ("llama-3.1-70b", "fp4", "b200_sxm", "nvfp4", None, "fp8"),
        ("qwen3-32b", "fp8", "h100_sxm", "fp8_block", None, "bfloat16"),
        ("minimax-m2.5", "fp8", "h200_sxm", "fp8_block", "fp8_block", "bfloat16"),
        ("kimi-k2.5", "int4", "h200_sxm", "bfloat16", "int4_wo", "bfloat16"),
        ("kimi-k2.5", "fp4", "b200_sxm", "bfloat16", "nvfp4", "fp8"),
        ("gpt-oss-120b", "fp4", "h100_sxm", "bfloat16", "w4a16_mxfp4", "bfloat16"),
        ("gpt-oss-120b", "fp4", "b200_sxm", "bfloat16", "w4a8_mxfp4_mxfp8", "fp8"),
    ],
)
def test_in_which_numbers_a_server_computes(model, precision, system, linear, experts, cached):
    assert silicon.kernels_of(model, precision, system)[0] == (linear, experts, cached)


def test_what_was_distilled_from_a_model_is_another():
    with pytest.raises(ConfigError, match="sizes are not known"):
        silicon.find_name("deepseek-ai/DeepSeek-R1-Distill-Llama-70B")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("moonshotai/Kimi-K2.5", "kimi-k2.5"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2.5"),
    ],
)
def test_models_go_by_their_names(model, name):
    assert silicon.find_name(model) == name


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (LLAMA.replace(",100,", ",many,"), "isl='many' is not a positive integer"),
        (LLAMA.replace(",20,10", ",fast,10"), "could not convert string to float: 'fast'"),
        (LLAMA.replace(",20,10", ",0,10"), "ttft_ms=0, tpot_ms=10: not the times of a server"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path, row, said):
    with pytest.raises(TraceError, match=f"points.csv:3: {said}"):
        points(tmp_path, LLAMA, row)


def test_a_file_without_what_is_needed(tmp_path):
    with pytest.raises(TraceError, match="no rows with ttft_ms, tpot_ms"):
        silicon.read_points(write_points(tmp_path, "a,1", head="model,system,precision,isl,osl,concurrency,tp"))
    with pytest.raises(TraceError, match="No such file"):
        silicon.read_points(tmp_path / "none.csv")


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "simulate", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_one_line_draws_the_worst_first_and_names_what_it_leaves_out(tables, tmp_path):
    file = write_points(
        tmp_path,
        LLAMA,
        LLAMA.replace(",20,10", ",2000,10"),
        LLAMA.replace("Llama-3.1-8B", "Unheard-Of"),
        LLAMA.replace("h100_sxm", "z9"),
    )
    asked = "--silicon", file, "--tables", tables, "--processes", "1"
    done = run(*asked, "--out", tmp_path / "out.jsonl", "--plot", tmp_path / "plot.svg")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["points"] == 2 and found["ttft"] > 0 and found["tpot"] > 0 and found["seconds"] > 0
    assert list(found["by"]) == ["Llama-3.1-8B on h100_sxm"]
    reasons = " ".join(found["left_out"])
    assert "Unheard-Of" in reasons and "z9" in reasons and sum(found["left_out"].values()) == 2
    rows = json.loads((tmp_path / "out.jsonl").read_text())["results"]["rows"]
    assert [row["line"] for row in rows] == [3, 2]
    assert done.stderr.index("line 3") < done.stderr.index("line 2")
    assert "Llama-3.1-8B on h100_sxm (2)" in (tmp_path / "plot.svg").read_text()


def test_what_cannot_be_asked_for(tables, tmp_path):
    file = write_points(tmp_path, LLAMA)
    assert "one folder of --tables" in run("--silicon", file, "--tables", tables, tables).stderr
    assert "--plot draws the points" in run("--run", tmp_path, "--tables", tables, "--plot", "a.svg").stderr
    done = run("--silicon", file, "--tables", tmp_path)
    assert done.returncode == 2 and "no tables of operators" in done.stderr


def test_engine_cores_of_several_devices_are_left_out(tables, tmp_path):
    (point,) = points(tmp_path, LLAMA.replace(",1,1,1,1,1,20", ",8,2,4,1,8,20"))
    assert "on a device each" in str(silicon.try_to(tables, point))
