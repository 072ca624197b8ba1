"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, checked against the model they are for.

A LoRA adapter (Hu et al. 2021) adds scale * B A to some weight matrices, A [r, n_in] and B [n_out, r]. The scale is
lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (Kalajdzievski 2023). PEFT's variants that compute something
else are refused by name, and so is any option that is not known here: it may change the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.errors import AdapterError, ModelError
from minivllm.loading.safetensors_io import read_json, read_tensors
from minivllm.lora.request import CONFIG, WEIGHTS
from minivllm.registry import did_you_mean

PREFIX = "base_model.model."  # what PEFT writes before the model's own names

# Options that are read here, and those that say nothing about the result.
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias", "init_lora_weights"}
READ |= {"rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"}
HARMLESS = {"task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping"}
HARMLESS |= {"peft_version", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "runtime_config"}
REFUSED = {
    "use_dora": "DoRA, which scales each row of the merged matrix",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules saved beside the adapter",
    "trainable_token_indices": "trained embeddings",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters on bare parameters",
    "fan_in_fan_out": "transposed weights (GPT-2's Conv1D)",
    "alora_invocation_tokens": "activated LoRA, which starts at a token",
    "use_qalora": "QA-LoRA, which pools the inputs",
}
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
    if not folder.is_dir():
        raise AdapterError(f'no such folder: "{path}". A LoRA adapter is a folder with {CONFIG} and {WEIGHTS}', _PARAM)
    try:
        config = _check_config(read_json(_file(folder, CONFIG)), folder / CONFIG)
        tensors = {name: tensor for name, tensor, _ in read_tensors([_file(folder, WEIGHTS)])}
    except ModelError as error:
        raise AdapterError(str(error), _PARAM) from None
    try:
        return _Reader(config, tensors, targets, max_rank, folder).read()
    except re.error as error:
        raise AdapterError(f"{folder / CONFIG}: a pattern is no regular expression ({error})", _PARAM) from None


_PARAM = "lora_path"


def _file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        pickled = (folder / "adapter_model.bin").is_file() and name == WEIGHTS
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
        if value and name in REFUSED:
            raise refuse(f"{name} is not supported: {REFUSED[name]}")
        if value and name not in READ | HARMLESS:
            raise refuse(f"{name}={value!r} is not supported: an option that this version does not know")
    for name, kinds in (("r", int), ("lora_alpha", (int, float))):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise refuse(f"{name} must be a positive number, got {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(isinstance(v, int | float) and v > 0 for v in pattern.values()):
            raise refuse(f"{name} must map names to positive numbers, got {pattern!r}")
    modules = config.get("target_modules")
    if not modules or not isinstance(modules, str) and not all(isinstance(m, str) for m in modules):
        raise refuse(f"target_modules must be a list of names, or one regular expression, got {modules!r}")
    return config


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
        wanted = [target for target in self.targets if _matches(asked, target)]
        if excluded := config.get("exclude_modules"):
            wanted = [target for target in wanted if not _matches(excluded, target)]
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
        rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
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

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.tensors[PREFIX + name]

    def _bad(self, what: str) -> AdapterError:
        return AdapterError(f"{self.file}: {what}", _PARAM)

    def _bad_config(self, what: str) -> AdapterError:
        return AdapterError(f"{self.config_file}: {what}", _PARAM)


def _names(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _matches(asked: str | list[str], module: str) -> bool:
    """A list holds names, or ends of names, of modules; a string is a regular expression for the whole name."""
    if asked == "all-linear":
        return True
    if isinstance(asked, str):
        return re.fullmatch(asked, module) is not None
    return any(_names(name, module) for name in asked)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of the module's name."""
    return next((v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", module)), default)
