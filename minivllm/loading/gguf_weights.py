"""The tensors of a GGUF file under the names of Hugging Face, straight from the mapped file.

Where each of them lies was written down when the file was first seen (INDEX, gguf_convert.py), so that a start reads
no header: to get past a vocabulary of 150,000 texts takes longer than to read the weights. Nothing is copied here but
the rows of q and k of the `llama` architecture, which llama.cpp's converter reorders so that its rotary embedding can
rotate neighbours: `unpermute` puts them back. Blocks stay blocks under that: it moves whole rows.

The file must stay as it is while it is mapped: a new version goes under a new name, or is moved into its place.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.files import read_json
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.models.gguf import CHANGES
from minivllm.quantization.gguf import PLAIN, dequantise

INDEX = "tensors.json"


class Place(NamedTuple):
    """A tensor in the file."""

    name: str  # Hugging Face's
    kind: str  # of blocks: a name of gguf.GGMLQuantizationType
    shape: list[int]  # Hugging Face's, in torch's order: slowest dimension first
    offset: int  # from the start of the file
    num_bytes: int
    heads: int  # in which its rows were reordered; 0: they were not
    change: str = ""  # to its numbers: one of CHANGES


def write_index(folder: Path, places: Iterable[Place]) -> None:
    lines = ",\n".join(json.dumps(place) for place in places)
    (folder / INDEX).write_text(f"[\n{lines}\n]\n")


class GGUFWeights:
    """folder: holds INDEX. Raises ModelError for a file that has become shorter."""

    def __init__(self, path: Path, folder: Path):
        self.path = path
        self.places = [Place(*values) for values in read_json(folder / INDEX, list)]
        try:
            with open(path, "rb") as file:  # pages that are written to would be copies of our own; none is
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as e:
            raise ModelError(f"{path}: cannot be opened ({e})") from None
        for place in self.places:
            if (end := place.offset + place.num_bytes) > len(self._map):
                raise ModelError(
                    f'{path}: truncated: tensor "{place.name}" ends at byte {end:,}, the file at '
                    f"{len(self._map):,}. Fetch the file again"
                )
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def matrices(self) -> dict[str, Place]:
        """{module of the checkpoint: where its matrix is}, of any kind: F16 and the like are kinds, too."""
        return {
            place.name.removesuffix(".weight"): place
            for place in self.places
            if len(place.shape) == 2 and place.name.endswith(".weight")
        }

    def blocks(self, place: Place) -> Blocks:
        return Blocks(place.kind, self.rows(place))

    def tensors(
        self, skip: Collection[str] = (), dtype: torch.dtype = torch.float32, as_stored: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """(name, tensor, file) but of the names in `skip`. What is stored as numbers is a view of the file: copy it;
        blocks are de-quantised into `dtype`, but of the names in `as_stored`: these are views, uint8 [rows, bytes]."""
        for place in self.places:
            if place.name not in skip:
                is_kept = place.name in as_stored
                yield place.name, self.rows(place) if is_kept else self._values(place, dtype), self.path

    def rows(self, place: Place) -> Tensor:
        """uint8 [rows, bytes a row], in the order of Hugging Face. Of a vector each number is a row."""
        count = math.prod(place.shape if place.kind in PLAIN and len(place.shape) == 1 else place.shape[:-1])
        raw = self._bytes[place.offset : place.offset + place.num_bytes].view(count, -1)
        return unpermute(raw, place.heads) if place.heads else raw

    def release(self) -> None:
        """Give back the memory of what was read: views are read from the file again when they are next looked at."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _values(self, place: Place, dtype: torch.dtype) -> Tensor:
        try:
            values = dequantise(Blocks(place.kind, self.rows(place)), dtype).view(place.shape)
        except NotImplementedError:
            raise ModelError(
                f'{self.path}: tensor "{place.name}" has type {place.kind}, which cannot be dequantised'
            ) from None
        return CHANGES[place.change](values)


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """[heads * head_size, ...]: the two of each pair, neighbours in GGUF, go back to the two halves of their head."""
    pairs = rows.unflatten(0, (num_heads, -1, 2))  # [heads, head_size / 2, 2, ...]
    return pairs.transpose(1, 2).flatten(0, 2)
