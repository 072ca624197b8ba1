"""Rule: where the noise of a draw is made changes no draw."""

import numpy as np
import torch

from minivllm.sampling import draw as drawing
from minivllm.sampling.noise import DeviceNoise, HostNoise

CPU = torch.device("cpu")


def requests(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeds of all 64 bits, and positions."""
    random = np.random.default_rng(0)
    seeds = random.integers(0, 1 << 64, num, np.uint64)
    seeds[:3] = 0, 1, (1 << 64) - 1
    return seeds, random.integers(0, 1 << 20, num)


def test_both_give_the_same_numbers():
    seeds, positions = requests(200)
    lanes = torch.cat([torch.arange(1000), torch.tensor([1 << 20, 1 << 40])])
    for of_each in (lanes, lanes + torch.arange(200)[:, None]):
        for stream in (0, 1):
            host, device = (kind(seeds, positions, CPU)(of_each, stream) for kind in (HostNoise, DeviceNoise))
            assert host.dtype == device.dtype == torch.float64 and (device > 0).all()
            torch.testing.assert_close(device, host, rtol=4.5e-16, atol=0)  # two logarithms, each right to an ulp


def test_both_draw_the_same_tokens(monkeypatch):
    seeds, positions = requests(300)
    probs = torch.randn(300, 640, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs[7] = 0
    probs[8, 5] = torch.nan
    wanted = drawing.draw(probs, seeds, positions)
    monkeypatch.setattr(drawing, "make_noise", DeviceNoise)
    got = drawing.draw(probs, seeds, positions)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1]) and wanted[1].sum() == 298
