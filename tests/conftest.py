"""--matrix FILE: write which configurations the conformance tests ran, and how they ended (`make matrix`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every CI run, so that a red one is its change's fault; new ones wherever a person runs the tests.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

OUTCOMES = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--matrix", metavar="FILE", type=Path, help="write the conformance tests' outcomes as JSON")


@pytest.fixture
def apart(monkeypatch):
    """A device of which nothing can be read: whatever waits for it fails, and so does what is mixed with the host's."""
    import torch

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is no GPU to pin for
    return torch.device("meta")


def pytest_configure(config):
    config.stash[OUTCOMES] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    config = getattr(item, "callspec", None) and item.callspec.params.get("config")
    if call.when == "call" and "conformance" in item.path.parts and isinstance(config, dict):
        options = {f.name: config.get(f.field, f.default) for f in item.module.AXES}
        run = {"test": item.name.partition("[")[0], "options": options, "passed": report.passed}
        item.config.stash[OUTCOMES].append(run)
    return report


def pytest_sessionfinish(session):
    path = session.config.getoption("--matrix")
    if path is not None:
        runs = [json.dumps(run) for run in session.config.stash[OUTCOMES]]
        path.write_text('{"schema": "minivllm.matrix/1", "runs": [\n' + ",\n".join(runs) + "\n]}\n")
