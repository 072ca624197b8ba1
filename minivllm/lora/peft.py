"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, checked against the model they are for.

A LoRA adapter (Hu et al. 2021) adds scale * B A to some weight matrices, A [r, n_in] and B [n_out, r]. The scale is
lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (Kalajdzievski 2023). PEFT's variants that compute something
else are refused by name, and so is any option that is not known here: it may change the result.
"""

from __future__ import annotations

import math
import os
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.errors import AdapterError, MissingAdapter, ModelError
from minivllm.file_keys import ADAPTER, ADAPTER_REFUSED, check, warn
from minivllm.files import read_json
from minivllm.loading.safetensors_io import read_tensors
from minivllm.lora.request import CONFIG, WEIGHTS
from minivllm.patterns import MAX_NAMES, Pattern, PatternError
from minivllm.registry import did_you_mean

PREFIX = "base_model.model."  # what PEFT writes before the model's own names

# Options that are read here; those that say nothing about the result, and those that are refused: file_keys.py.
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias", "init_lora_weights"}
READ |= {"rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"}
ODD_TENSORS = {
    "lora_embedding_": "an adapter on embeddings",
    "lora_magnitude_vector": "DoRA",
    ".experts.": "an adapter on experts",
    ".gate.lora_": "an adapter on a router",
}
# These change the base model's own weights, so the adapter is only right on top of that changed model.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


class Matrices(NamedTuple):
    a: Tensor  # [r, n_in]
    b: Tensor  # [n_out, r]
    scale: float


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix that an adapter may change: its shape."""

    n_in: int
    n_out: int


def read_adapter(path: str, targets: Mapping[str, Target], max_rank: int) -> dict[str, Matrices]:
    """{module of the checkpoint: its A, B and scale}. targets: what the model has, by the checkpoint's names.

    The tensors are views of the mapped file. Raises AdapterError, naming the file and what is wrong with it.
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # whatever is wrong with the path: too long, a loop of links
        raise MissingAdapter(
            f'no such folder: "{path[:LONGEST_SHOWN]}". A LoRA adapter is a folder with {CONFIG} and {WEIGHTS}', _PARAM
        )
    try:
        config = _check_config(read_json(_file(folder, CONFIG)), folder / CONFIG)
        tensors = {name: tensor for name, tensor, _ in read_tensors([_file(folder, WEIGHTS)])}
    except ModelError as error:
        raise AdapterError(str(error), _PARAM) from None
    return _Reader(config, tensors, targets, max_rank, folder).read()


_PARAM = "lora_path"
LONGEST_SHOWN = 200  # characters of a path


def _file(folder: Path, name: str) -> Path:
    if not os.path.isfile(folder / name):
        pickled = os.path.isfile(folder / "adapter_model.bin") and name == WEIGHTS
        why = "; adapter_model.bin is a pickle, which may run code when opened: save it again as safetensors"
        raise AdapterError(f"{folder}: no {name}{why if pickled else ''}", _PARAM)
    return folder / name


def _check_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    def refuse(what: str) -> AdapterError:
        return AdapterError(f"{file}: {what}", _PARAM)

    if config.get("peft_type") != "LORA":
        raise refuse(f'peft_type is {config.get("peft_type")!r}, and only "LORA" is supported')
    if config.get("bias", "none") != "none":
        raise refuse(f"bias={config['bias']!r} is not supported: an adapter that trains the model's biases")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(CHANGES_THE_BASE):
        raise refuse(
            f"init_lora_weights={init!r} is not supported: it changes the base model. Convert it to plain LoRA"
        )
    for name, value in config.items():
        if value and name in ADAPTER_REFUSED:
            raise refuse(f"{name} is not supported: {ADAPTER_REFUSED[name]}")
        if value and name not in READ and name not in ADAPTER.harmless:
            raise refuse(f"{name}={reprlib.repr(value)} is not supported: an option that this version does not know")
    warn(str(file), check(str(file), config, READ | ADAPTER_REFUSED.keys(), ADAPTER))
    for name, kinds in (("r", int), ("lora_alpha", (int, float))):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, kinds) or not _is_positive(value):
            raise refuse(f"{name} must be a positive number, got {reprlib.repr(value)}")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_is_positive, pattern.values())):
            raise refuse(f"{name} must map names to positive numbers, got {reprlib.repr(pattern)}")
    for name in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_to_transform"):
        if isinstance(value := config.get(name), list | dict) and len(value) > MAX_NAMES:
            raise refuse(f"{name} has {len(value):,} entries, more than {MAX_NAMES:,}")
    for name in ("target_modules", "exclude_modules"):
        modules = config.get(name)
        if (modules or name == "target_modules") and not _are_names(modules):
            what = f"must be a list of names, or one regular expression, got {reprlib.repr(modules)}"
            raise refuse(f"{name} {what}")
    layers = config.get("layers_to_transform")
    if layers is not None and not all(isinstance(i, int) for i in (layers if isinstance(layers, list) else [layers])):
        raise refuse(f"layers_to_transform must be a number or a list of them, got {reprlib.repr(layers)}")
    return config


def _is_positive(value: Any) -> bool:
    """And no more than a float can be: JSON admits Infinity, and integers of any length."""
    return isinstance(value, int | float) and 0 < value <= sys.float_info.max


def _are_names(modules: Any) -> bool:
    if isinstance(modules, list):
        return bool(modules) and all(isinstance(name, str) for name in modules)
    return isinstance(modules, str) and bool(modules)


class _Reader:
    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        targets: Mapping[str, Target],
        max_rank: int,
        folder: Path,
    ):
        self.config, self.tensors, self.targets, self.max_rank = config, tensors, targets, max_rank
        self.config_file, self.file = folder / CONFIG, folder / WEIGHTS
        self.patterns: dict[tuple[str, bool], Pattern] = {}  # that have been read

    def read(self) -> dict[str, Matrices]:
        wanted = self._wanted()
        self._check_names(wanted)
        return {module: self._matrices(module) for module in wanted}

    def _wanted(self) -> list[str]:
        """The modules that the configuration names, by PEFT's rules."""
        asked, config = self.config["target_modules"], self.config
        if not isinstance(asked, str):
            for name in asked:
                if not any(_names(name, target) for target in self.targets):
                    known = sorted({target.rpartition(".")[2] for target in self.targets})
                    hint = f"{did_you_mean(name, known)} Supported: {', '.join(known)}"
                    raise self._bad_config(f'target_modules: "{name}" is not supported on this model.{hint}')
        wanted = [target for target in self.targets if self._matches("target_modules", target)]
        if config.get("exclude_modules"):
            wanted = [target for target in wanted if not self._matches("exclude_modules", target)]
        if (layers := config.get("layers_to_transform")) is not None:
            layers = [layers] if isinstance(layers, int) else layers
            wanted = [target for target in wanted if int(target.split(".")[2]) in layers]
        if not wanted:
            raise self._bad_config(f"target_modules={asked!r} names no module of this model")
        return wanted

    def _check_names(self, wanted: Iterable[str]) -> None:
        expected = {f"{module}.lora_{m}.weight" for module in wanted for m in "AB"}
        found = {name.removeprefix(PREFIX) for name in self.tensors}
        for odd, what in ODD_TENSORS.items():
            if any(odd in name for name in found):
                raise self._bad(f"{what} is not supported")
        if missing := sorted(expected - found):
            raise self._bad(f'{len(missing)} tensors are missing: "{missing[0]}" is the first of them')
        if unexpected := sorted(found - expected):
            raise self._bad(f'{len(unexpected)} tensors belong to no target module: "{unexpected[0]}" is the first')

    def _matrices(self, module: str) -> Matrices:
        config, target = self.config, self.targets[module]
        rank = self._by_pattern("rank_pattern", module, config["r"])
        alpha = self._by_pattern("alpha_pattern", module, config["lora_alpha"])
        if rank > self.max_rank:
            raise self._bad_config(f"{module} has rank {rank}, and lora.max_rank admits {self.max_rank}: raise it")
        a, b = (self._tensor(f"{module}.lora_{m}.weight") for m in "AB")
        for name, tensor, shape in (("A", a, (rank, target.n_in)), ("B", b, (target.n_out, rank))):
            if tuple(tensor.shape) != shape:
                found = f"has shape {list(tensor.shape)}, rank and model ask for {list(shape)}"
                raise self._bad(f'"{module}.lora_{name}.weight" {found}')
            if not tensor.is_floating_point():
                raise self._bad(f'"{module}.lora_{name}.weight" holds {tensor.dtype}, not floating-point numbers')
        return Matrices(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def _matches(self, field: str, module: str) -> bool:
        """A list holds names, or ends of names, of modules; a string is a regular expression for the whole name."""
        asked = self.config[field]
        if asked == "all-linear":
            return True
        if isinstance(asked, str):
            return self._pattern(field, asked).matches(module)
        return any(_names(name, module) for name in asked)

    def _by_pattern(self, field: str, module: str, default: Any) -> Any:
        """The value of the first pattern that fits the end of the module's name."""
        patterns = self.config.get(field) or {}
        return next((v for p, v in patterns.items() if self._pattern(field, p, True).matches(module)), default)

    def _pattern(self, field: str, text: str, may_follow_a_dot: bool = False) -> Pattern:
        key = text, may_follow_a_dot
        if key not in self.patterns:
            try:
                self.patterns[key] = Pattern(text, may_follow_a_dot)
            except PatternError as error:
                raise self._bad_config(
                    f'{field}: the pattern "{text[:100]}" {error}. A list of names will do'
                ) from None
        return self.patterns[key]

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.tensors[PREFIX + name]

    def _bad(self, what: str) -> AdapterError:
        return AdapterError(f"{self.file}: {what}", _PARAM)

    def _bad_config(self, what: str) -> AdapterError:
        return AdapterError(f"{self.config_file}: {what}", _PARAM)


def _names(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")
