"""From a configuration to a profile of the machine at hand: an engine is built and measured, step by step."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm import machine
from minivllm.config import EngineConfig
from minivllm.engine.build.engine import Engine, build
from minivllm.engine.build.simulated import Memory, numbers_of
from minivllm.engine.core import EngineCore
from minivllm.errors import ConfigError
from minivllm.request import EngineRequest, SamplingParams
from minivllm.runner.memory import free_memory
from minivllm.simulate.host import HostCost
from minivllm.simulate.measure import Bounds, Stand, grid
from minivllm.simulate.profile import SCHEMA, Model, Profile, make_model, points_of
from minivllm.simulate.recorder import StepRecorder
from minivllm.simulate.regression import FOLDS, Sample, fit, fit_host
from minivllm.simulate.shape import read_shape
from minivllm.simulate.sources import find_model
from minivllm.simulate.workload import FIRST_TOKEN

POOL, HOST_POOL = "1GiB", "64MiB"  # of KV, where nothing else is asked for; and of the host's
HOST_BATCHES, HOST_STEPS, HOST_PROMPT = (1, 4, 16, 48), 8, 4  # requests that decode, steps, tokens of a prompt

Tell = Callable[[str], None]
Seconds = Callable[[], float]


@dataclass(frozen=True, slots=True)
class About:
    """Of the engine that was measured."""

    model: Model
    device: str
    memory: int
    options: dict[str, Any]


def profile_machine(config: EngineConfig, seconds: float, tell: Tell = lambda text: None) -> Profile:
    """Takes about `seconds` once the model is loaded. Raises UserError."""
    if config.executor.kind == "simulated":
        raise ConfigError("executor.kind=simulated is no machine that could be measured")
    memory = free_memory(Memory("cpu"))
    engine = build(measured(config))
    try:
        about = describe(config, engine, memory)
        tell(f"measuring {about.model.name} on {about.device} for {seconds:g} s")
        samples = measure_steps(engine, seconds)
        return make_profile(about, samples, measure_host(engine.core))
    finally:
        engine.core.shutdown()


def measured(config: EngineConfig) -> EngineConfig:
    """The engine that is measured: its pool's pages are there before a step needs them, and blocks can go to the
    host."""
    own = {"kv.preemption": "swap", "kv.swap_memory": HOST_POOL, "kv.prefault": True, "engine.overlap": 1}
    kv = config.kv
    if kv.num_blocks is kv.memory is kv.memory_fraction is None:
        own["kv.memory"] = POOL
    return EngineConfig.build(config.preset, {**config.flat(), **own})


def describe(config: EngineConfig, engine: Engine, memory: int) -> About:
    """memory: bytes that were free before it was built, of a CPU. Raises ModelError for a model that no simulated
    device takes."""
    found = find_model(config.model.path, config.model.tokenizer)
    numbers, _ = numbers_of(config, found, engine.info["dtype"])
    device = str(engine.info["device"]).partition(":")[0]
    if device == "cuda":
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory
    usual = EngineConfig().flat()
    options = {name: value for name, value in config.flat().items() if value != usual[name]}
    return About(make_model(found.name, read_shape(found.config, found.where), numbers), device, memory, options)


def measure_steps(engine: Engine, seconds: float, clock: Seconds = time.perf_counter) -> list[Sample]:
    info, config = engine.info, engine.config
    limits = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, engine.max_model_len
    bounds = Bounds(*limits, info["num_blocks"], info["block_size"])
    stand = Stand(lambda plan: engine.executor.submit(plan).result(), bounds, clock)
    samples = stand.measure(grid(bounds), seconds)
    return samples + stand.moves(info["num_host_blocks"])


def measure_host(core: EngineCore, clock: Seconds = time.perf_counter) -> HostCost:
    """What this engine's own loop takes beside the worker, while requests decode; no HTTP and no text. clock: of the
    same seconds as the core's."""
    recorder = StepRecorder(1, clock)
    core.observers.append(recorder)
    params = SamplingParams(temperature=0.0, max_tokens=HOST_STEPS, ignore_eos=True, detokenize=False)
    for count in HOST_BATCHES:
        for i in range(count):
            core.add(EngineRequest(f"h{count}-{i}", [FIRST_TOKEN] * HOST_PROMPT, params))
        recorder.rested()
        while not core.is_settled:
            core.step()
    core.observers.remove(recorder)
    assert recorder.host, "nothing decoded"
    return HostCost(*fit_host(recorder.host))


def make_profile(about: About, samples: Sequence[Sample], host: HostCost, outlier: float = math.inf) -> Profile:
    """outlier: as regression.fit's. Raises ConfigError for too few steps."""
    if len(samples) < FOLDS:
        raise ConfigError(
            f"{len(samples)} steps were measured, too few to fit anything to: give it more time or tokens"
        )
    found = fit(samples, outlier)
    return Profile(
        schema=SCHEMA,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(),
        memory=about.memory,
        device=about.device,
        model=about.model,
        options=about.options,
        host=host._asdict(),
        seconds=dict(found.seconds),
        errors=dict(found.errors),
        points=points_of(samples, found),
    )
