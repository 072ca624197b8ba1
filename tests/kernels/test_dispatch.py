"""runner.kernels: what is asked for and cannot be is said, and on a CPU nothing is proven or used."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from minivllm.errors import ConfigError
from minivllm.kernels import dispatch
from minivllm.kernels.dispatch import Dispatch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def never(device: torch.device) -> bool:
    raise AssertionError("a proof was run")


def test_on_a_cpu_everything_is_torchs():
    kernels = Dispatch("auto", CPU)
    assert not kernels.uses("draw", never)
    value, reason = kernels.decision
    assert value == "torch" and ("CUDA" in reason or "triton is not installed" in reason)


def test_torch_is_torch_on_any_device():
    kernels = Dispatch("torch", CUDA)
    assert not kernels.uses("draw", never) and kernels.decision == ("torch", "as configured")


def test_what_is_asked_for_and_cannot_be_is_an_error():
    with pytest.raises(ConfigError, match=r"runner.kernels=triton cannot run here: .*(CUDA device|not installed)"):
        Dispatch("triton", CPU)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")
def test_on_a_gpu_each_kernel_is_proven_once_and_refused_by_name():
    kernels, asked = Dispatch("auto", CUDA), []

    def proof(outcome: object):
        def run(device: torch.device) -> bool:
            asked.append(device)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return run

    assert kernels.uses("draw", proof(True)) and kernels.uses("draw", never)
    assert not kernels.uses("lora", proof(False)) and not kernels.uses("lora", never)
    assert not kernels.uses("w4a16 linear", proof(RuntimeError("out of shared memory\nand more")))
    assert asked == [CUDA] * 3
    value, reason = kernels.decision
    assert value == "triton" and reason.startswith("draw: each gave")
    assert "lora in torch (it differs" in reason and "(RuntimeError: out of shared memory)" in reason
    with pytest.raises(AssertionError):
        kernels.uses("a kernel that nobody wrote", never)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")
def test_one_proof_may_be_of_several_kernels_and_its_outcome_has_a_reason():
    names = ("decode attention", "prefill attention")
    verdicts = {
        held: Dispatch("auto", CUDA).verdict(names, lambda device, held=held: held, "the reference")
        for held in (True, False)
    }
    assert verdicts[True] == (True, "gave the answer of the reference on this device")
    assert verdicts[False] == (False, "it differs from the reference on this device")
    assert Dispatch("torch", CUDA).verdict(names, never) == (False, "runner.kernels=torch")
    assert Dispatch("triton", CUDA).verdict(names, never) == (True, "runner.kernels=triton")
    kernels = Dispatch("auto", CUDA)
    assert kernels.verdict(names, lambda device: True)[0] and kernels.uses("prefill attention", never)
    assert kernels.decision == (
        "triton",
        "decode attention, prefill attention: each gave its reference's answer on this device",
    )


def test_what_asks_for_a_kernel_is_said_by_the_table():
    assert {"draw", "lora", "w4a16 linear"} <= dispatch.NAMES
