"""From names of a checkpoint to places in our parameters: a table and two small walks over it.

`destinations` turns the table into {checkpoint name: view of a parameter}; to load is then to copy each tensor to its
view. Missing, unexpected and misshapen tensors fall out of comparing two sets of names, with no code for each family.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError

EXPERT = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.\d+\.(?P<part>gate|up|down)_proj\.weight")
KINDS = ("weight", "bias", "codes", "scales", "minima")  # the last three: a weight in 4 or 8 bits


@dataclass(frozen=True, slots=True)
class WeightMap:
    """{module of the checkpoint: (module of ours, part of its rows)}; `layer` is below {layers}.{i}."""

    top: Mapping[str, tuple[str, str]]
    layer: Mapping[str, tuple[str, str]]
    layers: str = "model.layers"

    def places(self, model: nn.Module) -> dict[str, tuple[str, str]]:
        """{module of the checkpoint: (module of ours, part of its rows)}, each layer's written out. Of layers that
        differ, each has what it has."""
        places, ours = dict(self.top), dict(model.named_modules())
        for i in range(len(model.layers)):
            places |= {f"{self.layers}.{i}.{theirs}": (f"layers.{i}.{m}", p) for theirs, (m, p) in self.layer.items()}
        return {theirs: place for theirs, place in places.items() if place[0] in ours}

    def destinations(self, model: nn.Module) -> dict[str, Tensor]:
        """Shared parameters (a tied LM head) appear once, under the first name. A module's rows are a slice; of a stack
        of matrices, the matrix's number and a slice."""
        places = self.places(model)
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        found = {}
        for theirs, (ours, part) in places.items():
            for kind in KINDS:
                if (parameter := parameters.get(f"{ours}.{kind}")) is not None:
                    rows = modules[ours].rows[part] if part else slice(None)
                    found[f"{theirs}.{kind}"] = parameter.data[rows]
        return found


def load_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor, Path]], where: Path) -> None:
    """Fill `model` from (name, tensor, file), casting to the model's dtype. Raises ModelError unless the names and
    shapes agree exactly. `where` names the checkpoint as a whole."""
    waiting = model.checkpoint_tensors()
    unexpected = []
    with torch.no_grad():
        for name, tensor, file in by_expert(tensors):
            # A decoder that was saved without its head has the same names without their first part.
            place = waiting.pop(name if name in waiting else f"model.{name}", None)
            if place is None:
                unexpected += [] if derived(name, model) else [f'"{name}" in {file}']
                continue
            if place.shape != tensor.shape:
                raise ModelError(
                    f'{file}: tensor "{name}" has shape {list(tensor.shape)}, config.json asks for {list(place.shape)}'
                )
            place.copy_(tensor)
    if waiting:
        raise ModelError(f"{where}: {len(waiting)} tensors are missing: {_some(waiting)}. Is the download complete?")
    if unexpected:
        architecture = model.spec.architecture
        raise ModelError(f"{len(unexpected)} tensors do not belong to {architecture}: {_some(unexpected)}")


MIXTRAL_NAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
ALL_EXPERTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}


def by_expert(tensors: Iterable[tuple[str, Tensor, Path]]) -> Iterator[tuple[str, Tensor, Path]]:
    """Each expert's matrices apart and under the names that Qwen3-MoE's checkpoints have: from Mixtral's own names, and
    from transformers 5's tensors of all experts, [experts, rows, n_in]."""
    for name, tensor, file in tensors:
        if ".block_sparse_moe." in name:
            for theirs, ours in MIXTRAL_NAMES.items():
                name = name.replace(theirs, ours)
        kind = next((kind for kind in ALL_EXPERTS if name.endswith(kind)), None)
        if kind is None:
            yield name, tensor, file
            continue
        prefix, parts = name.rpartition(".")[0], ALL_EXPERTS[kind]
        for e, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{prefix}.{e}.{part}.weight", rows, file


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
