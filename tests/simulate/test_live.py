"""A machine that is not there, as a client sees it."""

from __future__ import annotations

import json
import re
import urllib.request

import numpy as np
import pytest
from serve.conftest import serving

from minivllm.config import EngineConfig
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.build.engine import build_over
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.engine.metrics import Metrics
from minivllm.executor.uni import UniExecutor
from minivllm.request import EngineRequest, SamplingParams
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Step

NAME = "llama-3.3-70b"
MACHINE = {"model.path": NAME, "executor.kind": "simulated", "executor.device": "4xh100", "model.max_model_len": 4000}


def test_tokens_come_as_far_apart_as_the_cost_of_their_steps():
    clock, config = VirtualClock(), EngineConfig.build("v1", MACHINE)
    builder = SimulatedWorkerBuilder(config, clock=clock)
    engine = build_over(UniExecutor(builder.build), config, clock=clock)
    engine.core.add(EngineRequest("r", list(range(16, 316)), SamplingParams(max_tokens=50, ignore_eos=True)))
    times = []
    while engine.core.has_work:
        engine.core.step()
        times.append(clock())
    cost = engine.executor.worker.cost
    steps = [cost.step_seconds(Step(np.ones(1, np.int64), np.array([300 + i]), 1)) for i in range(49)]
    assert times[0] == pytest.approx(cost.step_seconds(Step(np.array([300]), np.zeros(1, np.int64), 1)))
    assert np.diff(times) == pytest.approx(steps)
    assert 0.012 < np.mean(steps) < 0.02  # 35 GB of weights on each, at less than 3.35 TB/s


@pytest.fixture(scope="module")
def url():
    engine = AsyncLLM(NAME, overrides=MACHINE)
    with serving(engine, Metrics(NAME), (NAME,)) as url:
        yield url


def test_a_client_is_streamed_text_at_the_machines_speed_and_metrics_say_so(url):
    body = {"model": NAME, "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        chunks = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).strip()
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    said = urllib.request.urlopen(f"{url}/metrics").read().decode()
    (seconds,) = re.findall(r"^minivllm:time_per_output_token_seconds_sum\S* (\S+)$", said, re.MULTILINE)
    assert float(seconds) > 0.012  # never sooner than the device; later where this machine is busy
