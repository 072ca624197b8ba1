"""What `make microbench` says of runs that are made up."""

from __future__ import annotations

import json

import pytest
from benchmarks import compare
from benchmarks.compare import GROWTH, MOST, RECORD, YARDSTICK, main


@pytest.fixture
def then() -> dict[str, float]:
    return json.loads(RECORD.read_text())["results"]["fastest_us"]


def grown(now, then) -> set[str]:
    return {row.what for row in compare.compare(now, then) if row.has_grown}


def test_the_record_bears_itself_out_on_a_machine_of_any_speed(then):
    assert grown(then, then) == set()
    assert grown({name: 7 * us for name, us in then.items()}, then) == set()


def test_a_case_that_has_become_slower_is_told(then):
    slower = 1.1 * MOST * then["test_detokenizer_step"]
    assert grown(then | {"test_detokenizer_step": slower}, then) == {"test_detokenizer_step / yardstick"}


@pytest.mark.parametrize("small, large, most", GROWTH, ids=lambda value: str(value))
def test_what_grows_faster_than_its_work_is_told(small, large, most, then):
    assert f"{large} / {small}" in grown(then | {large: 1.1 * most * then[small]}, then)


def test_a_case_that_is_gone_is_no_success(then):
    with pytest.raises(KeyError, match="yardstick"):
        compare.compare({name: us for name, us in then.items() if name != YARDSTICK}, then)


def test_a_run_is_read_as_pytest_benchmark_writes_it(then, tmp_path, capsys, monkeypatch):
    def write(times):
        cases = [{"name": name, "stats": {"min": us / 1e6}} for name, us in times.items()]
        (tmp_path / "run.json").write_text(json.dumps({"benchmarks": cases}))
        return str(tmp_path / "run.json")

    assert main([write(then)]) == 0 and "HAS GROWN" not in capsys.readouterr().out
    assert main([write({name: (1 + (name != YARDSTICK) * 9) * us for name, us in then.items()})]) == 1
    assert "HAS GROWN" in capsys.readouterr().out
    monkeypatch.setattr(compare, "RECORD", tmp_path / "record.json")
    assert main([write(then), "--record"]) == 0
    kept = json.loads((tmp_path / "record.json").read_text())
    assert kept["results"]["fastest_us"] == pytest.approx(then, abs=0.01) and kept["machine"]["cpu"]
