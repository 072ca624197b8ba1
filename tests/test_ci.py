"""What .github/workflows and CHANGELOG.md name exists: neither is run here, so neither may go stale."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path

import areas
import pytest
import run_mutants
import yaml

import minivllm

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
NIGHTLY = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
WORKFLOW = yaml.safe_load(TEXT)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def commands(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_every_python_that_the_package_claims_runs_what_a_newcomer_types():
    test = WORKFLOW["jobs"]["test"]
    claimed = [c.rpartition(" ")[2] for c in PYPROJECT["classifiers"] if c.startswith("Programming Language")]
    assert test["strategy"]["matrix"]["python"] == claimed and test["timeout-minutes"] <= 90
    assert commands("test") == [".ci/run"]
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    targets = re.findall(r"^exec make ([a-z-]+)$", script.read_text(), re.MULTILINE)
    assert targets and all(f"\n{target}:" in MAKEFILE for target in targets)


def test_the_python_that_is_asked_for_is_the_one_that_the_makefile_takes():
    (step,) = [step for step in WORKFLOW["jobs"]["test"]["steps"] if "run" in step]
    assert list(step["env"]) == ["PYTHON"] and re.search(r"^PYTHON \?= ", MAKEFILE, re.MULTILINE)


def test_the_lint_job_is_the_lint_target_with_the_same_ruff():
    install, *checks = map(shlex.split, commands("lint"))
    target = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    made = [shlex.split(line.replace("$(PY)", "python")) for line in target.splitlines()]
    assert all(check in made for check in checks) and len(checks) == 2
    assert install[:4] == ["python", "-m", "pip", "install"] and len(install) == 5
    assert install[4] in PYPROJECT["optional-dependencies"]["dev"]


@pytest.mark.parametrize("text, when", [(TEXT, {"push", "pull_request"}), (NIGHTLY, {"schedule", "workflow_dispatch"})])
def test_it_needs_no_secret_and_may_only_read(text, when):
    workflow = yaml.safe_load(text)
    assert "secrets" not in text and workflow["permissions"] == {"contents": "read"}
    assert workflow[True].keys() == when  # YAML 1.1 reads the key `on` as true
    used = {step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step}
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used)


def test_every_night_each_area_is_run_by_a_job_of_its_own():
    job = yaml.safe_load(NIGHTLY)["jobs"]["area"]
    assert job["strategy"] == {"fail-fast": False, "matrix": {"area": [*areas.ALL]}}
    assert job["timeout-minutes"] <= 60
    assert job["steps"][-1]["run"] == "make test-all AREA=${{ matrix.area }}" and "\ntest-all:" in MAKEFILE


def test_every_night_each_part_is_asked_whether_its_tests_notice_a_change():
    job = yaml.safe_load(NIGHTLY)["jobs"]["mutants"]
    assert job["strategy"] == {"fail-fast": False, "matrix": {"part": [*run_mutants.PARTS]}}
    assert job["steps"][-1]["run"] == "make mutants PART=${{ matrix.part }}" and "\nmutants:" in MAKEFILE


def test_every_night_the_gate_runs_in_an_order_of_its_own():
    job = yaml.safe_load(NIGHTLY)["jobs"]["orders"]
    assert job["steps"][-1]["run"] == "make orders SEEDS=${{ github.run_number }}" and "\norders:" in MAKEFILE


def test_the_changelog_has_this_version_and_what_comes_next():
    headings = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and headings[1] == minivllm.__version__
    assert len(headings) == len(set(headings))
