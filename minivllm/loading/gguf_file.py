"""The header of a GGUF file: metadata and the place of each tensor.

Our own reader, because `gguf.GGUFReader` makes a numpy array of each string (2.8 s for a vocabulary of 49,152; here
0.1 s) and returns short views past the end of a truncated file. Types and their block sizes come from the `gguf`
package, and so does dequantising.

Layout: magic, version, counts, key-value pairs, tensor infos, padding, data. Dimensions are stored fastest first, the
reverse of torch's order.

A file may come from anywhere. What a header costs is bounded by MAX_HEADER, whatever its counts say: numbers stay in
the file, texts become at most seven times their bytes. Arrays of arrays are refused, as by llama.cpp (gguf.cpp).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.quantization.gguf import dequantise

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
MAX_HEADER = 64 << 20  # bytes; a vocabulary of 260,000 texts with its merges takes 16 MB
MAX_DIMS = 4  # ggml's

LIST = (list, memoryview)  # of texts, or of numbers as they lie in the file


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
    """`metadata` {key: number, text, list of texts or view of numbers} and `tensors` {name: TensorInfo}; raises
    ModelError for anything that is not whole."""

    def __init__(self, path: Path):
        self.path = path
        self.read: set[str] = set()  # keys that were asked for
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as e:
            raise ModelError(f"{path}: cannot be opened ({e})") from None
        self._at, self._end = 0, min(len(self._data), MAX_HEADER)
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError) as e:
            raise ModelError(f"{path}: truncated or corrupt header ({e}). Fetch the file again") from None

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """metadata[key]. Raises ModelError for one of another kind, so that its users need not ask."""
        self.read.add(key)
        value = self.metadata.get(key, default)
        if value is default or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise ModelError(f'{self.path}: metadata "{key}" is of the wrong kind ({type(value).__name__})')

    def texts(self, key: str) -> Sequence[str]:
        """metadata[key], a list of texts; without the key an empty one."""
        return self.value(key, list, ())

    def bytes_of(self, info: TensorInfo) -> Tensor:
        """The tensor's stored bytes, uint8 [..., bytes a row] (a view of the file)."""
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
        return raw.view(*info.shape[:-1], -1)

    def numbers(self, name: str) -> Tensor:
        """A tensor, de-quantised."""
        info = self.tensors[name]
        return dequantise(Blocks(info.type_name, self.bytes_of(info))).view(info.shape)

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
        alignment = self.value("general.alignment", int, 32)
        if alignment <= 0 or alignment % 8:
            raise ModelError(f"{self.path}: general.alignment is {alignment}, and must be a multiple of 8")
        start = -(-self._at // alignment) * alignment
        if odd := next((name for name, *_, at in infos if at % alignment), None):
            raise ModelError(f'{self.path}: tensor "{odd}" does not begin at a multiple of {alignment} bytes')
        self.tensors = {name: self._place(name, shape, kind, start + at) for name, shape, kind, at in infos}

    def _take(self, num_bytes: int) -> int:
        """Where the next bytes of the header begin."""
        at, self._at = self._at, self._at + num_bytes
        if self._at > self._end:
            what = f"longer than {MAX_HEADER:,} bytes" if self._end < len(self._data) else "runs past the end"
            raise struct.error(f"{num_bytes:,} bytes at byte {at:,}: {what}")
        return at

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self._data, self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        at = self._take(length)
        return self._data[at : at + length].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return [self._string() for _ in range(length)]
        num_bytes = length * struct.calcsize(_SCALARS[kind])  # a KeyError for arrays of arrays
        at = self._take(num_bytes)
        return memoryview(self._data)[at : at + num_bytes].cast(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("I")
        if num_dims > MAX_DIMS:
            raise ModelError(f'{self.path}: tensor "{name}" has {num_dims} dimensions, and at most {MAX_DIMS} can be')
        dims = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, dims[::-1], self._scalar("I"), self._scalar("Q")

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES

        if type_id not in GGML_QUANT_SIZES:
            raise ModelError(f'{self.path}: tensor "{name}" has the unknown type {type_id}. Is the gguf package old?')
        block, size = GGML_QUANT_SIZES[type_id]
        if min(shape, default=0) <= 0 or shape[-1] % block:
            raise ModelError(
                f'{self.path}: tensor "{name}" has the impossible shape {list(shape)}. Fetch the file again'
            )
        num_bytes = math.prod(shape) // block * size
        if offset + num_bytes > len(self._data):
            raise ModelError(
                f'{self.path}: truncated: tensor "{name}" ends at byte {offset + num_bytes:,}, the file at '
                f"{len(self._data):,}. Fetch the file again"
            )
        return TensorInfo(name, shape, type_id, offset, num_bytes)
