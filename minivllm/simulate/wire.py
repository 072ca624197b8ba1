"""A wire between devices: how long so many bytes take. Of what is sent at once, each device sends its own part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from minivllm.errors import ConfigError
from minivllm.registry import did_you_mean


class Wire(NamedTuple):
    bytes_per_s: float  # one way, of one device
    latency: float  # seconds of an empty message
    source: str = "as asked for"

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bytes_per_s


_ROUND = "its latency is assumed"
# By name, what a data sheet promises of one way. What software reaches of it is less: nobody measured it here.
WIRES: Mapping[str, Wire] = {
    "nvlink3": Wire(300e9, 10e-6, f"NVIDIA A100 data sheet, {_ROUND}"),
    "nvlink4": Wire(450e9, 10e-6, f"NVIDIA H100 data sheet, {_ROUND}"),
    "pcie4": Wire(32e9, 10e-6, f"16 lanes, {_ROUND}"),
    "ib-400": Wire(50e9, 20e-6, f"InfiniBand NDR, 400 Gbit/s, a port for each device; {_ROUND}"),
    "ib-200": Wire(25e9, 20e-6, f"InfiniBand HDR, 200 Gbit/s, a port for each device; {_ROUND}"),
    "eth-25": Wire(25e9 / 8, 50e-6, f"25 Gbit/s Ethernet, a port for each device; {_ROUND}"),
}
DEFAULT_WIRE = "ib-200"


def parse_wire(text: str) -> Wire:
    """A name of WIRES, or "GB/s,microseconds". Raises ConfigError."""
    if text in WIRES:
        return WIRES[text]
    try:
        rate, latency = map(float, text.split(","))
        if 0 < rate < math.inf and 0 <= latency < math.inf:
            return Wire(rate * 1e9, latency * 1e-6)
    except ValueError:
        pass
    hint = did_you_mean(text, list(WIRES))
    raise ConfigError(f'no wire "{text}".{hint} One of {", ".join(WIRES)}; or GB/s and microseconds: 25,20')
