"""`make mutants`: what it counts, when verdicts are kept, and one run of the real tool over two functions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import areas
import pytest
import run_mutants
from run_mutants import PARTS, Part, Recorded, Score

ROOT = Path(__file__).parent.parent
CODE = '''\
def larger(a, b):
    """The larger of two numbers."""
    return a if a > b else b


def unheard_of():
    return 1
'''
TEST = """\
import minivllm.toy

def test_the_larger_is_taken():
    assert [minivllm.toy.larger(*pair) for pair in ((1, 2), (2, 1))] == [2, 2]
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A package of two functions, one of which has a test."""
    (tmp_path / "minivllm").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "some.cpp").write_text("")
    (tmp_path / "minivllm" / "kernels").symlink_to("../kernels")
    (tmp_path / "minivllm" / "__init__.py").write_text("")
    (tmp_path / "minivllm" / "toy.py").write_text(CODE)
    (tmp_path / "tests" / "test_toy.py").write_text(TEST)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n")
    (tmp_path / ".gitignore").write_text("build\n__pycache__\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr("run_areas.ROOT", tmp_path)
    monkeypatch.setattr(run_mutants, "ROOT", tmp_path)
    monkeypatch.setattr(run_mutants, "WORK", tmp_path / "build" / "mutants")
    monkeypatch.setattr(run_mutants, "RECORD", tmp_path / "tests" / "mutants.json")
    monkeypatch.setattr(run_mutants, "PARTS", {"toy": Part(("minivllm/toy.py",), ("tests/test_toy.py",))})
    return tmp_path


def test_what_no_test_notices_is_shown_and_gone_once_a_test_is_there(repository, capfd):
    assert run_mutants.main(["--record"]) == 0
    kept = json.loads((repository / "tests" / "mutants.json").read_text())["toy"]
    assert 0 < kept["noticed"] < kept["mutants"] and kept["tool"].startswith("mutmut ")
    assert f"toy {kept['mutants']:>17} {kept['noticed']:>8}" in capfd.readouterr().out
    assert run_mutants.main(["--show", "unheard_of"]) == 0
    assert "-    return 1\n+    return 2" in capfd.readouterr().out
    (repository / "tests" / "test_toy.py").write_text(
        TEST + "def test_unheard_of():\n    assert minivllm.toy.unheard_of() == 1\n"
    )
    assert run_mutants.main(["--again", "toy"]) == 0
    assert f"toy {kept['mutants']:>17} {kept['noticed'] + 1:>8}" in capfd.readouterr().out


@pytest.fixture
def prepared(repository):
    """Prepares the folder anew, and says whether a verdict that was there is there still."""

    def prepare(again=False) -> bool:
        folder = run_mutants.prepare("toy", again)
        (there := (folder / "verdict").exists()) or (folder / "verdict").write_text("")
        return there

    return prepare


def test_verdicts_are_kept_as_long_as_no_file_differs_but_to_look_at_what_a_new_test_does(repository, prepared):
    assert [prepared(), prepared()] == [False, True]
    (repository / "tests" / "new.py").write_text("")
    assert [prepared(), prepared()] == [False, True]
    (repository / "tests" / "mutants.json").write_text("{}")  # the scores are no code
    assert prepared()
    (repository / "minivllm" / "toy.py").write_text(CODE + "1\n")
    assert [prepared(again=True), prepared(again=True)] == [True, True]
    assert [prepared(), prepared()] == [False, True], "some were of other files"


def test_a_file_that_is_the_same_is_not_touched_and_one_that_is_gone_goes(repository):
    folder = run_mutants.prepare("toy", again=False)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.py")}
    (repository / "minivllm" / "toy.py").write_text(CODE + "1\n")
    (repository / "minivllm" / "__init__.py").unlink()
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    (repository / "tests" / "test_toy.py").unlink()
    run_mutants.prepare("toy", again=True)
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.py")}
    changed = {path.name for path in before if after.get(path) != before[path]}
    assert changed == {"toy.py", "test_toy.py"} and not (folder / "tests" / "test_toy.py").exists()


def test_a_change_is_noticed_by_a_test_by_no_end_or_by_a_crash():
    found = dict.fromkeys("abc", "killed") | {"d": "timeout", "e": "segfault", "f": "suspicious"}
    found |= {"g": "survived", "h": "no tests"}
    assert run_mutants.score(found) == Score(8, 6)
    assert Score(8, 6).percent == 75.0
    assert run_mutants.unnoticed(found) == ["g", "h"] and run_mutants.unnoticed(found, "h") == ["h"]
    with pytest.raises(run_mutants.NoVerdict, match="^1 of 9 changes are not checked: run the part again, it goes on"):
        run_mutants.score(found | {"i": "not checked"})


def test_a_score_may_be_a_little_lower_and_no_more():
    record = {"kv": Recorded(Score(1000, 920), "2026-11-25")}
    assert run_mutants.lower({"kv": Score(1000, 916), "plan": Score(10, 1)}, record) == []
    assert run_mutants.lower({"kv": Score(1000, 914)}, record) == ["kv"]
    lines = run_mutants.table({"kv": Score(1000, 914), "plan": Score(10, 1)}, record).splitlines()
    assert lines[1].split() == ["kv", "1000", "914", "91.4", "%", "92.0", "%", "on", "2026-11-25"]
    assert lines[2].split() == ["plan", "10", "1", "10.0", "%", "-"]


@pytest.mark.parametrize("args", [["--show"], ["--again"]])
def test_what_was_never_run_has_nothing_to_show(repository, capsys, args):
    assert run_mutants.main(args) == 2
    assert "toy has not been run: make mutants PART=toy" in capsys.readouterr().out


def test_an_unknown_part_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        run_mutants.main(["kvv"])
    assert f"no part kvv: there are {' '.join(PARTS)}" in capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_a_part_names_code_and_tests_of_the_gate(name):
    for path in (*PARTS[name].code, *PARTS[name].tests):
        assert (ROOT / path).exists(), path
    assert all(areas.area_of(path) == areas.GATE for path in PARTS[name].tests)


@pytest.mark.parametrize("name", ["kv", "scheduler", "plan"])
def test_of_what_decides_who_runs_and_where_it_lies_nearly_every_change_is_noticed(name):
    assert run_mutants.recorded()[name].score.percent >= 92


def test_each_part_has_a_score_of_this_tool():
    kept = json.loads((ROOT / "tests" / "mutants.json").read_text())
    assert sorted(kept) == sorted(PARTS) and all(each["tool"].startswith("mutmut ") for each in kept.values())
