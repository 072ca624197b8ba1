"""From names of a checkpoint to places in our parameters: a table and two small walks over it.

`destinations` turns the table into {checkpoint name: where it goes}; to load is then to read of each tensor what a
layer asks for, and to put it there. Missing, unexpected and misshapen tensors fall out of comparing two sets of names,
with no code for each family, nor for each format: what a matrix is kept in is declared by its layer's method
(minivllm/layers/stored.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.layers.stored import ANY, Axis, Cut, Destination, Shard, TensorSpec, cut, whole
from minivllm.parallel.placement import Placement

EXPERT = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.\d+\.(?P<part>gate|up|down)_proj\.weight")
# The last of DeepSeek V3's routers, and of layers with a recurrent state.
KINDS = ("weight", "bias", "e_score_correction_bias", "A_log", "dt_bias", "D")


@dataclass(frozen=True, slots=True)
class WeightMap:
    """{module of the checkpoint: (module of ours, part of its rows)}; `layer` is below {layers}.{i}.

    fused: {module: those that the checkpoint keeps as this one, their outputs in this order}; the parts are in `layer`.
    """

    top: Mapping[str, tuple[str, str]]
    layer: Mapping[str, tuple[str, str]]
    layers: str = "model.layers"
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def places(self, model: nn.Module) -> dict[str, tuple[str, str]]:
        """{module of the checkpoint: (module of ours, part of its rows)}, each layer's written out. Of layers that
        differ, each has what it has."""
        return self._places(model, dict(model.named_modules()))

    def _places(self, model: nn.Module, ours: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
        places, first = dict(self.top), getattr(model, "first_layer", 0)
        for i in range(len(model.layers)):
            name = f"{self.layers}.{first + i}"
            places |= {f"{name}.{theirs}": (f"layers.{i}.{m}", part) for theirs, (m, part) in self.layer.items()}
        return {theirs: (m, part) for theirs, (m, part) in places.items() if m in ours and _has(ours[m], part)}

    def destinations(self, model: nn.Module) -> dict[str, Destination]:
        """Shared parameters (a tied LM head), and places that have two names, appear once, under the first name."""
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        found, filled = {}, set()
        for theirs, (ours, part) in self._places(model, modules).items():
            if (ours, part) in filled:
                continue
            filled.add((ours, part))
            own = {name: parameters.get(f"{ours}.{name}") for name in KINDS}
            for destination in destinations_of(modules[ours], part, own):
                found[f"{theirs}.{destination.spec.name}"] = destination
        return found

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """{checkpoint name: the part of a parameter that it fills}, where it fills one."""
        return {name: to.view for name, to in self.destinations(model).items() if to.view is not None}

    def read(self, tensors: Iterable[tuple[str, Any, Path]]) -> Iterable[tuple[str, Any, Path]]:
        """Those of a checkpoint, (name, tensor, file), as this table has them: a family whose files lay matrices out
        otherwise overrides it, and what follows."""
        return tensors

    def kept_in(self, module: str) -> str:
        """The module of the files that this one of the table is, or is a part of."""
        return module

    def parts(self, module: str, rows: Tensor) -> Mapping[str, Tensor]:
        """rows [outputs, ...] of a module of the files -> by the table's modules, those of each."""
        return {module: rows}


class Network(nn.Module):
    """What a WeightMap fills. Parameters are uninitialised: fill every tensor of `checkpoint_tensors()`, then call
    `finish()`."""

    weights: WeightMap
    stack = "layers."  # how the names of modules begin that an adapter may change

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """{name of the checkpoint: the part of a parameter that it fills}."""
        return self.weights.tensors(self)

    def checkpoint_modules(self) -> dict[str, tuple[str, str]]:
        """{module of the checkpoint: (our module that holds it, which part of its rows)}."""
        return self.weights.places(self)

    def renamed(self, tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
        """(name, tensor, file) of a checkpoint, under the names that `weights` has."""
        own = self.weights.read(by_expert(tensors))
        return unfused(own, self.weights.fused, self.weights.destinations(self))

    def finish(self) -> None:
        """Every weight is loaded: repack."""
        for module in list(self.modules()):
            if module is not self and hasattr(module, "finish"):
                module.finish()


def _has(module: nn.Module, part: str) -> bool:
    """Of a stack of experts, some may be on other ranks."""
    return not part or part in getattr(module, "rows", (part,))


def is_part(model: nn.Module) -> bool:
    """Whether other ranks hold what this model lacks."""
    return getattr(model, "placement", Placement()).size > 1


def whole_of(model: nn.Module) -> nn.Module:
    """The model of which a rank's is a part, without memory for its parameters."""
    return type(model)(model.spec, model.dtype, torch.device("meta"))


def destinations_of(
    module: nn.Module, part: str, parameters: Mapping[str, nn.Parameter | None]
) -> Iterator[Destination]:
    """Of one matrix. A module's rows are a slice; of a stack of matrices, the matrix's number and a slice."""
    found = {name: parameter.data for name, parameter in parameters.items() if parameter is not None}
    views = {name: parameter[module.rows[part]] for name, parameter in found.items()} if part else found
    shard, held = getattr(module, "shards", {}).get(part), getattr(module, "held", None)
    declared = module.declared(part) if hasattr(module, "declared") else _plain(views, shard)
    for spec in declared:
        view = views.get(spec.name)
        if view is not None:
            yield Destination(spec, view.copy_, cut(spec, shard), view)
        elif held is not None:
            yield Destination(spec, partial(held[part].__setitem__, spec.name), cut(spec, shard), None)


def _plain(views: Mapping[str, Tensor], shard: Shard | None) -> Iterator[TensorSpec]:
    """Of a module that has no QuantMethod: its parameters as they are."""
    for name, view in views.items():
        sizes = (whole(view.shape[0], "outputs", shard), *view.shape[1:])
        yield TensorSpec(name, sizes, inputs=Axis(1) if view.dim() > 1 else None)


def load_tensors(model: nn.Module, tensors: Iterable[tuple[str, Any, Path]], where: Path) -> None:
    """Fill `model` from (name, tensor, file), where a tensor that still lies in its file (StoredTensor) is read only as
    far as the model holds it; parameters cast to the model's dtype. Raises ModelError unless the names and shapes agree
    exactly. `where` names the checkpoint as a whole."""
    waiting = model.weights.destinations(model)
    elsewhere = whole_of(model).checkpoint_modules() if is_part(model) else {}
    unexpected = []
    with torch.no_grad():
        for name, tensor, file in model.renamed(tensors):
            # A decoder that was saved without its head has the same names without their first part.
            to = waiting.pop(name if name in waiting else f"model.{name}", None)
            if to is None:
                unexpected += [] if derived(name, model) or _module(name) in elsewhere else [f'"{name}" in {file}']
                continue
            check_shape(name, tensor.shape, to.spec.shape, file)
            to.put(_checked(name, _read(tensor, to.cut), to.spec, file))
    if waiting := {name: to for name, to in waiting.items() if not to.spec.optional}:
        raise ModelError(f"{where}: {len(waiting)} tensors are missing: {_some(waiting)}. Is the download complete?")
    if unexpected:
        architecture = model.spec.architecture
        raise ModelError(f"{len(unexpected)} tensors do not belong to {architecture}: {_some(unexpected)}")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def check_shape(name: str, found: Sequence[int], asked: Sequence[int], file: Path) -> None:
    fits = len(found) == len(asked) and all(size in (there, ANY) for there, size in zip(found, asked, strict=True))
    if not fits and {tuple(found), tuple(asked)} != {(), (1,)}:  # one number either way
        raise ModelError(f'{file}: tensor "{name}" has shape {list(found)}, config.json asks for {list(asked)}')


def _read(tensor: Any, part: Cut | None) -> Tensor:
    if part is not None:
        tensor = tensor.narrow(part.axis, part.start, part.stop - part.start)
    return tensor if isinstance(tensor, Tensor) else tensor.read()


def _checked(name: str, tensor: Tensor, spec: TensorSpec, file: Path) -> Tensor:
    fits = tensor.is_floating_point() if spec.dtype is None else tensor.dtype == spec.dtype
    if not fits:
        asked = "numbers with a fraction" if spec.dtype is None else str(spec.dtype).removeprefix("torch.")
        raise ModelError(f'{file}: tensor "{name}" is {str(tensor.dtype).removeprefix("torch.")}, and must be {asked}')
    return tensor


def unfused(
    tensors: Iterable[tuple[str, Any, Path]], fused: Mapping[str, Sequence[str]], to: Mapping[str, Destination]
) -> Iterator[tuple[str, Any, Path]]:
    """Each part of a fused matrix under its own name, whatever its format: of a tensor that has outputs its own of
    them, of others all."""
    for name, tensor, file in tensors:
        module, kind = _module(name), name.rpartition(".")[2]
        whole_name = next((own for own in fused if module.endswith(f".{own}")), None)
        if whole_name is None:
            yield name, tensor, file
            continue
        prefix = module.removesuffix(whole_name)
        parts = [f"{prefix}{part}.{kind}" for part in fused[whole_name]]
        found = [to.get(part) or to.get(f"model.{part}") for part in parts]
        if None in found:  # of another stage, or of nobody
            yield parts[0], tensor, file
            continue
        yield from _parts(name, tensor, file, parts, [destination.spec for destination in found])


def _parts(
    name: str, tensor: Any, file: Path, parts: Sequence[str], specs: Sequence[TensorSpec]
) -> Iterator[tuple[str, Any, Path]]:
    along = specs[0].outputs
    if along is None:
        yield from ((part, tensor, file) for part in parts)
        return
    sizes = [spec.shape[along.axis] for spec in specs]
    whole_shape = [*specs[0].shape]
    whole_shape[along.axis] = sum(sizes)
    check_shape(name, tensor.shape, whole_shape, file)
    for part, size, start in zip(parts, sizes, accumulate(sizes, initial=0), strict=False):
        yield part, tensor.narrow(along.axis, start, size), file


def fuse(tensors: Mapping[str, Tensor], fused: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """The other way: {name: tensor} of parts, as a checkpoint keeps them."""
    found = dict(tensors)
    for whole_name, (first, *others) in fused.items():
        for name in [name for name in tensors if _module(name).endswith(f".{first}")]:
            prefix, kind = _module(name).removesuffix(first), name.rpartition(".")[2]
            rest = [found.pop(f"{prefix}{part}.{kind}") for part in others]
            found[f"{prefix}{whole_name}.{kind}"] = torch.cat([found.pop(name), *rest])
    return found


MIXTRAL_NAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
MIXTRAL_NAMES |= {".router.layer.": ".router."}  # Granite's
ALL_EXPERTS = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
    ".mlp.input_linear.weight": ("gate_proj", "up_proj"),
    ".mlp.output_linear.weight": ("down_proj",),
}


def by_expert(tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
    """Each expert's matrices apart and under the names that Qwen3-MoE's checkpoints have: from Mixtral's own names, and
    from transformers 5's and Granite's tensors of all experts, [experts, rows, n_in]."""
    for name, tensor, file in tensors:
        if ".block_sparse_moe." in name:
            for theirs, ours in MIXTRAL_NAMES.items():
                name = name.replace(theirs, ours)
        kind = next((kind for kind in ALL_EXPERTS if name.endswith(kind)), None)
        if kind is None:
            yield name, tensor, file
            continue
        prefix, parts = f"{name.removesuffix(kind)}.mlp.experts", ALL_EXPERTS[kind]
        for e in range(tensor.shape[0]):
            matrix = tensor.select(0, e)
            rows = matrix.shape[0] // len(parts)
            for i, part in enumerate(parts):
                yield f"{prefix}.{e}.{part}.weight", matrix.narrow(0, i * rows, rows), file


def of_all_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way: what has an expert's number, as transformers 5's modules hold it."""
    found, matrices = {}, defaultdict(list)
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            matrices[match["prefix"], match["part"]].append(tensor)
        else:
            found[name] = tensor
    for (prefix, part), own in matrices.items():
        if part != "up":
            both = own if part == "down" else map(torch.cat, zip(own, matrices[prefix, "up"], strict=True))
            found[f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"] = torch.stack(list(both))
    return found


def derived(name: str, model: nn.Module) -> bool:
    """Tensors that some checkpoints carry though others of them determine the value, or though nobody asks for it."""
    if name.endswith("rotary_emb.inv_freq") or name in getattr(model, "unused", ()):
        return True
    return name == "lm_head.weight" and (model.spec.tie_embeddings or not model.spec.has_head)


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
