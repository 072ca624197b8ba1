"""deploy/requirements.txt, which the images install: whole, in pyproject.toml's ranges, each file with its digest."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "deploy" / "requirements.txt").read_text()
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def pins() -> dict[str, tuple[Requirement, list[str]]]:
    """{name: what is asked for, digests}"""
    found = {}
    lines = [line for line in LOCK.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    for line in filter(str.strip, lines):
        requirement, *digests = re.split(r"\s+--hash=", line.strip())
        pin = Requirement(requirement)
        assert name(pin) not in found
        found[name(pin)] = pin, digests
    return found


def name(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def version(pin: Requirement) -> str:
    (only,) = pin.specifier
    assert only.operator == "=="
    return only.version


def image(machine: str) -> dict[str, str]:
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim@\S+ AS base$", DOCKERFILE, re.MULTILINE)
    where = {"platform_system": "Linux", "sys_platform": "linux", "os_name": "posix", "platform_machine": machine}
    return {**where, "python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython"}


def extras() -> set[str]:
    named = re.findall(r'"\.\[([\w,]+)\]"', DOCKERFILE)
    return {extra for group in named for extra in group.split(",")}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_everything_that_an_image_needs_is_pinned_in_its_range(machine):
    found, there = pins(), image(machine)
    asked = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]]
    asked += [one for extra in extras() for one in EXTRAS[extra]]
    wanted = [r for r in map(Requirement, asked) if r.marker is None or r.marker.evaluate(there)]
    assert extras() == {"gpu", "structured"} and len(wanted) > 20
    for requirement in wanted:
        pin = found[name(requirement)][0]
        assert pin.marker is None or pin.marker.evaluate(there), pin
        assert requirement.specifier.contains(version(pin)), f"{requirement}: make lock"


def test_every_pin_has_digests_and_names_no_registry():
    for pin, digests in pins().values():
        assert digests and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests), pin
    assert "://" not in LOCK and "index" not in LOCK and "find-links" not in LOCK


def test_the_torch_of_the_images_is_one_that_this_project_is_tested_with():
    tested = re.search(r"^TORCH \?= torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert version(pins()["torch"][0]) == tested


def test_the_versions_without_digests_are_what_the_dockerfile_makes_of_them():
    """For builds of torch that the list cannot know: `sed` in the stage `cpu`."""
    delete, cut = re.search(r"sed '/(.*)/d; s/(.*)//' deploy/requirements.txt", DOCKERFILE).groups()
    lines = [re.sub(cut, "", line) for line in LOCK.splitlines() if delete not in line]
    versions = [str(Requirement(line)) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    assert versions == [str(pin) for pin, _ in pins().values()]
