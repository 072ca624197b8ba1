"""A backend is chosen with a reason, and one that cannot run is refused with what to do."""

from __future__ import annotations

import re

import pytest
import torch
from attention.batches import CPU, spec

from minivllm.attention.cpu import CPUAttention
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.sdpa import SDPAAttention
from minivllm.attention.select import choose
from minivllm.errors import ConfigError
from minivllm.features import ATTENTION
from minivllm.kernels.cpu import build
from minivllm.registry import Registry


class NeedsTensorCores(ReferenceAttention):
    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return f"it needs tensor cores, {device.type} has none"


NO_COMPILER = "no compiler on the PATH"


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(build, "obstacle", lambda: NO_COMPILER)


@pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
def test_auto_on_the_cpu_is_the_compiled_kernels():
    backend, choice = choose("auto", CPU, [spec()], ATTENTION)
    assert backend is CPUAttention
    assert choice.name == "cpu" and "preferred to sdpa, reference" in choice.reason


def test_auto_on_a_gpu_says_which_backends_it_does_not_take_and_why():
    """None that no card has run; that each of them can be named is in test_libraries.py."""
    backend, choice = choose("auto", torch.device("cuda"), [spec()], ATTENTION)
    assert backend is SDPAAttention and choice.name == "sdpa"
    assert "triton, flash, flashinfer, flex only by name: no card has run them yet" in choice.reason


def test_auto_without_a_compiler_is_sdpa_and_says_why(without_compiler):
    backend, choice = choose("auto", CPU, [spec()], ATTENTION)
    assert backend is SDPAAttention
    assert choice.name == "sdpa"
    assert f"cpu off: {NO_COMPILER}" in choice.reason
    assert "reference" in choice.reason
    assert "soft-capped" not in choice.reason


def test_the_reason_says_when_layers_leave_the_fused_kernel(without_compiler):
    _, choice = choose("auto", CPU, [spec(), spec(soft_cap=30.0)], ATTENTION)
    assert "soft-capped" in choice.reason


def test_a_named_backend_is_taken():
    backend, choice = choose("reference", CPU, [spec()], ATTENTION)
    assert backend is ReferenceAttention
    assert choice == ("reference", "asked for")


def test_auto_passes_over_what_cannot_run_and_says_why():
    registry = Registry("runner.attention", {"sdpa": NeedsTensorCores, "reference": ReferenceAttention})
    backend, choice = choose("auto", CPU, [spec()], registry)
    assert backend is ReferenceAttention
    assert "sdpa off: it needs tensor cores" in choice.reason


def test_a_named_backend_that_cannot_run_is_refused_with_the_way_out():
    registry = Registry("runner.attention", {"wgmma": NeedsTensorCores})
    with pytest.raises(ConfigError, match=r"wgmma cannot run here: it needs tensor cores.*attention=auto"):
        choose("wgmma", CPU, [spec()], registry)


def test_a_backend_whose_package_is_missing_is_refused_not_raised():
    registry = Registry("runner.attention", {"flash": "a_package_that_is_missing.flash:Flash"})
    with pytest.raises(ConfigError, match="No module named 'a_package_that_is_missing'"):
        choose("flash", CPU, [spec()], registry)


@pytest.mark.parametrize("name, codes", [("sdpa", "int8"), ("flex", "int8"), ("cpu", "float8_e4m3fn")])
def test_a_backend_that_cannot_read_a_cache_of_codes_is_refused(name, codes):
    with pytest.raises(ConfigError, match=f"cannot read a KV cache in {codes}"):
        choose(name, CPU, [spec()], ATTENTION, getattr(torch, codes))


def test_codes_that_no_faster_backend_reads_are_the_oracles(without_compiler):
    backend, choice = choose("auto", CPU, [spec()], ATTENTION, torch.int8)
    assert backend is ReferenceAttention
    assert re.search(f"the slow oracle; cpu off: {NO_COMPILER}; sdpa off: .*int8", choice.reason)


def test_codes_that_nobody_reads_are_refused_with_the_way_out():
    registry = Registry("runner.attention", {"sdpa": SDPAAttention})
    with pytest.raises(ConfigError, match="sdpa off: it cannot read a KV cache in float8_e4m3fn. Choose kv.dtype=auto"):
        choose("auto", CPU, [spec()], registry, torch.float8_e4m3fn)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="sdpa"):
        choose("sdap", CPU, [spec()], ATTENTION)


@pytest.mark.parametrize("device, registry", [("cpu", Registry("runner.attention", {})), ("meta", ATTENTION)])
def test_no_backend_for_a_device_is_an_error_that_names_it(device, registry):
    with pytest.raises(ConfigError, match=device):
        choose("auto", torch.device(device), [spec()], registry)
