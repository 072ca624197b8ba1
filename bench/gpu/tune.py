"""Part `tune` of bench/gpu/run.py: the fastest tile of each attention launch on this card, for kernels/tuned/.

Every candidate's result is compared with the default tile's before it is timed; one that cannot be launched, or is
wrong, falls out with its reason. With --out a card's file is written there, to be moved to kernels/tuned/ by hand. All
shapes take longer than a part may: `--only llama-8b` and so on, one after the other, add to the same file.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from card import NOT_MEASURED, card, replayed
from case import Rows, Setting
from kernel_parts import DTYPES
from torch import Tensor

from minivllm.kernels import reference
from minivllm.kernels.triton import paged
from minivllm.kernels.triton.tiles import Tile, num_splits
from minivllm.kernels.triton.tuned import KINDS, Measured, Shape, as_tree, candidates, file_name, load

SHAPES = {  # (heads, KV heads, head size): of the models that the other parts run
    "llama-8b": (32, 8, 128),
    "qwen3-0.6b": (16, 8, 128),
    "smollm2": (9, 3, 64),
}
SIZES = {"decode": (1, 4, 16, 64, 256), "prefill": (128, 1024, 8192)}  # requests, queries
CONTEXT = 1024  # tokens of a request that decodes
TINY_SHAPES, TINY_SIZES = {"tiny": (4, 2, 16)}, {"decode": (2,), "prefill": (5,)}


def tune(args: Namespace, device: torch.device, rows: Rows) -> None:
    setting = Setting(device, DTYPES[args.dtype], device.type == "cpu")
    found: list[Measured] = []
    for name, (heads, kv_heads, head_size) in (TINY_SHAPES if setting.tiny else SHAPES).items():
        for dtype in (args.dtype, "int8"):
            shape = Shape(head_size, heads // kv_heads, dtype, False)
            for kind in KINDS:
                for size in (TINY_SIZES if setting.tiny else SIZES)[kind]:
                    label = f"{kind} {size}, {name}, {dtype}"
                    if rows.wants(label):
                        _at_one_size(setting, rows, found, label, shape, (heads, kv_heads), kind, size)
    if found and device.type == "cuda" and args.out:
        about = {"gpu": card(device), "torch": torch.__version__, "dtype": args.dtype}
        path = args.out / file_name(torch.cuda.get_device_name(device))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(as_tree(found, setting.major, about, load(path)), indent=1) + "\n")


def attention_call(
    setting: Setting, heads: tuple[int, int], shape: Shape, kind: str, size: int
) -> Callable[[Tile], Tensor]:
    """A launch over scattered blocks of 16 random tokens. heads: query heads and KV heads."""
    device, (num_heads, kv_heads), head_size = setting.device, heads, shape.head_size
    length = size if kind == "prefill" else 20 if setting.tiny else CONTEXT
    count, num_queries = (1, size) if kind == "prefill" else (size, 1)
    blocks = -(-length // 16)
    tables = torch.randperm(count * blocks, device=device).to(torch.int32).view(count, blocks)
    kv = torch.randn(2, count * blocks, kv_heads, 16, head_size, device=device).to(setting.dtype)
    if shape.itemsize == 1:
        k, v = kv.transpose(2, 3).flatten(1, 2)
        kv = torch.empty(*kv.shape[:3], 16 * (head_size + 4), dtype=getattr(torch, shape.dtype), device=device)
        reference.write_quantised(k, v, *kv, torch.arange(len(k), device=device))
    q = torch.randn(count * num_queries, num_heads, head_size, device=device).to(setting.dtype)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * num_queries
    lengths = torch.full((count,), length, dtype=torch.int32, device=device)
    requests = paged.Requests(starts[:-1], lengths, tables, starts, len(q))
    head = paged.Head(num_heads, kv_heads, head_size, head_size**-0.5, 0, 0.0)
    out, scratch = torch.empty_like(q), paged.Scratch(device)

    def call(tile: Tile) -> Tensor:
        if kind == "prefill":
            paged.prefill(q, *kv, requests, head, out, tile)
        else:
            splits = num_splits(count, kv_heads, setting.num_sms, length // tile.block_n + 1)
            paged.decode(q, *kv, requests, head, out, scratch, tile, splits)
        return out

    return call


def _at_one_size(
    setting: Setting,
    rows: Rows,
    found: list[Measured],
    label: str,
    shape: Shape,
    heads: tuple[int, int],
    kind: str,
    size: int,
) -> None:
    tiles = candidates(shape, kind, setting.major)[: 3 if setting.tiny else None]
    torch.manual_seed(0)
    call = attention_call(setting, heads, shape, kind, size)
    wanted = call(tiles[0]).double()
    for tile in tiles:
        head = {"launch": label, "tile": "x".join(map(str, tile)), "default": tile == tiles[0]}

        def measure(tile: Tile = tile) -> dict[str, Any]:
            call(tile).fill_(torch.nan)
            error = (call(tile).double() - wanted).abs().max().item()
            right = error <= 24 * setting.unit
            if setting.tiny or not right:
                return {"us": NOT_MEASURED, "right": right}
            us = replayed(lambda: call(tile)).median * 1e6
            found.append(Measured(shape, kind, size, tile, us))
            return {"us": round(us, 2), "right": True}

        rows.attempt(head, measure)
