"""What `make test` leaves out, an area has; and areas name what exists."""

from __future__ import annotations

import re
from pathlib import Path

from areas import AREAS, GATE, area_of, may_hold

ROOT = Path(__file__).parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def test_every_name_of_an_area_begins_a_test_that_is_there():
    for name in (name for names in AREAS.values() for name in names):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists()
        assert not test or re.search(rf"^(async )?def {test}", (ROOT / path).read_text(), re.MULTILINE)


def test_a_file_is_read_by_the_area_that_its_tests_are_in():
    for file in FILES:
        nodeid = f"{file}::test_something"
        assert may_hold(file, area_of(nodeid)) and may_hold(file, area_of(nodeid, alone=True))
        for folder in Path(file).parents[:-1]:
            assert may_hold(f"{folder.as_posix()}/", area_of(nodeid))


def test_only_what_is_about_time_changes_its_area():
    assert area_of("tests/fire/test_kill.py::test_it") == "fire"
    assert area_of("tests/fire/test_kill.py::test_it", alone=True) == "timing"
    assert area_of("tests/kv/test_pool.py::test_it") == GATE


def test_the_makefile_runs_every_area():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^AREA \?= (.*)$", makefile, re.MULTILINE)[1].split() == [*AREAS, "sanitize"]
