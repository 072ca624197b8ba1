"""Weights of a network that is transformers' own code: the names are its modules', and checkpoints whose names or
tensors are others' are turned by transformers' own tables (transformers.conversion_mapping)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.layers.embedding import Embedding, TiedLMHead
from minivllm.layers.linear import Linear, QuantMethod, empty_parameter
from minivllm.layers.stored import Destination, TensorSpec
from minivllm.models.checkpoint import destinations_of


class TreeLinear(Linear):
    """Where transformers has an nn.Linear: x may have any number of dimensions before the last."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, dtype: torch.dtype, method: QuantMethod):
        super().__init__(n_in, {"": n_out}, bias=bias, dtype=dtype, method=method)
        self.in_features, self.out_features = n_in, n_out

    def finish(self) -> None:
        """Code that asks a weight for its dtype finds one, though it be empty; what multiplies by it fails at load."""
        dtype = self.weight.dtype if self.weight is not None else None
        super().finish()
        if self.weight is None and dtype is not None:
            self.weight = empty_parameter(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class TreeTiedHead(TiedLMHead):
    """The same, whose matrix is the embedding's."""

    def __init__(self, embedding: Embedding | nn.Embedding, method: QuantMethod):
        super().__init__(embedding, method)  # type: ignore[arg-type]  # of which it takes the weight alone
        self.rows = {"": slice(0, self.shape[0])}

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)


def replace_linears(network: nn.Module, method: QuantMethod) -> int:
    """Every nn.Linear of a network on the meta device by ours, on the default device. -> how many. One with a bias
    whose matrix is another's stays what it is."""
    uses: dict[int, list[nn.Module]] = {}
    for module in network.modules():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            uses.setdefault(id(module.weight), []).append(module)
    found = [(name, module) for name, module in network.named_modules() if type(module) is nn.Linear]
    replaced = 0
    for name, module in found:
        others = [other for other in uses[id(module.weight)] if other is not module]
        if not others:
            weight = module.weight
            sizes = module.in_features, module.out_features
            ours: nn.Module = TreeLinear(*sizes, bias=module.bias is not None, dtype=weight.dtype, method=method)
        elif module.bias is None and len(others) == 1 and isinstance(others[0], nn.Embedding):
            ours = TreeTiedHead(others[0], method)
        else:
            continue
        network.set_submodule(name, ours)
        replaced += 1
    return replaced


def materialise(network: nn.Module, device: torch.device) -> None:
    """Uninitialised parameters and buffers where there are meta ones; what was shared is shared."""
    made: dict[int, Any] = {}

    def real(x: Tensor) -> Any:
        if id(x) not in made:
            empty = torch.empty_like(x, device=device)
            made[id(x)] = nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty
        return made[id(x)]

    kept = []  # so that no id is given twice
    for module in network.modules():
        for store in (module._parameters, module._buffers):
            for name, x in store.items():
                if x is not None and x.is_meta:
                    kept.append(x)
                    store[name] = real(x)


class TreeWeights:
    """What a WeightMap is to a network of ours."""

    fused: ClassVar[Mapping[str, Sequence[str]]] = {}  # a module of theirs is one of ours

    def __init__(self, network: Any):
        """network: transformers' model with its head, as it was made: nothing is replaced yet."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(network) or []
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = network.base_model_prefix
        self._names = dict.fromkeys(network.state_dict(), True)
        self._unused = [re.compile(pattern) for pattern in network._keys_to_ignore_on_load_unexpected or ()]
        first: dict[int, str] = {}
        named = sorted(network.named_parameters(remove_duplicate=False), key=self._is_head)  # as `destinations` names
        self._aliases = {name: first.setdefault(id(parameter), name) for name, parameter in named}

    def _is_head(self, named: tuple[str, Any]) -> bool:
        return not named[0].startswith(f"{self._prefix}.")

    def places(self, model: Any) -> dict[str, tuple[str, str]]:
        """{module of the checkpoint: (module of ours, "")}."""
        return {model.theirs(name): (name, "") for name, module in model.named_modules() if _has_own(module)}

    def destinations(self, model: Any) -> dict[str, Destination]:
        found, filled = {}, set()
        for ours, module in model.named_modules():
            own = {name: x for name, x in module.named_parameters(recurse=False) if id(x) not in filled}
            filled.update(map(id, own.values()))
            theirs = f"{model.theirs(ours)}."
            if isinstance(module, Linear | TiedLMHead):
                for to in destinations_of(module, "", own):
                    found[theirs + to.spec.name] = to
                continue
            for name, x in {**own, **_kept_buffers(module)}.items():
                spec = TensorSpec(name, tuple(x.shape), None if x.is_floating_point() else x.dtype)
                found[theirs + name] = Destination(spec, x.data.copy_, None, x.data)
        return found

    def kept_in(self, module: str) -> str:
        return module

    def parts(self, module: str, rows: Tensor) -> Mapping[str, Tensor]:
        return {module: rows}

    def tensors(self, model: Any) -> dict[str, Tensor]:
        return {name: to.view for name, to in self.destinations(model).items() if to.view is not None}

    def renamed(self, model: Any, tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
        """Under the names of modules, each once. What is made of several tensors comes last, and is kept in memory
        until then; buffers that the file lacks have the values that they were made with."""
        given: set[str] = set()
        several: dict[str, list[tuple[str, str, Tensor]]] = {}  # name of a parameter: what it is made of
        file = Path()
        for name, tensor, file in tensors:  # the last file is named for what was made of several
            key, pattern = self._rename(name)
            if key not in self._names and any(unused.search(name) for unused in self._unused):
                continue
            if pattern is not None:
                read = tensor if isinstance(tensor, Tensor) else tensor.read().clone()
                several.setdefault(key, []).append((name, pattern, read))
            elif (key := self._aliases.get(key, key)) not in given:
                given.add(key)
                yield key, tensor, file
        for key in list(several):
            for target, value in self._converted(model, key, several.pop(key)):
                given.add(target := self._aliases.get(target, target))
                yield target, value, file
        for ours, module in model.named_modules():
            for name, x in _kept_buffers(module).items():
                if (key := f"{model.theirs(ours)}.{name}") not in given:
                    yield key, x.clone(), file

    def _rename(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        key, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._names)
        if key not in self._names and name in self._names:  # it was no other's name
            return rename_source_key(name, [], [], self._prefix, self._names)
        return key, pattern

    def _converted(self, model: Any, key: str, parts: list[tuple[str, str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import dot_natural_key

        parts.sort(key=lambda part: dot_natural_key(part[0]))  # expert 2 before expert 10
        converter = deepcopy(next(c for c in self._converters if parts[0][1] in c.source_patterns))
        for name, pattern, tensor in parts:
            converter.add_tensor(key, name, pattern, tensor)
        for target, value in converter.convert(key, model=model.lm, config=model.lm.config).items():
            yield target, value[0] if isinstance(value, list) else value


def _has_own(module: nn.Module) -> bool:
    return bool(module._parameters) or isinstance(module, Linear | TiedLMHead)


def _kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Those that a checkpoint has."""
    left_out = module._non_persistent_buffers_set
    return {name: x for name, x in module._buffers.items() if x is not None and name not in left_out}
