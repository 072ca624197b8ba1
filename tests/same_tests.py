"""Do two processes find the same tests? If not, pytest-xdist gives up before the first: a name was made of the order
of a set, of an address or of a time. `make check` looks at all of the gate's, without running them."""

from __future__ import annotations

import pytest

KEY = "same_tests"


def note(config, items) -> None:
    """In a worker: what it found, for the process that began it."""
    config.workeroutput[KEY] = [item.nodeid for item in items]


class SameTests:
    """In that process: what the workers found, compared."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self.wrong: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.found.append(getattr(node, "workeroutput", {}).get(KEY, []))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self.wrong = differing(self.found)
        if self.wrong and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.wrong:
            terminalreporter.section("tests that two processes name differently", red=True)
            terminalreporter.write("".join(f"{name}\n" for name in self.wrong))
        elif len(self.found) > 1:
            terminalreporter.write_line(f"{len(self.found)} processes found the same {len(self.found[0])} tests")


def differing(found: list[list[str]]) -> list[str]:
    """What some found and others did not; or, if all found the same, what stands in other places."""
    if all(names == found[0] for names in found):
        return []
    apart = set().union(*found) - set(found[0]).intersection(*found)
    moved = (name for names in zip(*found, strict=False) for name in names if len(set(names)) > 1)
    return sorted(apart or set(moved))
