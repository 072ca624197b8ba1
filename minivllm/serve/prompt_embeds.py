"""Reading the `prompt_embeds` of /v1/completions: a tensor as `torch.save` writes it, in base64 (vLLM's form).

What torch reads there is a language: a pickle in a ZIP file, which may name code, ask for more memory than was sent, or
for numbers that lie outside of it (CVE-2025-62164 was such a tensor, read with weights_only). So torch is not asked. Of
ZIP files only stored entries are read; of pickles only those operations and names that one dense tensor takes; of
tensors only contiguous ones that lie within what came.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from minivllm.engine.prompt_embeds import KEY, as_rows
from minivllm.errors import BadRequest

MOST_PICKLE = 4096  # bytes; that of a tensor has some 300
MOST_ENTRIES = 64  # of the file; there are some 7
OPERATIONS = {
    *("PROTO", "FRAME", "STOP", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID", "BINUNICODE", "SHORT_BINUNICODE"),
    *("MARK", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2", "LONG1"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
}
DTYPES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": "<u2"}


class Storage(NamedTuple):
    kind: str
    entry: str


class Dense(NamedTuple):
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_embeds(text: str, width: int, max_length: int) -> np.ndarray:
    """text: base64. -> [length, width] float32. Raises BadRequest for anything but one dense tensor of that width."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _refuse("is not base64")
    return as_rows(read_tensor(data), width, max_length)


def read_tensor(data: bytes) -> np.ndarray:
    """data: of a file that torch.save wrote. Raises BadRequest. It takes no more memory than a few times the data."""
    if data.count(b"PK\x01\x02") > MOST_ENTRIES:  # each entry of a ZIP file's list begins with it
        _refuse("is a file of too many entries")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries = {info.filename.partition("/")[2]: info for info in file.infolist()}
            _check(all(_is_stored(info, len(data)) for info in entries.values()), "has compressed entries")
            _check(file.read(entries["byteorder"]) == b"little" if "byteorder" in entries else True, "is big-endian")
            _check(entries["data.pkl"].file_size <= MOST_PICKLE, "holds more than a tensor")
            dense = _read_pickle(file.read(entries["data.pkl"]))
            return _numbers(dense, file.read(entries[f"data/{dense.storage.entry}"]))
    except BadRequest:
        raise
    except Exception as error:  # whatever a file that is no file of torch.save makes of three readers
        _refuse(f"is no tensor as torch.save writes it ({type(error).__name__})")


def _is_stored(info: zipfile.ZipInfo, most: int) -> bool:
    return info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size <= most


def _read_pickle(data: bytes) -> Dense:
    """Looked through before anything of it is done."""
    foreign = {operation.name for operation, *_ in pickletools.genops(data)} - OPERATIONS
    _check(not foreign, f"holds more than a tensor ({', '.join(sorted(foreign))})")
    dense = _Unpickler(io.BytesIO(data)).load()
    _check(isinstance(dense, Dense) and isinstance(dense.storage, Storage), "holds no dense tensor")
    return dense


class _Unpickler(pickle._Unpickler):  # the one in Python: the one in C makes room for as many values as a file says
    def find_class(self, module: str, name: str) -> Callable[..., Any] | str:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _dense
        if (module, name) == ("collections", "OrderedDict"):
            return _no_hooks
        if module == "torch" and name in DTYPES:
            return name
        _refuse(f"must be a dense tensor of floating-point numbers, and names {module}.{name}"[:200])

    def persistent_load(self, key: Any) -> Storage:
        what, kind, entry, _, _ = key
        _check(what == "storage" and kind in DTYPES and isinstance(entry, str), "holds no tensor's storage")
        return Storage(kind, entry)


def _dense(storage: Storage, offset: int, shape: tuple, strides: tuple, *_: Any) -> Dense:
    return Dense(storage, offset, shape, strides)


def _no_hooks() -> tuple:
    return ()


def _numbers(dense: Dense, content: bytes) -> np.ndarray:
    offset, shape, strides = dense.offset, dense.shape, dense.strides
    _check(all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)), "has no sizes")
    dtype = np.dtype(DTYPES[dense.storage.kind])
    contiguous = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    _check(all(a == b or n == 1 for n, a, b in zip(shape, strides, contiguous, strict=True)), "is not contiguous")
    _check((offset + math.prod(shape)) * dtype.itemsize <= len(content), "lies outside of its storage")
    flat = np.frombuffer(content, dtype, math.prod(shape), offset * dtype.itemsize)
    if dense.storage.kind == "BFloat16Storage":
        flat = (flat.astype("<u4") << 16).view("<f4")
    return flat.reshape(shape)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        _refuse(otherwise)


def _refuse(why: str) -> NoReturn:
    raise BadRequest(f"{KEY} {why}: send base64 of torch.save(tensor.contiguous(), buffer)", KEY)
