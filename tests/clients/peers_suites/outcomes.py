"""A pytest plugin: what came of each test, a line of JSON each in the file PEERS_OUTCOMES, as soon as it is known.

A line says whether the test had a server started, itself or by a fixture: one that had not is of the peer's own
classes, and would pass without minivllm.
"""

import json
import os

import pytest

num_started = 0
num_before = 0  # the test that runs
starters: set[tuple[str, str]] = set()  # fixtures that started a server: where they apply, and their names


def count_starts(owner, method):
    """Counts each call of what starts a server."""
    original = getattr(owner, method)

    def counted(*args, **named):
        global num_started
        num_started += 1
        return original(*args, **named)

    setattr(owner, method, counted)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    global num_before
    num_before = num_started


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    before = num_started
    try:
        return (yield)
    finally:
        if num_started > before:
            starters.add((fixturedef.baseid, fixturedef.argname))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    report.asks = num_started > num_before or any(
        (found.baseid, found.argname) in starters
        for name in item.fixturenames
        for found in item._fixtureinfo.name2fixturedefs.get(name, ())
    )
    return report


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        tell(report.nodeid, report.outcome if report.when == "call" or report.skipped else "failed", report)


def pytest_collectreport(report):
    if report.failed:
        tell(report.nodeid, "failed", report)


def tell(test, outcome, report):
    """A file that cannot be read may have had any test."""
    told = {"test": test, "outcome": outcome, "why": "" if outcome == "passed" else why(report)}
    with open(os.environ["PEERS_OUTCOMES"], "a") as file:
        file.write(json.dumps(told | {"asks": getattr(report, "asks", True)}) + "\n")


def why(report):
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip()[:300]
