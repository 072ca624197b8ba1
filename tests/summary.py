"""What a run of the tests says at its end, beside what failed: where the minutes went, what was run again, and which
tests it left out."""

from __future__ import annotations

from collections import Counter

from areas import ALL, CHECK, GATE
from run_areas import ROOT, NoGit, passed, tree


class Summary:
    def __init__(self, config) -> None:
        self.area = config.getoption("--area")
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.again: list[str] = []

    def pytest_runtest_logreport(self, report):
        where = folder(report.nodeid)
        self.seconds[where] += report.duration
        self.tests[where] += report.when == "call"
        if report.outcome == "rerun":
            self.again.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter):
        if self.again:
            terminalreporter.section("run again", yellow=True)
            known = (ROOT / "tests" / "KNOWN.md").read_text()
            terminalreporter.write("".join(f"{line}\n" for line in told_again(self.again, known)))
        if len(self.seconds) > 1 and self.area != CHECK:
            terminalreporter.section("minutes by folder")
            terminalreporter.write("".join(f"{line}\n" for line in table(self.seconds, self.tests)))
        if self.area == GATE:
            terminalreporter.write_line(left_out())


def folder(nodeid: str) -> str:
    """tests/kv/test_pool.py::test_it: tests/kv."""
    return "/".join(nodeid.partition("::")[0].split("/")[:-1][:2])


def told_again(nodeids: list[str], known: str) -> list[str]:
    names = {nodeid: nodeid.partition("[")[0] for nodeid in nodeids}  # once each, though two reruns are two reports
    return [nodeid + ": wants a row in tests/KNOWN.md" * (f"`{name}" not in known) for nodeid, name in names.items()]


def table(seconds: Counter[str], tests: Counter[str]) -> list[str]:
    """Minutes of all processes together: on two, half as long."""
    rows = [*seconds.most_common(), ("all", seconds.total())]
    counts = tests | Counter({"all": tests.total()})
    return [f"{spent / 60:6.1f}  {counts[where]:6} tests  {where}" for where, spent in rows]


def left_out() -> str:
    """Which areas these files have passed, and how to run the others."""
    try:
        verdicts, now = passed(), tree()
    except NoGit:
        verdicts, now = {}, ""
    have = [area for area in ALL if area in verdicts and verdicts[area]["tree"] == now]
    others = [area for area in ALL if area not in have]
    said = f"left out, but passed by these files: {' '.join(have)}; " if have else "left out: "
    return said + (f"{' '.join(others)} (make test-all)" if others else "nothing else")
