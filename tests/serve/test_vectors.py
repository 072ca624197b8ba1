"""How vectors are written: the numbers are torch's, for each value of a type and what lies between."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from minivllm.errors import BadRequest
from minivllm.serve.vectors import MOST_METADATA, WRITERS, Wire, metadata

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def numbers(dtype):
    """All values of eight bits, the middles between them and their neighbours, and many others of all sizes."""
    own = torch.arange(256, dtype=torch.uint8).view(TORCH[dtype]).float() if "fp8" in dtype else torch.zeros(1)
    own = own[own.isfinite()].sort().values
    middles = (own[1:] + own[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    sizes = torch.logspace(-12, 5.5, 20_000)
    return torch.cat([own, middles, *near, drawn, sizes, -sizes, torch.tensor([0.0, -0.0])]).numpy()


@pytest.mark.parametrize("dtype", WRITERS)
def test_numbers_are_rounded_as_torch_does(dtype):
    given = numbers(dtype)
    wanted = torch.from_numpy(given).to(TORCH[dtype])
    found = torch.frombuffer(bytearray(Wire(dtype).bytes_of(given)), dtype=TORCH[dtype])
    same = found.view(BITS[wanted.itemsize]) == wanted.view(BITS[wanted.itemsize])
    assert same.all(), given[~same.numpy()][:9]


@pytest.mark.parametrize("dtype", WRITERS)
def test_big_endian_numbers_have_their_bytes_turned_round(dtype):
    given = np.array([0.1, -3.0, 0.7], np.float32)
    size = TORCH[dtype].itemsize
    little, big = (np.frombuffer(Wire(dtype, e).bytes_of(given), np.uint8).reshape(-1, size) for e in ("little", "big"))
    assert (little == big[:, ::-1]).all()
    assert Wire(dtype, "native").bytes_of(given) == Wire(dtype, "little").bytes_of(given)


def test_a_header_that_clients_refuse_is_not_sent():
    assert json.loads(metadata({"data": [1]})) == {"data": [1]}
    with pytest.raises(BadRequest, match="bytes_only"):
        metadata({"data": "x" * MOST_METADATA})
