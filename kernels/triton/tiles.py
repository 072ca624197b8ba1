"""Which tile a kernel works on, and with how many warps: chosen from what the host knows before a step. No triton here.

Every choice is one of few, so that all of them can be compiled ahead of time on a machine with no GPU: the gate of
tests/kernels compiles what `minivllm.kernels.triton.shipped` lists, for each generation of GPUs.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    block_m: int  # rows of the query matrix: queries times the query heads of one KV head
    block_n: int  # keys
    num_warps: int
    num_stages: int = 2  # of the software pipeline


def power_of_two(n: int, least: int = 16) -> int:
    """The next one; at least 16, below which no matrix instruction works."""
    return max(least, 1 << (n - 1).bit_length())


def decode_tile(group: int, head_size: int, itemsize: int) -> Tile:
    """itemsize: of the cache. One query's heads are few rows: the tile is as small as the matrix instruction allows,
    and memory decides. Codes get no wider tile: 128 keys of e4m3 spill with four warps on sm_90, and fewer programs fit
    beside each other (bench/LOG.md). What a card likes better is for `tuned.py`, which tries 128 too."""
    return Tile(power_of_two(group), 32 if head_size > 128 or itemsize > 2 else 64, 4)


def prefill_tile(group: int, head_size: int, itemsize: int) -> Tile:
    """64 rows for each group of four warps is what Hopper's wgmma needs; 16 compile to mma.sync on every GPU."""
    if head_size * itemsize > 256:
        return Tile(power_of_two(group, 64), 32, 8)
    return Tile(power_of_two(group, 128), 64, 8, 3 if head_size <= 64 else 2)  # sm_100 spills with 64 and two stages


def attention_tiles(group: int, head_size: int, itemsize: int, window: bool, major: int) -> tuple[Tile, Tile]:
    """Of decode and of prefill. itemsize: of the cache; 1: codes. major: of the GPU's compute capability. sm_80 keeps
    operands in registers, and would spill where keys are decoded, or masked by a window, beside the products."""
    codes, prefill = itemsize == 1, prefill_tile(group, head_size, max(itemsize, 2))
    if major == 8 and (codes or window):
        prefill = prefill._replace(block_n=32, num_stages=1 if codes else 2)
    return decode_tile(group, head_size, itemsize), prefill


def num_splits(num_requests: int, num_kv_heads: int, num_sms: int, most: int) -> int:
    """Programs that share the keys of a request: enough for four on each multiprocessor, if there are `most` tiles."""
    wanted = -(-4 * num_sms // max(1, num_requests * num_kv_heads))
    return max(1, min(wanted, most, 32))
