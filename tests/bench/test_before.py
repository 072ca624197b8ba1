"""A benchmark beside that of another checkout: who runs when, and what is made of it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"
NAMES = ("attention", "host", "linear", "serve_overhead")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in {path.stem for path in BENCH.glob("*.py")} & sys.modules.keys():
        del sys.modules[name]  # scripts of that folder are no modules of other tests


def asked(before, *argv):
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path)
    before.add_options(options)
    return options.parse_known_args(argv)[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_that_takes_turns_finds_its_figures_in_its_own_records(name, bench):
    lines = (BENCH / "results" / f"{name}.jsonl").read_text().splitlines()
    found = bench(name).figures(json.loads(lines[-1])["results"])
    assert len(found) >= 4 and all(value >= 0 for value in found.values())


def test_both_run_with_the_same_options_in_turns_and_ratios_are_taken_within_one(bench, tmp_path, monkeypatch, capsys):
    before, runs = bench("before"), []
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "host.py").touch()

    def run(folder, name, options):
        runs.append((folder == tmp_path, options))
        return {"step": (1 + len(runs) // 2) * (2.0 if folder == tmp_path else 1.0), "new": 1.0} | (
            {} if folder == tmp_path else {"only now": 1.0}
        )

    monkeypatch.setattr(before, "_run", run)
    argv = ["--num-reqs", "8", "--before", str(tmp_path), "--turns=3", "--inputs", "gather", "--out", "x"]
    before.compare("host", dict, asked(before, "--before", str(tmp_path), "--turns=3"), argv)
    record = json.loads(capsys.readouterr().out)
    assert [is_before for is_before, _ in runs] == [False, True, True, False, False, True, True, False]
    assert all(options == ["--num-reqs", "8", "--inputs", "gather"] for _, options in runs)
    step, new = record["results"]
    assert (step["figure"], step["now"]["num_runs"], new["ratio"]) == ("step", 3, {"ratio": 1, "low": 1, "high": 1})
    assert step["ratio"]["low"] <= step["ratio"]["ratio"] < 1
    assert record["bench"] == "host_before" and record["params"]["turns"] == 3


def test_a_checkout_that_cannot_is_one_sentence(bench, tmp_path):
    before = bench("before")
    args = asked(before, "--before", str(tmp_path))
    with pytest.raises(SystemExit, match="there is no"):
        before.compare("host", dict, args, [])
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "host.py").write_text("import sys; sys.exit('the disk is full')")
    (tmp_path / "bench" / "here.py").write_text("")
    with pytest.raises(SystemExit, match=r"(?s)the disk is full.*host.py ended with exit code 1"):
        before._run(tmp_path, "host", [])


def test_without_it_a_benchmark_is_what_it_was(bench):
    assert not bench("before").is_asked(asked(bench("before")))
    assert "before" not in vars(asked(bench("before")))
