"""From two configurations to a simulated cluster whose replicas share the work: prompts here, answers there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import (
    HostKV,
    MakeCost,
    PolicyRouter,
    build_engines,
    check_simulated,
    storing,
)
from minivllm.engine.build.engine import build_routing
from minivllm.engine.build.kv import build_handing_over
from minivllm.engine.routing import LeastLoaded
from minivllm.errors import ConfigError
from minivllm.kv.base import KVManager
from minivllm.kv.handover import ReceivingKV, SendingKV
from minivllm.kv.store import StoredSendingKV
from minivllm.request import Request
from minivllm.simulate.devices import DEFAULT_DEVICE, Device
from minivllm.simulate.disaggregated import Disaggregated, Hall, Sides
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.machines import cost_on, find_machine
from minivllm.simulate.prompts import Prompts
from minivllm.simulate.wire import DEFAULT_WIRE, WIRES, Wire

ALIKE = ("model.path", "model.dtype", "kv.dtype", "model.max_model_len")  # or K and V of one are none of the other's


class Counts(NamedTuple):
    """Of replicas."""

    prefill: int
    decode: int


def build_disaggregated(
    prefill: EngineConfig,
    decode: EngineConfig,
    counts: Counts,
    host: HostCost = NO_HOST,
    link_seconds: float = 0.0,
    wire: Wire = WIRES[DEFAULT_WIRE],
    make_cost: MakeCost = cost_on,
    host_kv: HostKV | None = None,
) -> Disaggregated:
    """prefill, decode: of each replica of a kind. wire: between two devices of different replicas. Requests go to a
    prefill replica by its engine.router, and from there to the least loaded decode replica. host_kv: of prefill
    replicas. Raises UserError."""
    _check(prefill, decode, counts)
    sending, receiving = [], []
    make_sending = partial(_keep, sending, _sending(prefill, host_kv, counts.prefill))
    make_receiving = partial(_keep, receiving, partial(build_handing_over, ReceivingKV))
    senders = build_engines(prefill, counts.prefill, host, make_cost, make_sending)
    receivers = build_engines(decode, counts.decode, host, make_cost, make_receiving)
    base = receivers[0][0].core.scheduler.base
    costs = [engines[0][0].core.executor.worker.cost for engines in (senders, receivers)]
    if costs[0].shape.states is not None:
        raise ConfigError("what a recurrent state takes on the wire is not simulated: this model needs --replicas")
    hall = Hall(
        PolicyRouter(LeastLoaded(decode.kv.block_size), len(receivers)),
        wire,
        _wires(counts, len(senders) // counts.prefill, len(receivers) // counts.decode),
        max(cost.kv_bytes_per_token for cost in costs),
        sending,
        receiving,
        partial(_check_fits, base),
        base.limits.max_model_len,
    )
    sides = Sides(*([(engine.core, clock) for engine, clock in engines] for engines in (senders, receivers)))
    router = PolicyRouter(build_routing(prefill), len(senders))
    return Disaggregated(sides, router, hall, Prompts(senders[0][0].info["vocab_size"]), link_seconds)


def _sending(config: EngineConfig, host_kv: HostKV | None, count: int) -> Callable[..., KVManager]:
    if host_kv is None:
        return partial(build_handing_over, SendingKV)
    return storing(config, host_kv, count, StoredSendingKV)


def _check(prefill: EngineConfig, decode: EngineConfig, counts: Counts) -> None:
    for config, count, option in ((prefill, counts.prefill, "prefill"), (decode, counts.decode, "decode")):
        check_simulated(config, count, f"--{option}-replicas")
        machine = find_machine(config.executor.device or DEFAULT_DEVICE)
        if isinstance(machine, Device) and machine.has_ranks:
            raise ConfigError(f"executor.device={config.executor.device}: ranks (+dp) do all of a request")
        if config.debug.trace is not None:
            raise ConfigError("debug.trace records one replica, and here are at least two")
        if config.spec_decode.method != "none":
            raise ConfigError(
                f"spec_decode.method={config.spec_decode.method}: guesses are not handed over from prefill replicas"
            )
    for field in ALIKE:
        if prefill.get(field) != decode.get(field):
            raise ConfigError(f"{field} must be the same on both sides: K and V of one are read by the other")


def _wires(counts: Counts, num_senders: int, num_receivers: int) -> list[int]:
    """Of each core its replica's. num_senders, num_receivers: cores of a replica."""
    out = [number // num_senders for number in range(counts.prefill * num_senders)]
    return out + [counts.prefill + number // num_receivers for number in range(counts.decode * num_receivers)]


def _keep(found: list[Any], make_kv, *args: Any) -> KVManager:
    found.append(make_kv(*args))
    return found[-1]


def _check_fits(base: Any, req: Request) -> None:
    base.limits.check_fits(req, base.chunked_prefill)
