"""The header of a GGUF file: metadata and the place of each tensor.

Our own reader, because `gguf.GGUFReader` makes a numpy array of each string (2.8 s for a vocabulary of 49,152; here
0.1 s) and returns short views past the end of a truncated file. Types and their block sizes come from the `gguf`
package, and so does dequantising.

Layout: magic, version, counts, key-value pairs, tensor infos, padding, data. Dimensions are stored fastest first, the
reverse of torch's order.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # torch's order: slowest dimension first
    type_id: int  # gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def type_name(self) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type_id).name


class GGUFFile:
    """`metadata` {key: value} and `tensors` {name: TensorInfo}; raises ModelError for anything that is not whole."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise ModelError(f"{path}: cannot be opened ({e})") from None
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as e:
            raise ModelError(f"{path}: truncated or corrupt header ({e}). Fetch the file again") from None

    def bytes_of(self, info: TensorInfo) -> np.ndarray:
        """The tensor's stored bytes, uint8 [rows, bytes a row] (a view of the file)."""
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        return raw.reshape(*info.shape[:-1], -1)

    def _read(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it does not begin with the letters GGUF)")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ModelError(f"{self.path}: {kind} GGUF is not supported, only little-endian versions 2 and 3")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._place(name, shape, kind, start + at) for name, shape, kind, at in infos}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise struct.error(f"a text of {length} bytes runs past the end")
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self._at)
            self._at += struct.calcsize(f"<{length}{_SCALARS[kind]}")
            return list(values)
        return [self._value(kind) for _ in range(length)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("I")
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES

        if type_id not in GGML_QUANT_SIZES:
            raise ModelError(f'{self.path}: tensor "{name}" has the unknown type {type_id}. Is the gguf package old?')
        block, size = GGML_QUANT_SIZES[type_id]
        num_bytes = int(np.prod(shape)) // block * size
        if offset + num_bytes > len(self._data):
            raise ModelError(
                f'{self.path}: truncated: tensor "{name}" ends at byte {offset + num_bytes:,}, the file at '
                f"{len(self._data):,}. Fetch the file again"
            )
        return TensorInfo(name, shape, type_id, offset, num_bytes)
