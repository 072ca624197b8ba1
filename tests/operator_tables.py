"""Made-up tables of operators, in the files that ai-dynamo/aiconfigurator has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

SIZES = (1, 64, 4096, 16_384)


def write_table(folder: Path, system: str, what: str, rows: Iterable[Mapping[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / f"{system}-vllm-1.0-{what}_perf.parquet")


def products(dtype: str, milliseconds: float) -> list[dict[str, Any]]:
    """That all take as long."""
    return [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": milliseconds, "kernel_source": "made up"}
        for m in SIZES
        for n in SIZES
        for k in SIZES
    ]


def attention(
    is_decode: bool, heads: int, kv_heads: int, size: int, milliseconds: float, cached: str = "bfloat16"
) -> list[dict[str, Any]]:
    named = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "kv_cache_dtype": cached}
    last = "step" if is_decode else "isl"
    return [
        named | {"batch_size": batch, last: length - is_decode, "window_size": 0, "latency": milliseconds}
        for batch in (1, 256)
        for length in (16, 16_384)
    ]
