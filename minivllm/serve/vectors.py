"""How a vector is written for a client: numbers, base64 of them, or bytes.

    encoding_format  float       a list of numbers
                     base64      of its bytes
                     bytes       all vectors back to back as the body, where each lies in a header called `metadata`
                     bytes_only  the same without that header
    embed_dtype      float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, of base64 and bytes
    endianness       little, big, native (this machine's), of numbers of more than a byte

The names and the header are vLLM's (0.33). Numbers are rounded to the nearest, ties to even, as torch 2.13 does it, and
without torch, since a front end has none.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from minivllm.errors import BadRequest

if TYPE_CHECKING:
    import numpy as np

DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
BYTES_FORMATS = ("bytes", "bytes_only")
MOST_METADATA = 32 * 1024  # bytes: Python's own client refuses a header line of twice as many


def float32(vector: np.ndarray) -> np.ndarray:
    return vector.astype("<f4")


def float16(vector: np.ndarray) -> np.ndarray:
    import numpy as np

    with np.errstate(over="ignore"):  # beyond 65504: infinity
        return vector.astype("<f2")


def bfloat16(vector: np.ndarray) -> np.ndarray:
    """As uint16."""
    bits = vector.astype("<f4").view("<u4").astype("u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def fp8_e4m3(vector: np.ndarray) -> np.ndarray:
    """As uint8: without infinities ("fn"). Beyond 448: that, the largest."""
    return nearest(vector, 3, 7, 0x7E, 0x7E)


def fp8_e5m2(vector: np.ndarray) -> np.ndarray:
    """As uint8. Beyond 61440: infinity."""
    return nearest(vector, 2, 15, 0x7B, 0x7C)


def nearest(vector: np.ndarray, mantissa: int, bias: int, largest: int, beyond: int) -> np.ndarray:
    """Codes of eight bits: sign, exponent, mantissa. largest: the code of the largest number; beyond: what stands for
    all that would be rounded to one still larger."""
    import numpy as np

    middles = middles_of(mantissa, bias, largest)
    size = np.abs(vector.astype("f8"))
    low, high = (np.searchsorted(middles, size, side) for side in ("left", "right"))
    code = np.where(low % 2 == 0, low, high)  # they differ where it is a middle: the even one of both
    code = np.where(code > largest, beyond, code)
    return (code | np.signbit(vector) << 7).astype("u1")


@cache
def middles_of(mantissa: int, bias: int, largest: int) -> np.ndarray:
    """Between each number that is not negative and the next one: [largest + 1] float64, which holds them exactly."""
    import numpy as np

    codes = np.arange(largest + 2)
    exponent, fraction = codes >> mantissa, (codes & (1 << mantissa) - 1) / (1 << mantissa)
    values = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    return (values[:-1] + values[1:]) / 2


WRITERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": float32,
    "float16": float16,
    "bfloat16": bfloat16,
    "fp8_e4m3": fp8_e4m3,
    "fp8_e5m2": fp8_e5m2,
}


class Wire(NamedTuple):
    dtype: str = "float32"
    endianness: str = "little"

    def bytes_of(self, vector: np.ndarray) -> bytes:
        numbers = WRITERS[self.dtype](vector)
        is_big = (sys.byteorder if self.endianness == "native" else self.endianness) == "big"
        return (numbers.byteswap() if is_big else numbers).tobytes()

    def base64_of(self, vector: np.ndarray) -> str:
        return base64.b64encode(self.bytes_of(vector)).decode()


class Place(msgspec.Struct):
    """Where a vector lies in a body of bytes."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: list[int]


def places(vectors: Sequence[np.ndarray], parts: Sequence[bytes], wire: Wire) -> list[Place]:
    found, end = [], 0
    for i, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
        start, end = end, end + len(part)
        found.append(Place(i, wire.dtype, wire.endianness, start, end, list(vector.shape)))
    return found


def metadata(told: dict[str, object]) -> bytes:
    """As a header's value. Raises BadRequest for more than a client can be expected to read."""
    if len(value := msgspec.json.encode(told)) > MOST_METADATA:
        raise BadRequest(
            f"encoding_format: bytes tells in a header where each vector lies, here in {len(value)} bytes, and clients "
            f"take {MOST_METADATA}; send fewer texts, or ask for bytes_only",
            "encoding_format",
        )
    return value
