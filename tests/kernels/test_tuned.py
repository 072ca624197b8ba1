"""Tiles by card: a file's steps decide by sizes that the host knows, a card without one has the defaults, and the gate
compiles what a file names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minivllm.kernels.triton import tuned
from minivllm.kernels.triton.tiles import Tile, attention_tiles
from minivllm.kernels.triton.tuned import Measured, Shape, as_tree, candidates, file_name, fixed, load, plan, plans

ROOT = Path(__file__).parent.parent.parent
SHAPE = Shape(128, 4, "bfloat16", False)
A, B, C = Tile(16, 64, 4), Tile(16, 32, 8, 3), Tile(128, 64, 8)
CARD = "NVIDIA H200"
MEASURED = [
    *(Measured(SHAPE, "decode", size, A, 5.0) for size in (1, 4, 16)),
    *(Measured(SHAPE, "decode", size, B, us) for size, us in ((1, 6.0), (4, 4.0), (16, 4.0))),
    Measured(SHAPE, "prefill", 128, C, 9.0),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / file_name(CARD)).write_text(json.dumps(as_tree(MEASURED, 9, {"gpu": CARD})))
    return tmp_path


def test_the_fastest_tile_of_each_size_is_taken(folder):
    found = plan(SHAPE, 9, CARD, folder)
    assert [found.decode_tile(n) for n in (1, 2, 4, 5, 16, 1000)] == [A, B, B, B, B, B]
    assert found.prefill_tile(1) == found.prefill_tile(10**6) == C
    assert [step.up_to for step in found.decode] == [1, None], "equal neighbours are one step"


@pytest.mark.parametrize("card", [None, "NVIDIA A100-SXM4-80GB"])
def test_a_card_that_nobody_measured_has_the_defaults(card, folder):
    assert plan(SHAPE, 9, card, folder) == fixed(*attention_tiles(4, 128, 2, False, 9))


def test_so_has_another_shape(folder):
    for other in (SHAPE._replace(window=True), SHAPE._replace(dtype="int8"), SHAPE._replace(group=1)):
        expected = attention_tiles(other.group, 128, other.itemsize, other.window, 9)
        assert plan(other, 9, CARD, folder) == fixed(*expected)


def test_a_shape_of_which_only_one_kind_was_measured_is_left_out():
    assert as_tree(MEASURED[:-1], 9, {})["shapes"] == []


@pytest.mark.parametrize(
    "change, why",
    [
        ({"schema": "minivllm.tuned/9"}, "schema"),
        ({"decode": [[4, list(A)]]}, "end with null"),
        ({"decode": [[None, list(A)], [4, list(A)]]}, "must ascend"),
        ({"decode": [[8, list(A)], [4, list(A)], [None, list(A)]]}, "must ascend"),
        ({"decode": []}, "end with null"),
        ({"decode": [[None, [2, 64, 4, 2]]]}, "too few rows"),
    ],
)
def test_a_file_that_nobody_wrote_so_is_refused(change, why):
    tree = as_tree(MEASURED, 9, {})
    (tree if "schema" in change else tree["shapes"][0]).update(change)
    with pytest.raises(ValueError, match=why):
        plans(tree)


def test_the_files_that_are_there_can_be_read():
    for path in tuned.FOLDER.glob("*.json"):
        assert load(path) and json.loads(path.read_text())["major"] in (8, 9, 10), path


def test_candidates_begin_with_the_default_and_hold_a_group():
    for group in (1, 4, 7, 96):
        for kind, default in zip(tuned.KINDS, attention_tiles(group, 64, 2, False, 9), strict=True):
            tried = candidates(Shape(64, group, "float16", False), kind, 9)
            assert tried[0] == default and len(set(tried)) == len(tried) > 5
            assert all(tile.block_m >= group for tile in tried)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")
def test_the_gate_compiles_what_a_file_names(folder, monkeypatch):
    from minivllm.kernels.triton.shipped import shipped

    before = {s.name for s in shipped()}
    monkeypatch.setattr(tuned, "FOLDER", folder)
    more = [s for s in shipped() if s.name not in before]
    assert {tuple(s.constants[name] for name in ("BLOCK_M", "BLOCK_N")) for s in more} == {
        (16, 64),
        (16, 32),
        (128, 64),
    }
    assert {s.num_warps for s in more} == {4, 8} and {s.archs for s in more} == {(90,)}
    assert len(more) == 2 * 2 + 1, "decodes with splits and without, and a prefill"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")
def test_the_sweep_runs_end_to_end_without_a_card_and_measures_nothing(tmp_path):
    """Every candidate gives the default's result; a file is written by a card alone."""
    command = [sys.executable, "bench/gpu/run.py", "--part", "tune", "--device", "cpu", "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]["rows"]
    assert len(rows) == 12 and all(row["right"] and row["us"] == "not measured" for row in rows)
    assert sum(row["default"] for row in rows) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["tune.jsonl"]


def test_what_was_measured_before_stays_unless_it_was_measured_again(folder):
    other = SHAPE._replace(head_size=64)
    again = [m._replace(tile=C, kind="decode") for m in MEASURED] + [MEASURED[-1]]
    for fresh, decode in (([m._replace(shape=other) for m in MEASURED], B), (again, C)):
        found = plans(as_tree(fresh, 9, {}, load(folder / file_name(CARD))))
        assert found[SHAPE].decode_tile(16) == decode
    assert set(plans(as_tree([m._replace(shape=other) for m in MEASURED], 9, {}, found))) == {SHAPE, other}
