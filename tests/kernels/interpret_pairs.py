"""Libraries that need a GPU and the Triton kernels share a cache: pairs of both, with stand-ins for the libraries and
the kernels in the interpreter. Run by test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from attention import libraries
from attention.batches import Case, spec
from attention.test_backends import assert_right

from minivllm.attention import flashinfer
from minivllm.attention.composite import pair
from minivllm.attention.flash import FlashAttention3, FlashBackend
from minivllm.attention.flashinfer import FlashInferBackend
from minivllm.attention.triton import TritonAttention
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.tiles import Tile

assert INTERPRETED
REQUESTS = [(33, 1), (0, 7), (16, 1), (5, 3)]  # (computed earlier, new)


class Triton(TritonAttention):
    def __init__(self, *args):
        super().__init__(*args, tiles=(Tile(16, 16, 4), Tile(32, 16, 4)))


class Flash(FlashBackend):
    def __init__(self, *args):
        super().__init__(*args, library=FlashAttention3(libraries.FlashAttn3))


class FlashInfer(FlashInferBackend):
    def __init__(self, *args):
        super().__init__(*args, library=libraries.FLASHINFER)


@pytest.mark.parametrize("other", [Flash, FlashInfer])
@pytest.mark.parametrize("first", [True, False])
def test_a_library_and_the_kernels_share_a_cache(other, first, monkeypatch):
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1024)
    kinds = (other, Triton) if first else (Triton, other)
    assert_right(pair(*kinds), Case(spec(4, 2, 64, window=30), REQUESTS, dtype=torch.float16, padding=2))
