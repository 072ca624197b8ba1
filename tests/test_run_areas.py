"""`make test-all` goes on where it was, and keeps a verdict of whole areas on the files that were there alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import run_areas

AREAS = ("fire", "clients", "site")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """With three areas, which note that they ran, and fail if `broken` names them."""
    monkeypatch.setattr(run_areas, "ROOT", tmp_path)
    monkeypatch.setattr(run_areas, "ALL", AREAS)
    (tmp_path / ".gitignore").write_text("build\nran\nbroken\n")
    (tmp_path / "ran").write_text("")
    (tmp_path / "broken").write_text("")
    (tmp_path / "code.py").write_text("pass\n")
    note = "import sys; a = sys.argv[1]; open('ran', 'a').write(a + '\\n'); sys.exit(a in open('broken').read())"
    monkeypatch.setattr(run_areas, "command", lambda area, args: [sys.executable, "-c", note, area, *args])
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for args in (["init"], ["add", "--all"], ["commit", "-m", "begin"]):
        subprocess.run([*git, *args], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


@pytest.fixture
def ran(repository):
    """What ran since this was last asked."""

    def since() -> list[str]:
        areas = (repository / "ran").read_text().split()
        (repository / "ran").write_text("")
        return areas

    return since


def test_what_has_passed_runs_again_once_a_file_differs_committed_or_not(repository, ran):
    assert run_areas.main([]) == 0 and ran() == [*AREAS]
    assert run_areas.main([]) == 0 and ran() == []
    (repository / "new.py").write_text("")
    assert run_areas.main([]) == 0 and ran() == [*AREAS]
    (repository / "new.py").unlink()
    (repository / "code.py").write_text("1\n")
    assert run_areas.main([]) == 0 and ran() == [*AREAS]
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    assert run_areas.main([]) == 0 and ran() == []  # the same files, on their way into a commit


def test_what_failed_stops_no_other_and_runs_again(repository, ran, capsys):
    (repository / "broken").write_text("fire")
    assert run_areas.main([]) == 1 and ran() == [*AREAS]
    assert "fire         failed" in capsys.readouterr().out
    (repository / "broken").write_text("")
    assert run_areas.main([]) == 0 and ran() == ["fire"]


def test_an_interrupted_run_goes_on_where_it_was(ran, monkeypatch):
    command = run_areas.command

    def interrupted(area, args):
        if area == "clients":
            raise KeyboardInterrupt
        return command(area, args)

    with monkeypatch.context() as patch:
        patch.setattr(run_areas, "command", interrupted)
        assert run_areas.main([]) == 130 and ran() == ["fire"]
    assert run_areas.main([]) == 0 and ran() == ["clients", "site"]


def test_an_area_that_is_named_runs_whatever_it_has_passed(ran):
    assert run_areas.main([]) == 0 and ran() == [*AREAS]
    assert run_areas.main(["site", "fire"]) == 0 and ran() == ["site", "fire"]
    with pytest.raises(SystemExit):
        run_areas.main(["fires"])
    with pytest.raises(SystemExit):
        run_areas.main(["changed", "fire"])
    assert ran() == []


def test_of_some_of_an_areas_tests_nothing_is_kept(repository, ran, capsys):
    assert run_areas.main(["fire", "--", "-k", "a or b"]) == 0 and ran() == ["fire"]
    assert "as far as -k 'a or b' goes: not kept" in capsys.readouterr().out
    assert not (repository / "build").exists()


def test_nothing_is_kept_of_files_that_were_changed_while_they_ran(repository, ran, monkeypatch):
    changes = [sys.executable, "-c", "open('code.py', 'a').write('1')"]
    monkeypatch.setattr(run_areas, "command", lambda area, args: changes)
    assert run_areas.main(["fire"]) == 0
    assert not (repository / "build").exists()


def test_the_areas_that_look_at_what_differs_run_and_no_others(repository, ran, capsys):
    assert run_areas.main(["changed"]) == 0 and ran() == []
    (repository / "docs").mkdir()
    (repository / "docs" / "new.md").write_text("")
    assert run_areas.main(["changed", "--since=HEAD"]) == 0 and ran() == ["site"]
    assert "site: docs/new.md differs from HEAD" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_areas.main(["changed", "--since=nowhere"])
    assert "nowhere" in capsys.readouterr().err


def test_of_each_area_it_is_kept_which_tree_passed_when_and_how_long_it_took(repository):
    run_areas.main(["fire"])
    record = json.loads((repository / "build" / "areas.json").read_text())
    assert record.keys() == {"fire"} and record["fire"].keys() == {"tree", "seconds", "when"}
    wanted = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=repository, capture_output=True, text=True)
    assert record["fire"]["tree"] == wanted.stdout.strip()
