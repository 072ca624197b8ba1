"""Reading safetensors with errors that name the file, and writing them one tensor at a time.

The format: 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, then the data.
The library's own writer wants all tensors in memory at once; a conversion has them one after another.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.files import inside, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint: one, or the shards that its index names."""
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f'{folder / INDEX}: no "weight_map". Fetch the file again')
        shards = tuple(inside(folder, name, folder / INDEX) for name in sorted(set(map(str, names.values()))))
        if missing := [s.name for s in shards if not os.path.isfile(s)]:
            raise ModelError(f"{folder}: shards named by {INDEX} are missing: {', '.join(missing)}. Fetch them")
        return shards
    if pickles := sorted(p.name for p in folder.glob("*.bin")):
        raise ModelError(
            f"{folder}: holds only pickled weights ({pickles[0]}), which may run code when opened. Convert them: "
            'transformers\' AutoModelForCausalLM.from_pretrained(folder).save_pretrained("new-folder")'
        )
    raise ModelError(f"{folder}: no {SINGLE} and no {INDEX}. Is the download complete?")


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor, Path]]:
    """(name, tensor, file); the tensors are views of the mapped file: copy them."""
    return ((name, tensor.read(), path) for name, tensor, path in stored_tensors(files))


class StoredTensor:
    """A tensor in an open file, or a part of one: as torch's `select` and `narrow` say, of which nothing is read before
    `read`, and then no more than the part."""

    def __init__(self, file: Any, name: str, path: Path):
        self._file, self._name, self._path = file, name, path
        self._stored = file.get_slice(name)
        self._index = [slice(0, size) for size in self._stored.get_shape()]
        self._axes = list(range(len(self._index)))  # of the stored tensor's, that this one has

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._index[axis].stop - self._index[axis].start for axis in self._axes)

    def narrow(self, axis: int, start: int, length: int) -> StoredTensor:
        part, of = copy(self), self._axes[axis]
        first = self._index[of].start + start
        part._index = [*self._index[:of], slice(first, first + length), *self._index[of + 1 :]]
        return part

    def select(self, axis: int, index: int) -> StoredTensor:
        part = self.narrow(axis, index, 1)
        part._axes = [*self._axes[:axis], *self._axes[axis + 1 :]]
        return part

    def read(self) -> Tensor:
        """A view of the mapped file where it can be: copy it. Raises ModelError."""
        with _named(self._path):
            if self.shape == tuple(self._stored.get_shape()):
                return self._file.get_tensor(self._name)
            return self._stored[tuple(self._index)].view(self.shape)


def stored_tensors(files: Iterable[Path]) -> Iterator[tuple[str, StoredTensor, Path]]:
    """(name, tensor, file). A tensor can be read until the next one is asked for."""
    for path in files:
        with _named(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a dict
                yield name, StoredTensor(file, name, path), path


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path}: truncated or corrupt ({e}). Fetch the file again") from None


class Entry(NamedTuple):
    """A tensor that `write_tensors` will be given."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


_NAMES = {
    **{torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.uint8: "U8", torch.int8: "I8"},
}


def write_tensors(path: Path, entries: list[Entry], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which come in the order and shape of `entries`."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for entry in entries:
        end = offset + int(np.prod(entry.shape)) * entry.dtype.itemsize
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    if (free := shutil.disk_usage(path.parent).free) < offset:
        raise OSError(errno.ENOSPC, f"{offset:,} bytes needed, {free:,} free", str(path))
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert tensor.shape == entry.shape and tensor.dtype == entry.dtype, entry
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
