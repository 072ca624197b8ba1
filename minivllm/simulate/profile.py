"""A machine that was measured, and a step's time on it: `minivllm profile` writes it, simulated devices take it.

It is of one model, in one dtype, on one machine: the terms of regression.py hold whatever that model's layers and
kernels do there, and say nothing of another model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minivllm.errors import ConfigError
from minivllm.simulate.cost import Held, Numbers, Step
from minivllm.simulate.host import HostCost
from minivllm.simulate.regression import KINDS, OTHERS, PIECE, Error, Fit, Sample, names_of, terms_of
from minivllm.simulate.shape import Shape

SCHEMA = "minivllm.profile/1"
SUFFIX = ".json"
MAKE = "make one with `minivllm profile`"


_DEFAULTS = {
    size.name: size.default for kind in (Shape, Numbers) for size in fields(kind) if size.default is not MISSING
}


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, as far as a step's time depends on it."""

    name: str
    sizes: dict[str, Any]  # plain(shape)
    numbers: dict[str, Any]  # plain(numbers)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As a Device, to whoever builds a simulated worker."""

    schema: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    memory: int  # bytes
    device: str  # cpu or cuda
    model: Model
    options: dict[str, Any]  # of the engine that was measured, those that are not the default
    host: dict[str, float]  # HostCost's fields
    seconds: dict[str, float]  # of one of each term
    errors: dict[str, Error]  # of steps that the fit had not seen
    points: list[dict[str, Any]]  # what was measured

    @property
    def what(self) -> str:
        cores = f", {self.machine['num_cores']} cores" if self.is_cpu and "num_cores" in self.machine else ""
        return f"{self.machine.get('gpu') or self.machine.get('cpu')}{cores}"

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def count(self) -> int:
        return 1

    @property
    def dtype(self) -> str:
        """That a model computes in, if nothing else is asked for."""
        return self.model.numbers["dtype"]

    @property
    def error(self) -> float:
        """Of a step's time, relative, in the mean."""
        return self.errors["all"].mean

    @property
    def reason(self) -> str:
        measured = f"measured with {self.model.name} on {self.date[:10]}"
        return f"simulated: {self.what}, {measured}; a step is {self.error:.1%} off in the mean"

    @property
    def host_cost(self) -> HostCost:
        return HostCost(**self.host)


class Terms:
    """Seconds of a step by a profile, whatever the model is that it was measured with."""

    def __init__(self, profile: Profile):
        self._knots = sorted(int(name.removeprefix(PIECE)) for name in profile.seconds if name.startswith(PIECE))
        self._seconds = np.array([profile.seconds[name] for name in names_of(self._knots)])

    def __call__(self, step: Step) -> float:
        return float(terms_of(self._knots, step) @ self._seconds)


class ProfileCost(Held):
    """A StepCost by what was measured."""

    def __init__(self, profile: Profile, shape: Shape, numbers: Numbers):
        """Raises ConfigError for another model than the one that was measured."""
        super().__init__(shape, numbers)
        if difference := _difference(profile.model, shape, numbers):
            raise ConfigError(
                f"executor.device: this profile was measured with {profile.model.name}, and says nothing of a model "
                f"with {difference}: profile that one"
            )
        self._terms = Terms(profile)
        self._move, self._moved, self._copied = (profile.seconds[name] for name in OTHERS[-3:])

    def step_seconds(self, step: Step) -> float:
        return self._terms(step)

    def move_seconds(self, num_tokens: float, across: bool) -> float:
        return (self._move + num_tokens * (self._moved if across else self._copied)) if num_tokens else 0.0


def _difference(model: Model, shape: Shape, numbers: Numbers) -> str:
    """The first size that differs; "": none. A file that is older than a size has what all models had then."""
    ours, theirs = plain(shape) | plain(numbers), _DEFAULTS | model.sizes | model.numbers
    return next((f"{name}={ours[name]}, not {theirs.get(name)}" for name in ours if ours[name] != theirs.get(name)), "")


def plain(value: Shape | Numbers) -> dict[str, Any]:
    """As JSON has it, without sentences."""
    found = json.loads(json.dumps(asdict(value)))
    if found.get("weights"):
        found["weights"] = found["weights"][:3]
    return found


def make_model(name: str, shape: Shape, numbers: Numbers) -> Model:
    return Model(name, plain(shape), plain(numbers))


def points_of(samples: Sequence[Sample], fit: Fit) -> list[dict[str, Any]]:
    """Plain, for whoever wants to see how good a fit is."""
    found = []
    for sample, predicted in zip(samples, fit.predicted, strict=True):
        step = sample.step
        row = {"kind": sample.kind, "requests": len(step.num_new), "tokens": int(step.num_new.sum())}
        row |= {"cached": int(step.start.sum())}
        found.append(row | {"ms": round(1e3 * sample.seconds, 4), "held_out_ms": round(1e3 * predicted, 4)})
    return found


# -------------------------------------------------------------------------------------------------------------- files


def write_profile(profile: Profile, path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def read_profile(path: Path) -> Profile:
    """Raises ConfigError, in one sentence."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: no profile of a machine ({error.strerror}): {MAKE}") from None
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: damaged, not JSON ({error}): {MAKE}") from None
    schema = found.get("schema") if isinstance(found, Mapping) else None
    if schema != SCHEMA:
        raise ConfigError(f"{path}: no profile of a machine (its schema is {schema!r}, not {SCHEMA}): {MAKE}")
    try:
        profile = msgspec.convert(found, Profile)
        _check(profile)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}): {MAKE}") from None
    return profile


def _check(profile: Profile) -> None:
    """Raises ValueError."""
    for name in (*OTHERS, f"{PIECE}0"):
        if name not in profile.seconds:
            raise ValueError(f"no seconds of {name}")
    for name in set(profile.seconds) - set(OTHERS):
        if not re.fullmatch(rf"{PIECE}\d+", name):
            raise ValueError(f"no term is called {name}")
    if set(profile.host) != set(HostCost._fields):
        raise ValueError(f"its host has not {' and '.join(HostCost._fields)}")
    numbers = [*profile.seconds.values(), *profile.host.values()]
    if not all(0 <= number < float("inf") for number in numbers):
        raise ValueError("a time is negative")
    if not any(profile.seconds.values()) or profile.memory <= 0:
        raise ValueError("nothing in it takes time, or it has no memory")
    if "all" not in profile.errors or set(profile.errors) - {"all", *KINDS}:
        raise ValueError("its errors are not of steps")
    if "dtype" not in profile.model.numbers:
        raise ValueError("no dtype of its model")
