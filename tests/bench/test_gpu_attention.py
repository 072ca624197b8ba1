"""What bench/gpu/attend.py asks of each library is attention: stand-ins with their signatures give float64's answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from attention import libraries

from minivllm.attention import flash, flashinfer
from minivllm.attention.base import AttentionSpec

pytest.importorskip("triton", reason="triton is not installed: minivllm[gpu]")
GPU = Path(__file__).parent.parent.parent / "bench" / "gpu"


@pytest.fixture(scope="module")
def attend():
    before, known = sys.path[:], set(sys.modules)
    sys.path[:0] = [str(GPU), str(GPU.parent)]
    import attend

    yield attend
    sys.path[:] = before
    for name in set(sys.modules) - known:  # short names that other tests' folders have, too
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(GPU)):
            del sys.modules[name]


@pytest.fixture(params=[True, False], ids=["decodes", "prefills"])
def problem(request, attend):
    from case import Setting

    setting = Setting(torch.device("cpu"), torch.float16, True)
    return attend.Problem(setting, AttentionSpec(4, 2, 64, 0.125), 3, 256, request.param)


def assert_right(problem, way) -> None:
    from card import error_of

    assert error_of(way(), problem.oracle) <= 12 * problem.setting.unit


@pytest.mark.parametrize("library", ["FlashAttention2", "FlashAttention3"])
def test_flash_attention(attend, problem, library):
    stand_in = {"FlashAttention2": libraries.FlashAttn2, "FlashAttention3": libraries.FlashAttn3}[library]
    assert_right(problem, attend.with_library(getattr(flash, library)(stand_in), problem))


def test_flashinfer(attend, problem, monkeypatch):
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1024)
    assert_right(problem, attend.flashinfer(problem, libraries.FLASHINFER))


def test_a_library_that_is_missing_is_a_note_with_the_extra(attend, problem):
    if torch.cuda.is_available():
        pytest.skip("here it may be installed")
    for name, extra in (("flash 3", "minivllm[flash]"), ("flash 2", "minivllm[flash]"), ("vllm triton", "vllm")):
        assert extra in attend._row(attend.WAYS[name], problem, None)["note"]


def test_the_cases_are_those_of_the_target_table(attend):
    """Decodes at batch 1, 32 and 256, some over 256 MB of K and V; prefills of 2k to 16k."""
    from targets import LARGE

    assert {count for count, _ in attend.DECODES} == {1, 32, 256}
    for heads, kv_heads, head_size in attend.MODELS.values():
        sizes = [2 * count * length * kv_heads * head_size * 2 for count, length in attend.DECODES]
        assert sum(size >= LARGE for size in sizes) >= 3 and heads % kv_heads == 0
    assert (min(attend.PREFILLS), max(attend.PREFILLS)) == (2048, 16_384)
