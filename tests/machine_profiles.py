"""A machine that nobody measured: its times are terms that the tests know."""

from __future__ import annotations

from pathlib import Path

from minivllm.config import EngineConfig
from minivllm.engine.build.profile import About, make_profile
from minivllm.engine.build.simulated import numbers_of
from minivllm.simulate.host import HostCost
from minivllm.simulate.measure import Bounds, Point, grid
from minivllm.simulate.profile import Profile, make_model, write_profile
from minivllm.simulate.regression import Sample
from minivllm.simulate.shape import read_shape
from minivllm.simulate.sources import find_model

MODEL = "dummy:tiny"
BOUNDS = Bounds(128, 2048, 4096, 100_000, 16)
HOST = HostCost(100e-6, 5e-6)


def seconds_of(point: Point) -> float:
    """2 ms, 100 us a token up to 32 and 50 us more of each beyond, 1 us a token in a decode's cache, 10 ns a pair."""
    tokens, parts = point.num_tokens, list(zip(point.start, point.num_new, strict=True))
    pairs = sum(new * start + new * (new + 1) // 2 for start, new in parts if new > 1)
    cached = sum(start for start, new in parts if new == 1)
    return 2e-3 + 100e-6 * tokens + 50e-6 * max(0, tokens - 32) + 1e-6 * cached + 10e-9 * pairs


def samples() -> list[Sample]:
    return [Sample(point.step, seconds_of(point)) for point in grid(BOUNDS)]


def make(model: str = MODEL, **options) -> Profile:
    config = EngineConfig.build("v1", {"model.path": model, **options})
    found = find_model(model)
    numbers, _ = numbers_of(config, found, "float32")
    about = About(make_model(found.name, read_shape(found.config), numbers), "cpu", 8 << 30, {})
    return make_profile(about, samples(), HOST)


def written(folder: Path, **options) -> str:
    path = folder / "machine.json"
    write_profile(make(**options), path)
    return str(path)
