"""What the KV pool costs before it is used."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.runner.memory import zeros

SIZE = 64 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system's own zeros may be resident at once")
@pytest.mark.parametrize("prefault", [False, True])
def test_the_pool_takes_memory_only_as_it_is_used_unless_it_is_touched_at_start(prefault):
    before = resident()
    pool = zeros((SIZE // 4,), torch.float32, torch.device("cpu"), prefault)
    grown = resident() - before
    assert (grown > SIZE // 2) is prefault, grown
    assert not pool.any()


def test_an_engine_with_a_touched_pool_gives_the_same_tokens():
    def run(prefault: bool) -> list[int]:
        overrides = {"model.path": "dummy:tiny", "kv.memory": "32MiB", "kv.prefault": prefault}
        with LLM(overrides=overrides) as llm:
            return llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids

    assert run(True) == run(False)
