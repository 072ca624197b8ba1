"""Each chapter: its claims hold here, its results are its script's, and its exercise can be failed and passed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import forked
import pytest

from chapters import harness
from minivllm.cli import chapter
from minivllm.features import FEATURES

ROOT = Path(__file__).parent.parent.parent
FOLDERS = list(chapter.chapters().values())
IDS = [folder.name for folder in FOLDERS]
MUTANTS = [
    (folder, name) for folder in FOLDERS for name in importlib.import_module(f"chapters.{folder.name}.mutants").MUTANTS
]
MAX_SECONDS = 60  # of a script, on the machine that its results are from
ABOUT_TIME = ("13", "14")  # whose claims compare times that another test beside them would change
each_chapter = pytest.mark.parametrize("folder", FOLDERS, ids=IDS)


def script(folder: Path) -> types.ModuleType:
    return importlib.import_module(f"chapters.{folder.name}.run")


def committed(folder: Path) -> dict:
    return json.loads((harness.RESULTS / f"{folder.name[:4]}.json").read_text())


@pytest.mark.model
@pytest.mark.timeout(900)  # what it says of times gets three attempts
@pytest.mark.skipif(os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1), reason="claims about time need a free machine")
@pytest.mark.parametrize(
    "folder",
    [pytest.param(f, marks=[pytest.mark.alone] * (f.name[2:4] in ABOUT_TIME)) for f in FOLDERS],
    ids=IDS,
)
def test_the_claims_hold_on_this_machine(folder, monkeypatch):
    ran = []

    def python(args):
        ran.append(forked.run(*args, timeout=900))
        return ran[-1].returncode

    monkeypatch.setattr(chapter, "python", python)
    status = chapter.main([folder.name[2:4], "--smoke"])
    (done,) = ran
    assert status == 0, done.stderr
    assert "every claim of its text held" in done.stderr and done.stdout


@each_chapter
def test_the_committed_results_are_whole_and_bear_the_claims_out(folder):
    record = committed(folder)
    assert not record["params"]["smoke"] and record["commit"] and record["machine"]["cpu"]
    assert record.get("seconds", 0) <= MAX_SECONDS, "a reader waits too long for this script"
    script(folder).check(record["results"])
    assert script(folder).tell(record["results"]) == (harness.RESULTS / f"{folder.name[:4]}.txt").read_text()


@each_chapter
def test_a_claim_that_does_not_hold_is_noticed(folder):
    """Every check of the script can fail: results with all numbers equal are no evidence of anything."""

    def flat(value):
        if isinstance(value, dict):
            return {key: flat(item) for key, item in value.items()}
        if isinstance(value, list):
            return [flat(item) for item in value]
        return 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    with pytest.raises(AssertionError):
        script(folder).check(flat(committed(folder)["results"]))


def test_a_claim_about_time_is_measured_again_and_no_other(capsys):
    def run(found, attempts, claim=harness.in_time):
        runs = iter(found)
        return harness.checked(lambda: {"ms": next(runs)}, lambda results: claim(results["ms"] < 5, "slow"), attempts)

    def must(is_so, otherwise):
        assert is_so, otherwise

    assert run([9, 3, 2], attempts=3) == {"ms": 3} and "slow; measuring again" in capsys.readouterr().err
    with pytest.raises(harness.TimeClaim):
        run([9, 8, 7, 3], attempts=3)
    with pytest.raises(harness.TimeClaim):
        run([9, 3], attempts=1)
    with pytest.raises(AssertionError, match="slow"):
        run([9, 3], attempts=3, claim=must)


@each_chapter
def test_the_chapter_has_a_switch_in_the_feature_table(folder):
    """The key of features.py is the chapter's number; a page shows its rows by {switch}."""
    rows = [f for f in FEATURES if f.chapter == folder.name[2:4]]
    assert ("{switch}" in (folder / "index.md").read_text()) == bool(rows)


# ---------------------------------------------------------------------------------------- exercises


def verdicts(folder: Path, source: str, monkeypatch) -> dict[str, bool]:
    """{test: whether it passes} for an exercise.py of this text."""
    exercise = types.ModuleType("exercise")
    monkeypatch.setitem(sys.modules, "exercise", exercise)  # before it runs: a dataclass looks its module up
    exec(compile(source, "exercise.py", "exec"), exercise.__dict__)
    tests: dict = {}
    exec(compile((folder / "test_exercise.py").read_text(), "test_exercise.py", "exec"), tests)
    found = {}
    for name, test in tests.items():
        if name.startswith("test_"):
            try:
                test()
                found[name] = True
            except Exception:  # whatever a wrong solution runs into
                found[name] = False
    return found


@each_chapter
def test_the_stub_fails_every_test_and_the_solution_none(folder, monkeypatch):
    stub = verdicts(folder, (folder / "exercise.py").read_text(), monkeypatch)
    assert len(stub) >= 3 and not any(stub.values()), stub
    solution = verdicts(folder, (folder / "solution.py").read_text(), monkeypatch)
    assert all(solution.values()), solution


@pytest.mark.parametrize(("folder", "name"), MUTANTS, ids=[f"{folder.name[:4]}-{name}" for folder, name in MUTANTS])
def test_a_wrong_solution_is_caught(folder, name, monkeypatch):
    right, wrong = importlib.import_module(f"chapters.{folder.name}.mutants").MUTANTS[name]
    source = (folder / "solution.py").read_text()
    assert source.count(right) == 1, "the mutant does not fit the solution any more"
    assert not all(verdicts(folder, source.replace(right, wrong), monkeypatch).values())


@each_chapter
def test_a_chapter_has_at_least_three_mutants_and_three_hints(folder):
    assert sum(of == folder for of, _ in MUTANTS) >= 3
    (exercise,) = re.findall(r"^:::\{exercise\}.*?^:::$", (folder / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^\+\+\+$", exercise, re.MULTILINE)) == 3


def test_the_command_runs_the_tests_on_what_the_reader_wrote_and_keeps_it(tmp_path):
    solution = (ROOT / "chapters" / "ch02_kv_cache" / "solution.py").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "exercise.py").write_text(solution)
    command = [sys.executable, "-m", "minivllm", "chapter", "2", "--exercise", "mine"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "mine" / "exercise.py").read_text() == solution
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@each_chapter
def test_the_command_begins_with_the_stub(folder, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(chapter, "python", lambda args: ran.append(args[-1]) or 1)
    assert chapter.main([folder.name[2:4], "--exercise", str(tmp_path / "mine")]) == 1
    assert ran == [str(tmp_path / "mine" / "test_exercise.py")]
    for name in chapter.EXERCISE:
        assert (tmp_path / "mine" / name).read_text() == (folder / name).read_text()


def test_a_chapter_that_does_not_exist_is_refused_with_those_that_do(capsys):
    with pytest.raises(SystemExit):
        chapter.main(["99"])
    assert "There are: " in capsys.readouterr().err


def test_all_chapters_run_in_turn_and_the_first_failure_ends_it(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(chapter, "chapters", lambda: {2: FOLDERS[0], 3: FOLDERS[0], 4: FOLDERS[0]})
    monkeypatch.setattr(chapter, "python", lambda args: ran.append(args) or (len(ran) == 2) * 7)
    assert chapter.main(["--all", "--record"]) == 7
    assert len(ran) == 2 and all(args[-1] == "--record" for args in ran)
    assert "[2/3] chapter 3" in capsys.readouterr().err
