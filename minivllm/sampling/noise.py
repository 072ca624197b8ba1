"""The noise of a draw (uniform.py) as tensors, where the probabilities are: numpy on a CPU, torch elsewhere.

On a GPU each is a launch, so a draw never makes the host wait for the tokens that it is about. The two give the same
uniform numbers bit for bit; their logarithms may differ in the last one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling.uniform import exponential
from minivllm.upload import upload


class HostNoise:
    def __init__(self, seeds: np.ndarray, positions: np.ndarray, device: torch.device):
        """seeds [S] uint64, positions [S] int64."""
        self._seeds, self._positions = seeds, positions

    def __call__(self, lanes: Tensor, stream: int) -> Tensor:
        """lanes [L] or [S, L] int64 -> [S, L] float64 above 0, exponential with mean 1."""
        return torch.from_numpy(exponential(self._seeds, self._positions, lanes.numpy(), stream))


class DeviceNoise:
    """HostNoise in torch. 64-bit products and sums wrap there as in numpy; what is wanted of a shift is cut out."""

    def __init__(self, seeds: np.ndarray, positions: np.ndarray, device: torch.device):
        self._seeds = upload(seeds.view(np.int64), device)
        self._steps = (upload(positions, device) + 1) * _GOLDEN

    def __call__(self, lanes: Tensor, stream: int) -> Tensor:
        use = _mix(torch.full((1,), stream + 1, device=lanes.device) * _GOLDEN)
        state = _mix(_mix(self._seeds ^ use) + self._steps)
        bits = _mix(state[:, None] + (lanes + 1) * _GOLDEN)
        return -torch.log((_shifted(bits, 12).double() + 0.5) * 2.0**-52)


def make_noise(seeds: np.ndarray, positions: np.ndarray, device: torch.device) -> HostNoise | DeviceNoise:
    return (HostNoise if device.type == "cpu" else DeviceNoise)(seeds, positions, device)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN, _MUL1, _MUL2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(z: Tensor, num: int) -> Tensor:
    """To the right, zeros coming in: torch's shift would bring in the sign."""
    return (z >> num) & ((1 << (64 - num)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MUL1
    z = (z ^ _shifted(z, 27)) * _MUL2
    return z ^ _shifted(z, 31)
