import pytest
import torch

from minivllm.plan import StepPlan
from minivllm.runner.block_copy import TorchMove, unsupported_reason
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.memory import host_cache


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_swapping_out_and_in_restores_every_byte(axis, dtype):
    shape = [2, 3, 4]
    shape[axis] = 6
    device = [torch.randn(shape).to(dtype) for _ in range(3)]
    host = [torch.full(shape, torch.nan).to(dtype) for _ in range(3)]
    before = [layer.clone().float() for layer in device]
    moves = BlockMoves(device, host, axis, TorchMove(axis))
    moves(StepPlan(0, swap_out=[(4, 0), (1, 5)]))
    for layer in device:
        layer.select(axis, 4).copy_(torch.nan)
        layer.select(axis, 1).copy_(torch.nan)
    moves(StepPlan(1, swap_in=[(0, 2), (5, 3)]))
    for layer, old in zip((layer.float() for layer in device), before, strict=True):
        assert torch.equal(layer.select(axis, 2), old.select(axis, 4))
        assert torch.equal(layer.select(axis, 3), old.select(axis, 1))
        assert torch.equal(layer.select(axis, 0), old.select(axis, 0))


def test_what_goes_out_and_what_is_copied_is_read_before_anything_comes_in():
    """One step may move a block out, copy another one whose owner has gone, and bring others into their places."""
    device, host = [torch.arange(4.0)[:, None]], [torch.tensor([[10.0], [11.0], [12.0]])]
    plan = StepPlan(0, swap_out=[(1, 0)], copies=[(2, 3)], swap_in=[(1, 1), (2, 2)])
    BlockMoves(device, host, 0, TorchMove(0))(plan)
    assert host[0].flatten().tolist() == [1.0, 11.0, 12.0]
    assert device[0].flatten().tolist() == [0.0, 11.0, 12.0, 2.0]


def test_a_step_without_moves_touches_nothing():
    moves = BlockMoves([], [], 0, TorchMove(0))
    moves(StepPlan(0))


def test_a_move_is_measured_in_seconds_a_block():
    device, host = ([torch.zeros(8, 1000)] for _ in range(2))
    assert 0 < BlockMoves(device, host, 0, TorchMove(0)).measure() < 1


class OnAGPU:
    """What is asked of a cache before anything is moved."""

    device, dtype, itemsize = torch.device("cuda"), torch.float16, 2
    shape = torch.Size([2, 9, 2, 16, 64])

    def is_contiguous(self) -> bool:
        return True

    def __getitem__(self, at):
        return torch.empty(self.shape, device="meta")[at]


def test_a_kernel_moves_blocks_between_a_gpu_and_pinned_memory_alone(monkeypatch):
    asked, inner = [], torch.zeros

    def zeros(shape, dtype, pin_memory):
        asked.append(pin_memory)
        return inner(shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", zeros)
    host = host_cache(OnAGPU(), 1, 5)
    assert asked == [True] and host.shape == (2, 5, 2, 16, 64) and host.dtype == torch.float16
    assert unsupported_reason([OnAGPU()], [host], 1) == "the host's caches are not pinned"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert unsupported_reason([OnAGPU()], [host], 1) is None
