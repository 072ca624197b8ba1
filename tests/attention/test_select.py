"""A backend is chosen with a reason, and one that cannot run is refused with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from attention.batches import CPU, spec

from minivllm.attention.cpu import CPUAttention
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.sdpa import SDPAAttention
from minivllm.attention.select import PREFERENCES, choose
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
    monkeypatch.setattr(build, "unsupported_reason", lambda: NO_COMPILER)


@pytest.mark.skipif(build.unsupported_reason() is not None, reason=str(build.unsupported_reason()))
def test_auto_on_the_cpu_is_the_compiled_kernels():
    backend, choice = choose("auto", CPU, [spec()], ATTENTION)
    assert backend is CPUAttention
    assert choice.name == "cpu" and "preferred to sdpa, reference" in choice.reason


class Kernels(ReferenceAttention):
    """Stands for Triton's: it has to prove itself."""


class Libraryless(Kernels):
    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return "triton is not installed"


CUDA = torch.device("cuda")


def on_a_gpu(kernels: type, proves: Callable = lambda kind: (True, "as told")):
    libraries = dict.fromkeys(("flash", "flashinfer", "flex"), ReferenceAttention)
    backends = {"reference": ReferenceAttention, "sdpa": SDPAAttention, "triton": kernels, **libraries}
    return choose("auto", CUDA, [spec()], Registry("runner.attention", backends), proves=proves)


def test_auto_on_a_gpu_takes_the_kernels_that_prove_themselves_and_says_what_it_leaves():
    asked = []
    backend, choice = on_a_gpu(Kernels, lambda kind: (asked.append(kind) or True, "gave the reference's answer"))
    assert backend is Kernels and choice.name == "triton" and asked == [Kernels]
    assert "gave the reference's answer; preferred to sdpa, reference" in choice.reason
    assert "flash, flashinfer, flex only by name: no card has run them yet" in choice.reason


def test_auto_on_a_gpu_passes_over_kernels_that_prove_nothing():
    backend, choice = on_a_gpu(Kernels, lambda kind: (False, "it differs from the reference on this device"))
    assert backend is SDPAAttention and choice.name == "sdpa"
    assert "preferred to reference" in choice.reason
    assert "triton off: it differs from the reference on this device" in choice.reason
    assert choose("auto", CUDA, [spec()], ATTENTION)[1].name == "sdpa"  # nobody is there to prove anything


def never(kind: type) -> tuple[bool, str]:
    raise AssertionError("a proof was asked for")


def test_only_who_could_run_is_asked_for_a_proof():
    backend, choice = on_a_gpu(Libraryless, never)
    assert backend is SDPAAttention and "triton off: triton is not installed" in choice.reason
    registry = Registry("runner.attention", {"triton": Kernels, "sdpa": SDPAAttention})
    assert choose("triton", CUDA, [spec()], registry, proves=never)[1] == ("triton", "asked for")
    assert choose("auto", CPU, [spec()], registry, proves=never)[0] is SDPAAttention
    assert choose("auto", CUDA, [spec()], Registry("runner.attention", {"sdpa": SDPAAttention}), proves=never)


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


class AddsNothing(ReferenceAttention):
    adds_slopes = False


def test_a_named_backend_that_adds_no_slopes_is_refused_for_a_model_that_has_them():
    registry = Registry("runner.attention", {"plain": AddsNothing, "reference": ReferenceAttention})
    layers = [spec(slopes=(0.5,) * 6)]
    assert choose("plain", CPU, [spec()], registry)[0] is AddsNothing
    assert choose("reference", CPU, layers, registry)[0] is ReferenceAttention
    with pytest.raises(ConfigError, match=r"runner.attention=plain cannot run this model: .*ALiBi"):
        choose("plain", CPU, layers, registry)


@pytest.mark.parametrize("device", PREFERENCES)
def test_every_backend_that_is_chosen_unasked_adds_slopes(device):
    assert all(ATTENTION.get(name).adds_slopes for name, _ in PREFERENCES[device])


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


@pytest.mark.parametrize("name, kept_in", [("sdpa", "int8"), ("flex", "float16"), ("flex", "float8_e4m3fn")])
def test_a_backend_that_cannot_keep_fewer_bits_is_refused(name, kept_in):
    with pytest.raises(ConfigError, match=f"cannot keep K and V in {kept_in}"):
        choose(name, CPU, [spec()], ATTENTION, getattr(torch, kept_in))


def test_codes_that_no_faster_backend_reads_are_the_oracles(without_compiler):
    backend, choice = choose("auto", CPU, [spec()], ATTENTION, torch.int8)
    assert backend is ReferenceAttention
    assert re.search(f"the slow oracle; cpu off: {NO_COMPILER}; sdpa off: .*int8", choice.reason)


def test_codes_that_nobody_reads_are_refused_with_the_way_out():
    registry = Registry("runner.attention", {"sdpa": SDPAAttention})
    with pytest.raises(ConfigError, match="sdpa off: it cannot keep K and V in float8_e4m3fn. Choose kv.dtype=auto"):
        choose("auto", CPU, [spec()], registry, torch.float8_e4m3fn)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="sdpa"):
        choose("sdap", CPU, [spec()], ATTENTION)


@pytest.mark.parametrize("device, registry", [("cpu", Registry("runner.attention", {})), ("meta", ATTENTION)])
def test_no_backend_for_a_device_is_an_error_that_names_it(device, registry):
    with pytest.raises(ConfigError, match=device):
        choose("auto", torch.device(device), [spec()], registry)
