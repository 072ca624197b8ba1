"""The dispatch table names kernels and references that exist, and the report has a row for each."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from minivllm.kernels import report as report_module
from minivllm.kernels.report import Family, kernel_lines, report
from minivllm.kernels.table import KERNELS


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.family} {k.name}")
def test_a_kernel_and_its_reference_exist(kernel):
    for name in (kernel.source, kernel.reference):
        module, _, attribute = name.partition(":")
        if kernel.family == "triton" and name == kernel.source and find_spec("triton") is None:
            pytest.skip("triton is not installed: minivllm[gpu]")
        assert callable(getattr(import_module(module), attribute)), name


def test_names_are_unique():
    assert len({(k.family, k.name) for k in KERNELS}) == len(KERNELS)


def test_the_report_says_which_kernels_can_run_and_who_asks_for_them():
    families = {family.name for family in report()}
    assert {k.family for k in KERNELS} <= families
    lines = kernel_lines([Family("cpu", True, ""), Family("triton", False, "no device")])
    assert len(lines) == len(KERNELS) + 1
    assert any(line.startswith("decode attention") and " off " in line and "runner.attention" in line for line in lines)
    assert any(line.startswith("packed linear") and " on " in line for line in lines)


def test_the_report_names_the_cards_that_were_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(report_module, "TUNED", tmp_path)
    assert "no card yet" in report_module.tuned_line()
    (tmp_path / "nvidia-h200.json").write_text("{}")
    assert "nvidia-h200" in report_module.tuned_line()
