"""What a figure was measured on."""

from __future__ import annotations

import pytest

from minivllm import machine


@pytest.mark.parametrize(
    "cpuinfo, name, unit",
    [
        ("model name\t: A CPU\nflags\t\t: avx512f avx2\n\nmodel name\t: B\nflags\t\t: amx_tile\n", "A CPU", "AVX-512"),
        ("model name\t: A CPU\nflags\t\t: sse2 avx2 avx2x\n", "A CPU", "AVX2"),
        ("model name\t: A CPU\nflags\t\t: sse2 avx2 avx_vnni\n", "A CPU", "AVX-VNNI"),
        ("Features\t: fp asimd asimddp i8mm\n", None, "i8mm"),
        ("model name\t: An old CPU\nflags\t\t: sse2\n", "An old CPU", None),
        (None, None, None),  # not Linux
    ],
)  # fmt: skip
def test_a_machine_is_named_by_its_cpu_and_what_that_multiplies_with(tmp_path, monkeypatch, cpuinfo, name, unit):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    if cpuinfo is not None:
        machine.CPUINFO.write_text(cpuinfo)
    described = machine.describe()
    assert described.get("unit") == unit
    assert described["cpu"] == name if name is not None else described["cpu"]


def test_the_maker_is_what_an_x86_cpu_says(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_maker() == ""
    machine.CPUINFO.write_text("vendor_id\t: GenuineIntel\nmodel name\t: A CPU\n\nvendor_id\t: Other\n")
    assert machine.cpu_maker() == "GenuineIntel"


def test_a_full_disk_is_found_in_what_a_compiler_says():
    said = "In file included from a.h:\nas: BFD: write error: No space left on device\na.cpp:3: error: no such vector"
    assert machine.full_disk(said) == "as: BFD: write error: No space left on device"
    assert machine.full_disk("a.cpp:3: error: no such vector") is None
