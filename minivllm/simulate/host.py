"""What the host takes for a step beside the device: planning, inputs, and what is done with tokens.

On the real clock that time passes by itself, on the machine at hand. On a virtual one it is an input, so that a host
can be simulated too: one that works before each step (V0), or beneath the step that runs (V1, engine.overlap=2).
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.errors import ConfigError
from minivllm.registry import did_you_mean


class HostCost(NamedTuple):
    step: float = 0.0  # seconds, of each step
    request: float = 0.0  # and of each request in it

    def seconds(self, num_requests: int) -> float:
        return self.step + self.request * num_requests


NO_HOST = HostCost()
# Schedule, prepare and update of this engine with 1 to 256 requests that decode, by its input builders, on an "Intel(R)
# Xeon(R) Processor": bench/results/host.jsonl of 2026-11-21. HTTP and text are not in it.
HOSTS = {"none": NO_HOST, "minivllm": HostCost(36e-6, 1.3e-6), "minivllm-rebuild": HostCost(17e-6, 2.6e-6)}


def parse_host(text: str) -> HostCost:
    """A name of HOSTS, or "step,request" in microseconds. Raises ConfigError."""
    if text in HOSTS:
        return HOSTS[text]
    try:
        step, request = (float(part) / 1e6 for part in text.split(","))
        if 0 <= step < 1e6 and 0 <= request < 1e6:
            return HostCost(step, request)
    except ValueError:
        pass
    hint = did_you_mean(text, list(HOSTS))
    names = ", ".join(HOSTS)
    raise ConfigError(f'no host "{text}".{hint} One of {names}; or microseconds of a step and of a request: 200,5')
