"""A backend is chosen with a reason, and one that cannot run is refused with what to do."""

from __future__ import annotations

import pytest
import torch
from attention.batches import CPU, spec

from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.sdpa import SDPAAttention
from minivllm.attention.select import choose
from minivllm.errors import ConfigError
from minivllm.features import ATTENTION
from minivllm.registry import Registry


class NeedsTensorCores(ReferenceAttention):
    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return f"it needs tensor cores, {device.type} has none"


def test_auto_on_the_cpu_is_sdpa_with_a_reason():
    backend, choice = choose("auto", CPU, [spec()], ATTENTION)
    assert backend is SDPAAttention
    assert choice.name == "sdpa"
    assert "reference" in choice.reason
    assert "soft-capped" not in choice.reason


def test_the_reason_says_when_layers_leave_the_fused_kernel():
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


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="sdpa"):
        choose("sdap", CPU, [spec()], ATTENTION)


@pytest.mark.parametrize("device, registry", [("cpu", Registry("runner.attention", {})), ("meta", ATTENTION)])
def test_no_backend_for_a_device_is_an_error_that_names_it(device, registry):
    with pytest.raises(ConfigError, match=device):
        choose("auto", torch.device(device), [spec()], registry)
