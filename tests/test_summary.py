"""The end of a run says where the minutes went and what was left out; a check sees names that are made of chance."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import summary
from areas import AREAS, CHECK, CHECKS, GATE, belongs
from same_tests import KEY, SameTests, differing


def reported(nodeid: str, duration: float, when: str = "call", outcome: str = "passed"):
    return SimpleNamespace(nodeid=nodeid, duration=duration, when=when, outcome=outcome)


def test_minutes_are_those_of_all_phases_and_tests_are_counted_once():
    of = summary.Summary(SimpleNamespace(getoption=lambda name: GATE))
    for when in ("setup", "call", "teardown"):
        of.pytest_runtest_logreport(reported("tests/kv/test_pool.py::test_it", 60, when))
    of.pytest_runtest_logreport(reported("tests/test_ci.py::test_it[a/b]", 6))
    of.pytest_runtest_logreport(reported("tests/clients/suites/test_openai.py::test_it", 60))
    rows = [line.split() for line in summary.table(of.seconds, of.tests)]
    assert rows == [
        ["3.0", "1", "tests", "tests/kv"],
        ["1.0", "1", "tests", "tests/clients"],
        ["0.1", "1", "tests", "tests"],
        ["4.1", "3", "tests", "all"],
    ]


def test_what_was_run_again_is_named():
    of = summary.Summary(SimpleNamespace(getoption=lambda name: GATE))
    of.pytest_runtest_logreport(reported("tests/serve/test_a.py::test_it", 1, outcome="rerun"))
    of.pytest_runtest_logreport(reported("tests/serve/test_a.py::test_it", 1))
    assert of.again == ["tests/serve/test_a.py::test_it"]


def test_an_area_that_these_files_have_passed_is_not_called_left_out(monkeypatch):
    monkeypatch.setattr(summary, "tree", lambda: "now")
    monkeypatch.setattr(summary, "passed", lambda: {"fire": {"tree": "now"}, "card": {"tree": "before"}})
    passed, _, others = summary.left_out().partition(";")
    assert passed == "left out, but passed by these files: fire"
    assert {"card", "kernels", "sanitize"} <= {*others.split()} and "fire" not in others


def test_a_folder_without_git_has_passed_nothing(monkeypatch):
    def none():
        raise summary.NoGit

    monkeypatch.setattr(summary, "tree", none)
    assert summary.left_out().startswith("left out: kernels ")


def test_a_check_is_a_part_of_the_gate():
    for name in CHECKS:
        nodeid = name if "::" in name else f"{name}::test_it"
        assert belongs(nodeid, CHECK) and belongs(nodeid, GATE) and not any(belongs(nodeid, area) for area in AREAS)
    assert not belongs("tests/kv/test_pool.py::test_it", CHECK)


# ---------------------------------------------------------------------------------------- the same tests


def test_names_that_one_process_found_and_another_did_not_are_told():
    assert differing([["a", "b"], ["a", "b"]]) == []
    assert differing([["a", "b[1]"], ["a", "b[2]"]]) == ["b[1]", "b[2]"]
    assert differing([["a"], ["a", "b"], ["a"]]) == ["b"]


def test_names_that_stand_in_other_places_are_told():
    assert differing([["a", "b", "c"], ["b", "a", "c"]]) == ["a", "b"]


@pytest.mark.parametrize("names, status", [(["a"], 0), (["b"], 1)])
def test_a_difference_makes_the_run_red(names, status):
    compared, session = SameTests(), SimpleNamespace(exitstatus=0)
    for found in (["a"], names):
        compared.pytest_testnodedown(SimpleNamespace(workeroutput={KEY: found}), None)
    compared.pytest_sessionfinish(session)
    assert session.exitstatus == status
