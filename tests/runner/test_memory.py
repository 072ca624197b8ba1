"""What the KV pool costs before it is used."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import psutil
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.runner.memory import zeros

SIZE = 64 << 20


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's own pages that are in memory.

    Two bits of a page in /proc/self/pagemap (Linux: Documentation/admin-guide/mm/pagemap.rst) say that it is present
    or swapped out.
    """
    page = mmap.PAGESIZE
    first, last = tensor.data_ptr() // page, (tensor.data_ptr() + tensor.nbytes) // page
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first)), np.uint64)
    return page * int((entries >> np.uint64(62) > 0).sum())


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system's own zeros may be resident at once")


@LINUX
def test_the_pool_takes_memory_only_as_it_is_used():
    """The process is weighed: the pool may lie in memory that it has already, of something freed."""
    before = psutil.Process().memory_info().rss
    pool = zeros((SIZE // 4,), torch.float32, torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < SIZE // 2
    assert not pool.any()


@LINUX
def test_a_touched_pool_is_in_memory_from_the_start():
    pool = zeros((SIZE // 4,), torch.float32, torch.device("cpu"), prefault=True)
    assert resident(pool) > 0.99 * SIZE
    assert not pool.any()


@pytest.mark.parametrize("prefault", [False, True])
def test_a_pool_begins_with_a_page(prefault):
    """So that no vector of K or V lies in two lines of the cache."""
    pools = [zeros((3, size), torch.bfloat16, torch.device("cpu"), prefault) for size in (5, 64, 1 << 20)]
    assert [pool.data_ptr() % 4096 for pool in pools] == [0, 0, 0]
    assert [tuple(pool.shape) for pool in pools] == [(3, 5), (3, 64), (3, 1 << 20)] and not any(map(torch.any, pools))


def test_an_engine_with_a_touched_pool_gives_the_same_tokens():
    def run(prefault: bool) -> list[int]:
        overrides = {"model.path": "dummy:tiny", "kv.memory": "32MiB", "kv.prefault": prefault}
        with LLM(overrides=overrides) as llm:
            return llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids

    assert run(True) == run(False)
