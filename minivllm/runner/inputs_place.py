"""Where the tables of `runner.inputs` lie: on the host, or on the device if the builder has a form for it and attention
reads nothing of them on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from minivllm.attention.base import AttentionBackend
from minivllm.batch import InputSizes
from minivllm.kernels.dispatch import Dispatch
from minivllm.registry import Registry
from minivllm.runner.inputs import InputBuilder
from minivllm.runner.inputs_gather import GatherInputs
from minivllm.runner.tables_device import DeviceTables, choose_launches


class Placed(NamedTuple):
    make: Callable[[InputSizes], InputBuilder]
    reason: str | None  # None: there was nothing to choose


def gather_on_device(sizes: InputSizes, device: torch.device, kernels: Dispatch) -> GatherInputs:
    return GatherInputs(sizes, DeviceTables(sizes, device, choose_launches(kernels, sizes.block_size)))


def is_apart(device: torch.device) -> bool:
    """Whether its memory is another one than the host's."""
    return device.type != "cpu"


def place_inputs(
    name: str,
    builders: Registry[InputBuilder],
    on_devices: Registry[InputBuilder],
    device: torch.device,
    attention: type[AttentionBackend],
    kernels: Dispatch,
) -> Placed:
    """builders: by runner.inputs; on_devices: the forms of some of them, made with (sizes, device, kernels)."""
    if name not in on_devices.names() or not is_apart(device):
        return Placed(builders.get(name), None)
    if attention.host_tables:
        reason = f"its tables are on the host: {attention.__name__} reads block tables there"
        return Placed(builders.get(name), reason)
    make = on_devices.get(name)
    return Placed(lambda sizes: make(sizes, device, kernels), "its tables are on the device, and steps gathered there")
