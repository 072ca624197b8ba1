"""Whatever run is committed is shown: the newest first, each machine by itself, and where it loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bookext import codemap, records, runs
from bookext.figures import Records

ENGINES = {
    "minivllm": {"what": "as it starts", "family": "minivllm"},
    "other": {"what": "bf16", "family": "vllm"},
}
PAGE = """# Runs

````{runs} bench/host
:having: one
Took {num}`bench/host:one` ms.
````

````{runs} bench/host
:each: params.core
Core {num}`bench/host:params.core`.
````

```{peers}
```

```{results}
```
"""


def record(date: str, cpu: str, results: Any, **params: Any) -> dict[str, Any]:
    return {
        "date": f"2026-01-{date}T00:00:00+00:00", "commit": f"c{date}", "command": "python bench/host.py",
        "machine": {"cpu": cpu, "num_cores": 2}, "versions": {}, "params": params, "results": results,
    }  # fmt: skip


def peers(date: str, cpu: str, ratio: float, workloads: tuple[str, ...] = ("one",)) -> dict[str, Any]:
    """minivllm beside one other engine, which is `ratio` times slower and needs half of its memory."""
    runs_of = {
        "minivllm": {"rates": [100.0] * 3, "peak_mib": [500] * 3, "why": ""},
        "other": {"rates": [100 / ratio] * 3, "peak_mib": [250] * 3, "why": ""},
    }
    rows = [
        {"workload": w, "ours": "minivllm", "family": "vllm", "theirs": "other", "ratio": ratio, "at_least": 2.0}
        for w in workloads
    ]
    results = {
        "engines": ENGINES, "start_seconds": {}, "left_out": {}, "load_before": 0.1, "ratios": rows,
        "workloads": {w: {"what": f"work {w}", "counts": "output", "runs": runs_of} for w in workloads},
    }  # fmt: skip
    return record(date, cpu, results, rounds=3, model="m", threads=2, quick=False)


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    """Two machines: A measured first and last of host, B last of peers."""
    folder = tmp_path_factory.mktemp("bench")
    lines = [
        record("01", "A", {"one": 1}, core="p"), record("02", "B", {"one": 2}, core="p"),
        record("03", "A", {"one": 3}, core="p"), record("04", "A", {"two": 4}, core="q"),
    ]  # fmt: skip
    (folder / "host.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, found in (
        ("old", peers("01", "A", 0.5)),
        ("mid", peers("02", "A", 1.5, ("one", "eight"))),
        ("b", peers("03", "B", 3.0)),
    ):
        (folder / f"peers-{name}.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def page(builder, bench, tmp_path_factory) -> str:
    source = tmp_path_factory.mktemp("source")
    (source / "index.md").write_text(PAGE)
    return (builder(source, tmp_path_factory.mktemp("out"), "-D", f"book_bench={bench}") / "index.html").read_text()


def places(text: str, *parts: str) -> list[int]:
    return [text.index(part) for part in parts]


def test_each_machine_has_its_newest_run_and_the_newest_machine_is_first(page):
    order = places(page, "On A, 2 cores:", ">3</span> ms", "On B, 2 cores:", ">2</span> ms")
    assert order == sorted(order)
    assert ">1</span> ms" not in page  # older, of the same machine
    assert page.count("Core <span") == 3  # q and p of A, p of B


def test_a_new_file_of_peers_is_shown_without_an_edit(page):
    order = places(page, "On B, 2 cores<", "peers-b, ", "On A, 2 cores<", "peers-mid, ", "peers-old, ")
    assert order == sorted(order)
    assert "3.00 ×" in page and "1.50 ×, 2.0 wanted" in page


def test_a_ratio_below_what_was_wanted_and_more_memory_are_losses(bench):
    records.read_from(bench)
    try:
        a = [run for name in ("mid", "old") for run in records.runs(f"bench/peers-{name}")]
        b = records.runs("bench/peers-b")
        losses = runs.losses(runs.newest(a), a)
        assert losses[0] == "work one: `minivllm` is 1.50 times as fast as `other`, where 2.0 was wanted."
        assert losses[-1] == "Memory, work one: `minivllm` takes 500 MiB, `other` 250 MiB." and len(losses) == 3
        assert runs.losses(runs.newest(b), b)[0].startswith("Speed: no ratio")
        drawn = "\n".join(runs.on_machine("A", a))
        assert drawn.count(":::{chart}") == 2 and "peers-old:workloads" not in drawn  # the newer run drew it
    finally:
        records.read_from(records.BENCH)


def test_every_committed_result_is_on_a_page():
    found = records.committed()
    assert len(found) > 20 and not [source for source in found if not runs.shown_on(source)]


def test_a_path_goes_through_a_list_and_a_column_has_its_median():
    row = {"runs": [{"ms": 1.0}, {"ms": 3.0}, {"ms": 9.0}]}
    assert records.pick(row, "runs.*.ms") == [1.0, 3.0, 9.0]
    assert Records.cell(row, "runs.*.ms .1f") == "3.0"
    assert Records.cell({"parts": {"LM head": 2.5}}, "parts.LM head .1f") == "2.5"


def test_every_part_on_the_map_says_what_it_is():
    assert set(codemap.imports()) <= set(codemap.WHAT)
    assert (
        codemap.part_of("minivllm.trace_recent") == "trace"
        and codemap.part_of("minivllm.spec_decode.base") == "spec_decode"
    )
