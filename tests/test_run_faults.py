"""The ten faults (run_faults.py, `make faults`) still fit the code, and CONTRIBUTING.md says who notices them."""

from __future__ import annotations

import sys
from pathlib import Path

import areas
import pytest
import run_faults
from run_faults import FAULTS, Fault

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_fits_its_file_and_the_gate_has_the_test_that_notices_it(fault):
    assert (ROOT / fault.file).read_text().count(fault.right) == 1 and fault.right != fault.wrong
    file, _, name = fault.tests.partition("::")
    assert f"def {name}" in (ROOT / file).read_text()
    assert areas.area_of(fault.tests) == areas.GATE


def test_the_table_is_on_the_page():
    page = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    first = page.index(run_faults.rows()[0])
    assert page[first : first + len(FAULTS)] == run_faults.rows() and len(FAULTS) == 10
    assert not page[first + len(FAULTS)].startswith("|")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy with one file and one test."""
    (tmp_path / "code.py").write_text("ONE = 1\n")
    (tmp_path / "test_code.py").write_text("import code_of_it\n")
    (tmp_path / "test_code.py").write_text(
        "from pathlib import Path\n\n\ndef test_it():\n    assert eval(Path('code.py').read_text()[6:]) > 0\n"
    )
    monkeypatch.setattr(run_faults, "WORK", tmp_path)
    return tmp_path


@pytest.mark.parametrize("wrong, is_red", [("ONE = 0", True), ("ONE = 2", False)])
def test_a_fault_is_red_if_its_tests_fail_and_is_taken_out_again(tree, wrong, is_red):
    assert run_faults.turns_red(Fault("", "code.py", "ONE = 1", wrong, "test_code.py")) == is_red
    assert (tree / "code.py").read_text() == "ONE = 1\n"


def test_tests_that_fail_without_it_say_nothing_of_a_fault(tree):
    (tree / "code.py").write_text("ONE = -1\n")
    with pytest.raises(SystemExit, match=r"test_code\.py fails without a fault"):
        run_faults.turns_red(Fault("", "code.py", "ONE = -1", "ONE = 0", "test_code.py"))


def test_an_unknown_fault_is_refused(capsys):
    with pytest.raises(SystemExit):
        run_faults.main(["dead-lock"])
    assert "no fault dead-lock: there are freed-twice" in capsys.readouterr().err


def test_it_is_what_make_runs():
    makefile = (ROOT / "Makefile").read_text()
    assert (
        "\nfaults: " in makefile and "tests/run_faults.py" in makefile and sys.modules[Fault.__module__] is run_faults
    )
