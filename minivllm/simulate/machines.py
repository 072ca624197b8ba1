"""What executor.device may name: a device of devices.py, or a file that `minivllm profile` wrote."""

from __future__ import annotations

import re
from pathlib import Path

from minivllm.errors import ConfigError
from minivllm.simulate.cost import Cost, Numbers, RankCost, StepCost
from minivllm.simulate.devices import Device, find_device
from minivllm.simulate.profile import SUFFIX, Profile, ProfileCost, read_profile
from minivllm.simulate.shape import Shape

Machine = Device | Profile


def find_machine(asked: str) -> Machine:
    """Raises ConfigError."""
    if not is_profile(asked):
        return find_device(asked)
    path = Path(asked).expanduser()
    if not path.exists() and (several := re.fullmatch(r"\d+x(.+)", asked)) and Path(several[1]).expanduser().exists():
        raise ConfigError(f"executor.device={asked}: a machine that was measured serves a model alone")
    return read_profile(path)


def is_profile(asked: str) -> bool:
    return asked.endswith(SUFFIX)


def cost_on(machine: Machine, shape: Shape, numbers: Numbers) -> StepCost:
    """Raises ConfigError for what this machine says nothing of."""
    if isinstance(machine, Profile):
        return ProfileCost(machine, shape, numbers)
    return (RankCost if machine.has_ranks else Cost)(machine, shape, numbers)
