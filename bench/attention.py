"""How fast is attention over the paged cache, by backend, and how near to what memory can deliver?

Microseconds a layer, the bytes of K and V that this reads a second, and what preparing a step costs on the host. Every
layer has its own cache and a step walks through all of them, so that K and V come from memory and not from the
processor's cache, as in an engine. Blocks are laid out as a running engine leaves them: prompts in runs, then one block
a request in turn (`--blocks scattered` draws them at random, the worst case). Backends alternate step by step. Each
layer is timed by itself, so that the median is not moved by the few that a busy machine interrupts.

    python -m bench attention --backends cpu sdpa --decode 1x200 8x200 32x200 64x500 --prefill 1x256 1x1000
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import before
import numpy as np
import torch
from common import emit, note, parser, spread

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.batch import InputBatch
from minivllm.features import ATTENTION

# heads, KV heads, head size, layers
SHAPES = {"smollm2-135m": (9, 3, 64, 30), "qwen3-0.6b": (16, 8, 128, 28), "llama-3.1-8b": (32, 8, 128, 32)}
SHARED = 4  # pairs of K and V that stand for all layers' projections


def block_tables(kind: str, num_reqs: int, num_blocks: int) -> np.ndarray:
    """[requests, num_blocks]: the first half of each a run, the rest dealt out in turn; or a random permutation."""
    if kind == "scattered":
        return (
            np.random.default_rng(0).permutation(num_reqs * num_blocks).reshape(num_reqs, num_blocks).astype(np.int32)
        )
    prompt = num_blocks // 2
    runs = np.arange(num_reqs * prompt).reshape(num_reqs, prompt)
    turns = num_reqs * prompt + np.arange(num_reqs * (num_blocks - prompt)).reshape(-1, num_reqs).T
    return np.concatenate([runs, turns], axis=1).astype(np.int32)


def make_batch(tables: np.ndarray, seq_lens: np.ndarray, num_queries: int, block_size: int) -> InputBatch:
    num_reqs = len(seq_lens)
    positions = seq_lens[:, None] - num_queries + np.arange(num_queries)  # [requests, queries]
    blocks = tables[np.arange(num_reqs)[:, None], positions // block_size].astype(np.int64)
    query_start = np.arange(num_reqs + 1, dtype=np.int32) * num_queries
    return InputBatch(
        req_ids=[str(r) for r in range(num_reqs)],
        rows=np.arange(num_reqs),
        token_ids=np.zeros(positions.size, np.int64),
        positions=positions.reshape(-1),
        slot_mapping=(blocks * block_size + positions % block_size).reshape(-1),
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        block_tables=tables,
        sample_tokens=query_start[1:].astype(np.int64) - 1,
        sample_requests=np.arange(num_reqs),
        draft_tokens=np.full(num_reqs, -1),
        num_tokens=positions.size,
        max_query=num_queries,
        max_seq=int(seq_lens.max()),
    )


def random_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.full(shape, 60, dtype=torch.int8).view(dtype)  # four such bytes are a scale of 0.0115, no denormal
    return torch.randn(shape, dtype=dtype)


class Step:
    """One backend's caches and inputs; step() runs all layers and says how long prepare and the layers took."""

    def __init__(
        self,
        name: str,
        shape: str,
        batch: InputBatch,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        window: int | None,
    ):
        heads, kv_heads, head_size, num_layers = SHAPES[shape]
        self.spec = AttentionSpec(heads, kv_heads, head_size, 1 / math.sqrt(head_size), window)
        kv_spec = KVSpec(num_layers, kv_heads, head_size, block_size, kv_dtype)
        num_blocks = int(batch.block_tables.max()) + 2
        make = ATTENTION.get(name)
        self.backend: AttentionBackend = make([self.spec] * num_layers, kv_spec, num_blocks, torch.device("cpu"))
        self.caches = [random_cache(self.backend.kv_shape(num_blocks), kv_dtype) for _ in range(num_layers)]
        seen = batch.seq_lens if window is None else np.minimum(batch.seq_lens, window - 1 + np.diff(batch.query_start))
        self.bytes_read = int(seen.sum()) * kv_spec.bytes_per_block // block_size // num_layers  # once, by a layer
        packed = [torch.randn(batch.padded_tokens, heads + 2 * kv_heads, head_size, dtype=dtype) for _ in range(SHARED)]
        self.inputs = [x.split([heads, kv_heads, kv_heads], dim=1) for x in packed]
        self.batch = batch

    @torch.inference_mode()
    def __call__(self) -> tuple[float, list[float]]:
        """(microseconds of prepare, microseconds of each layer)"""
        begin = time.perf_counter()
        meta = self.backend.prepare(self.batch)
        times = [time.perf_counter()]
        for i, cache in enumerate(self.caches):
            q, k, v = self.inputs[i % SHARED]
            self.backend.forward(q, k, v, cache, meta, self.spec, torch.empty_like(q))
            times.append(time.perf_counter())
        return 1e6 * (times[0] - begin), [1e6 * (b - a) for a, b in pairwise(times)]


def cases(texts: list[str], decode: bool, mixed: bool) -> Iterator[tuple[str, np.ndarray, int]]:
    """(label, sequence lengths, queries of each) of "32x200"; mixed lengths are drawn from a quarter to all of it."""
    for text in texts:
        num_reqs, length = (int(n) for n in text.split("x"))
        seq_lens = np.full(num_reqs, length)
        if mixed and decode:
            seq_lens = np.random.default_rng(0).integers(max(1, length // 4), length + 1, num_reqs)
        yield f"{'decode' if decode else 'prefill'} {text}", seq_lens, 1 if decode else length


def alternate(steps: dict[str, Step], seconds: float) -> dict[str, tuple[list[float], list[float]]]:
    """{backend: (times of prepare, times of a layer)} in microseconds"""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for step in steps.values():
        step()
    rounds, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or rounds < 3:
        for name, step in steps.items():
            prepare, layers = step()
            times[name][0].append(prepare)
            times[name][1].extend(layers)
        rounds += 1
    return times


def figures(results: list[dict[str, Any]]) -> dict[str, float]:
    """For before.compare: microseconds."""
    return {
        f"{row['case']}, {row['backend']}, {what}": row[f"{what}_us"]["median"]
        for row in results
        for what in ("prepare", "layer")
    }


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--backends", nargs="+", default=["cpu", "sdpa"], choices=ATTENTION.names())
    args.add_argument("--shape", default="smollm2-135m", choices=SHAPES)
    args.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args.add_argument("--kv-dtype", default="auto", choices=["auto", "int8", "float8_e4m3fn"])
    args.add_argument("--decode", nargs="*", default=["1x200", "8x200", "32x200", "64x500"], help="requests x length")
    args.add_argument("--prefill", nargs="*", default=["1x128", "1x1000", "4x512"], help="requests x length")
    args.add_argument("--mixed", action="store_true", help="decodes of lengths from a quarter of it to all of it")
    args.add_argument("--blocks", default="served", choices=["served", "scattered"])
    args.add_argument("--block-size", type=int, default=16)
    args.add_argument("--window", type=int, default=None, help="sliding window")
    args.add_argument("--seconds", type=float, default=2.0, help="of each case")
    args.add_argument("--threads", type=int, default=torch.get_num_threads())
    before.add_options(args)
    args = args.parse_args()
    if before.is_asked(args):
        return before.compare("attention", figures, args, sys.argv[1:])
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    kv_dtype = dtype if args.kv_dtype == "auto" else getattr(torch, args.kv_dtype)
    results = []
    for label, seq_lens, num_queries in [*cases(args.decode, True, args.mixed), *cases(args.prefill, False, False)]:
        tables = block_tables(args.blocks, len(seq_lens), -(-int(seq_lens.max()) // args.block_size))
        batch = make_batch(tables, seq_lens, num_queries, args.block_size)
        steps = {n: Step(n, args.shape, batch, args.block_size, dtype, kv_dtype, args.window) for n in args.backends}
        for name, (prepare, layers) in alternate(steps, args.seconds).items():
            result = {"case": label, "backend": name, "prepare_us": spread(prepare), "layer_us": spread(layers)}
            result["kv_gb_per_s"] = round(steps[name].bytes_read / median(layers) / 1e3, 3)
            results.append(result)
            note(
                f"{label:16} {name:10} {median(layers):9.1f} us a layer, best {min(layers):9.1f}; "
                f"{result['kv_gb_per_s']:6.2f} GB/s; "
                f"prepare {median(prepare):7.1f}, best {min(prepare):7.1f}"
            )
    emit("attention", vars(args), results, args.out)


if __name__ == "__main__":
    main()
