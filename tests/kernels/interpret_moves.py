"""Copies on write and swaps by the kernel: the tokens of an engine that moves blocks in torch. Run by
test_interpreter.py."""

from __future__ import annotations

import random

import pytest
import torch

from minivllm import LLM, BeamSearchParams, SamplingParams
from minivllm.kernels.dispatch import Dispatch
from minivllm.kernels.triton import elementwise
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.plan import StepPlan
from minivllm.runner.block_copy import KernelMove, TorchMove, choose_move
from minivllm.runner.block_moves import BlockMoves

assert INTERPRETED
CPU = torch.device("cpu")
SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.block_size": 8, "executor.num_threads": 1}
SMALL |= {"runner.attention": "reference", "runner.forward": "eager", "debug.check": True, "kv.num_blocks": 60}


@pytest.fixture
def launches(monkeypatch) -> list[list[list[int]]]:
    """The pairs of each launch."""
    seen, inner = [], elementwise.BlockCopier.__call__

    def call(copier, pairs):
        seen.append(pairs.tolist())
        inner(copier, pairs)

    monkeypatch.setattr(elementwise.BlockCopier, "__call__", call)
    return seen


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(200) for _ in range(n)] for n in (5, 21, 9)]


def moved_by(llm: LLM) -> str:
    (decision,) = (d for d in llm.decisions if d.field == "runner.kernels")
    return "kernel" if "block copy" in decision.reason.partition(": as configured")[0] else decision.reason


@pytest.mark.parametrize("kv", ["auto", "int8", "float8_e4m3fn"])
def test_swaps(kv, launches):
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True) for i in range(3)]
    found = {}
    for kernels in ("torch", "triton"):
        options = {"kv.preemption": "swap", "debug.preempt_every": 2, "kv.dtype": kv, "runner.kernels": kernels}
        with LLM(overrides=SMALL | options) as llm:
            found[kernels] = [o.outputs[0].token_ids for o in llm.generate(prompts(), params, use_tqdm=False)]
            assert moved_by(llm) == ("kernel" if kernels == "triton" else "as configured")
        assert bool(launches) == (kernels == "triton")
    assert found["triton"] == found["torch"]
    assert len(launches) >= 4


def test_copies_on_write(launches):
    params, found = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True), {}
    for kernels in ("torch", "triton"):
        with LLM(overrides=SMALL | {"kv.fork": "share", "runner.kernels": kernels}) as llm:
            beams = llm.beam_search(prompts(), params, use_tqdm=False)
        found[kernels] = [[c.token_ids for c in output.outputs] for output in beams]
        assert bool(launches) == (kernels == "triton")
    assert found["triton"] == found["torch"]


def caches(num_blocks: int) -> list[torch.Tensor]:
    """Two layers of a model and one of its draft model, of another shape and dtype."""
    inner = ((2, 8, 4), torch.float32), ((2, 8, 4), torch.float32), ((1, 8, 3), torch.float16)
    return [torch.randn(2, num_blocks, *shape).to(dtype) for shape, dtype in inner]


def test_caches_of_several_shapes_are_a_launch_each(launches):
    device, host = caches(6), caches(4)
    plan = StepPlan(0, swap_out=[(0, 3), (5, 1)], copies=[(2, 4), (2, 5)], swap_in=[(3, 1)])
    move = choose_move(Dispatch("triton", CPU), device, host, 1)
    assert isinstance(move, KernelMove)
    results = []
    for mover in (move, TorchMove(1)):
        pools = [x.clone() for x in device], [x.clone() for x in host]
        BlockMoves(*pools, 1, mover)(plan)
        results.append([*pools[0], *pools[1]])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    assert len(launches) == 3 * 2


def test_a_copy_into_a_block_that_another_copy_reads_is_not_left_to_a_launch(launches):
    device = caches(6)
    wanted = [x[:, [1, 1, 0, 3, 4, 5]] for x in device]
    BlockMoves(device, caches(1), 1, KernelMove(CPU, TorchMove(1)))(StepPlan(0, copies=[(0, 2), (1, 0)]))
    for got, want in zip(device, wanted, strict=True):
        assert torch.equal(got, want)
    assert not launches


def test_caches_that_the_kernel_cannot_read_are_moved_in_torch_and_the_table_says_why():
    heads_first = [torch.zeros(2, 2, 6, 8, 4)]
    for pools, axis, why in (
        (heads_first, 2, r"not as [2, num_blocks, ...]"),
        ([torch.zeros(6, 2, 64)], 0, "not as [2, num_blocks, ...]"),
        ([torch.zeros(2, 6, 1, 1, 3)], 1, "a block of 12 bytes is no number of 8-byte words"),
        ([torch.zeros(2, 6, 1, 8, 4), torch.zeros(2, 6, 3, dtype=torch.int8)], 1, "a block of 3 bytes"),
    ):
        kernels = Dispatch("triton", CPU)
        assert isinstance(choose_move(kernels, pools, pools, axis), TorchMove)
        assert kernels.decision[0] == "torch" and why in kernels.decision[1]
