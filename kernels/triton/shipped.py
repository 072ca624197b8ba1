"""Every configuration in which a kernel is shipped, as triton's compiler takes it with no GPU at hand.

tests/kernels/test_compiled.py compiles them for each generation of NVIDIA GPUs and looks at what came out. Constants
and tiles come from the functions that launch, so that what is checked is what runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minivllm.kernels.triton import (
    attention,
    cache,
    draw,
    elementwise,
    experts,
    gather,
    inputs,
    lora,
    moe,
    norm,
    packed_product,
    paged,
    rejection,
    sampling,
    shrink_expand,
    tuned,
    w4a16,
)
from minivllm.kernels.triton.tiles import Tile, attention_tiles

ARCHS = (80, 90, 100)
ALIGNED = [["tt.divisibility", 16]]  # what the launcher finds out of pointers, and of strides


class Shipped(NamedTuple):
    name: str
    kernel: Any
    types: dict[str, str]  # of the arguments that are no constants
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    matrix: str = ""  # "": none; "small": tiles of 16 rows, mma.sync on every GPU; "large": the generation's own
    unaligned: tuple[str, ...] = ()  # arguments of which nothing is known
    wide_loads: bool = True  # 16 bytes at a time from global memory
    archs: tuple[int, ...] = ARCHS  # where it is launched

    def attributes(self) -> dict[tuple[int], list]:
        """Divisibility by argument, for ASTSource."""
        names = self.kernel.arg_names
        return {(names.index(name),): ALIGNED for name in self.types if self._aligned(name)}

    def _aligned(self, name: str) -> bool:
        return name not in self.unaligned and (self.types[name][0] == "*" or name.endswith("stride"))


class Shape(NamedTuple):
    model: str
    head: paged.Head
    dtype: str
    page: int
    kind: int = 0  # of the cache, see quantised_kv.py
    by_head: bool = False  # with slopes and sinks


LLAMA = paged.Head(32, 8, 128, 0.1, 0, 0.0)
PHI3 = paged.Head(32, 32, 96, 0.1, 2047, 0.0)
SHAPES = (
    Shape("llama-8b", LLAMA, "bf16", 16),
    Shape("qwen3-0.6b", paged.Head(16, 8, 128, 0.1, 0, 0.0), "fp16", 256),
    Shape("smollm2", paged.Head(9, 3, 64, 0.1, 0, 0.0), "bf16", 32),
    Shape("gemma2", paged.Head(8, 4, 256, 0.1, 4096, 50.0), "bf16", 16),
    Shape("phi2-head-80", paged.Head(32, 32, 80, 0.1, 0, 0.0), "bf16", 64),
    Shape("phi3-head-96", PHI3, "bf16", 16),
)
QUANTISED = (
    Shape("llama-8b, int8", LLAMA, "bf16", 16, 1),
    Shape("llama-8b, e4m3, slopes and sinks", LLAMA, "bf16", 16, 2, True),
    Shape("qwen3-0.6b, int8", paged.Head(16, 8, 128, 0.1, 0, 0.0), "fp16", 256, 1),
    Shape("smollm2, int8", paged.Head(9, 3, 64, 0.1, 0, 0.0), "bf16", 32, 1),
    Shape("phi3-head-96, e4m3", PHI3, "bf16", 16, 2),
    Shape("head-160, int8", paged.Head(40, 10, 160, 0.1, 0, 0.0), "fp16", 128, 1),
)
INT32 = ("rows", "seq_lens", "tables", "starts")


def shipped() -> Iterator[Shipped]:
    for shape in SHAPES:
        yield from _attention(shape, (False, True))
        yield _join(shape)
    for shape in QUANTISED:
        yield from _attention(shape, (True,))
    for path in sorted(tuned.FOLDER.glob("*.json")):
        yield from _tuned(path)
    yield from _writes()
    yield from _cache()
    yield from _norms()
    yield from _sampling()
    yield from _rejection()
    yield from _lora()
    yield from _w4a16()
    yield from _moe()
    yield from _inputs()


def _attention(shape: Shape, splits: tuple[bool, ...]) -> Iterator[Shipped]:
    types, page, kind = _attention_types(shape), shape.page, shape.kind
    more = {} if shape.by_head else {"slopes": None, "sinks": None}
    tiles = {arch: _tiles(shape, arch) for arch in ARCHS}
    (decode,) = {decode for decode, _ in tiles.values()}
    for split in splits:
        constants = paged.constants(shape.head, page, decode, False, kind) | {"SPLIT": split} | more
        name = f"decode{' split' * split}, {shape.model}"
        yield _shipped(name, attention.decode_kernel, types, constants, decode, matrix="small")
    for tile in dict.fromkeys(prefill for _, prefill in tiles.values()):
        archs = tuple(arch for arch in ARCHS if tiles[arch][1] == tile)
        constants = paged.constants(shape.head, page, tile, False, kind) | more
        name = f"prefill, {shape.model}{', sm_80' * (archs == (80,))}"
        yield _shipped(name, attention.prefill_kernel, types, constants, tile, matrix="large", archs=archs)


def _tuned(path: Path) -> Iterator[Shipped]:
    """What a card's file lets run on its generation, of eight KV heads and blocks of 16."""
    archs = (10 * json.loads(path.read_text())["major"],)
    for known, plan in tuned.load(path).items():
        head = paged.Head(8 * known.group, 8, known.head_size, 0.1, 2047 if known.window else 0, 0.0)
        dtype = {"float32": "fp32", "float16": "fp16"}.get(known.dtype, "bf16")
        kind = elementwise.KINDS.get(getattr(torch, known.dtype), 0)
        label = f"{path.stem}, {known.head_size} x {known.group}{', window' * known.window}, {known.dtype}"
        shape = Shape(label, head, dtype, 16, kind)
        types, more = _attention_types(shape), {"slopes": None, "sinks": None}
        for tile in dict.fromkeys(step.tile for step in plan.decode):
            for split in (False, True):
                constants = paged.constants(head, 16, tile, False, kind) | {"SPLIT": split} | more
                name = f"decode{' split' * split}, {label}, {tuple(tile)}"
                yield _shipped(name, attention.decode_kernel, types, constants, tile, matrix="small", archs=archs)
        for tile in dict.fromkeys(step.tile for step in plan.prefill):
            constants = paged.constants(head, 16, tile, False, kind) | more
            name = f"prefill, {label}, {tuple(tile)}"
            yield _shipped(name, attention.prefill_kernel, types, constants, tile, matrix="large", archs=archs)


def _join(shape: Shape) -> Shipped:
    tile, _ = _tiles(shape, 90)
    constants = paged.join_constants(shape.head, tile)
    own = Tile(0, tile.block_n, 4, 3)
    return _shipped(f"join, {shape.model}", attention.join_kernel, _attention_types(shape), constants, own)


def _tiles(shape: Shape, arch: int) -> tuple[Tile, Tile]:
    head = shape.head
    sizes = head.num_heads // head.num_kv_heads, head.head_size, 1 if shape.kind else 2
    return attention_tiles(*sizes, head.window > 0, arch // 10)


def _attention_types(shape: Shape) -> dict[str, str]:
    types = {name: f"*{shape.dtype}" for name in ("q", "k_cache", "v_cache", "out")} | {name: "*i32" for name in INT32}
    types |= {name: "*i8" for name in ("k_cache", "v_cache") if shape.kind}
    types |= {name: "*fp32" for name in ("partial", "peaks", "norms", "slopes", "sinks")}
    types |= {"scale": "fp32", "cap": "fp32"}
    return types | {name: "i32" for name in ("q_stride", "table_stride", "num_requests", "num_splits")}


def _writes() -> Iterator[Shipped]:
    types = {name: "*bf16" for name in ("k", "v")} | {name: "*i8" for name in ("k_cache", "v_cache")}
    types |= {"slots": "*i64", "k_stride": "i32", "v_stride": "i32"}
    for kind, codes in ((1, "int8"), (2, "e4m3")):
        heads = {"KV_HEADS": 8, "HEADS_WIDTH": 8, "HEAD_SIZE": 128, "WIDTH": 128, "PAGE": 16, "KIND": kind}
        yield Shipped(f"cache write, {codes}", cache.write_quantised_kernel, types, heads, 4)


def _shipped(name: str, kernel: Any, types: dict, constants: dict, tile: Tile, **more: Any) -> Shipped:
    own = {arg: types[arg] for arg in kernel.arg_names if arg not in constants}
    return Shipped(name, kernel, own, constants, tile.num_warps, tile.num_stages, unaligned=("table_stride",), **more)


def _cache() -> Iterator[Shipped]:
    tensors = {name: "*bf16" for name in ("k", "v", "k_cache", "v_cache")}
    heads = {"KV_HEADS": 8, "HEAD_SIZE": 128, "PAGE": 16}
    types = tensors | {"slots": "*i64", "k_stride": "i32", "v_stride": "i32"}
    yield Shipped("cache write", cache.write_kernel, types, heads | {"HEADS_WIDTH": 8, "WIDTH": 128}, 4)
    types = {name: "*bf16" for name in ("qkv", "q_out", "k_cache", "v_cache", "cos", "sin", "weight")}
    types |= {"slots": "*i64", "positions": "*i64", "eps": "fp32", "qkv_stride": "i32"}
    # A program's 64 pairs are 4 bytes a thread, and a warp reads 128 bytes in one piece.
    kinds = (False, 0, ""), (True, 0, ""), (False, 1, ", int8"), (True, 1, ", int8"), (True, 2, ", e4m3")
    for use_norm, kind, codes in kinds:
        constants = heads | {"HEADS": 32, "HALF": 64, "NORM": use_norm, "KIND": kind}
        name = f"rope{' + norm' * use_norm} + cache write{codes}"
        own = types | ({"k_cache": "*i8", "v_cache": "*i8"} if kind else {})
        yield Shipped(name, cache.rope_write_kernel, own, constants, 1, wide_loads=False)
    types = {"sources": "*u64", "targets": "*u64", "pairs": "*i64", "source_stride": "i64", "target_stride": "i64"}
    yield Shipped("block copy", cache.copy_blocks_kernel, types, {"WORDS": 4096, "BLOCK": 2048}, 4)


def _norms() -> Iterator[Shipped]:
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "x_stride": "i32"}
    yield Shipped("rms norm", norm.rms_norm_kernel, types, {"SIZE": 4096, "WIDTH": 4096}, 8)
    types = {"x": "*bf16", "out": "*bf16", "x_stride": "i32"}
    yield Shipped("silu mul", norm.silu_mul_kernel, types, {"SIZE": 14336, "BLOCK": 1024}, 4)


def _sampling() -> Iterator[Shipped]:
    types = {"probs": "*fp32", "cuts": "*fp32", "seeds": "*i64", "positions": "*i64"}
    types |= {"times": "*fp64", "winners": "*i64", "masses": "*fp64", "stride": "i32", "num_blocks": "i32"}
    constants = {"CHUNK": draw.CHUNK, "BLOCK": sampling.BLOCK}
    yield Shipped("race of blocks", sampling.race_blocks_kernel, types, constants, 4)
    types = {name: kind for name, kind in types.items() if name not in ("stride", "num_blocks")}
    types |= {"tokens": "*i64", "valid": "*i8", "stride": "i32", "num_chunks": "i32"}
    constants = {"CHUNKS": 32, "BLOCK": sampling.BLOCK}  # 131,072 tokens
    yield Shipped("race of tokens", sampling.race_tokens_kernel, types, constants, 2, wide_loads=False)
    types = {"probs": "*fp32", "top_k": "*i64", "top_p": "*fp64", "min_p": "*fp32", "cuts": "*fp32"}
    types |= {"stride": "i32", "size": "i32"}
    # A thread reads 4 bytes at a time here: rows of any length are masked by it. They come from the cache.
    yield Shipped("cuts", sampling.find_cuts_kernel, types, {"LOOP": sampling.LOOP}, 8, wide_loads=False)


def _rejection() -> Iterator[Shipped]:
    types = {name: "*fp32" for name in ("probs", "draft_probs")}
    types |= {name: "*i64" for name in ("draft_rows", "drafts", "seeds", "positions", "winners", "tokens")}
    types |= {name: "*fp64" for name in ("masses", "times", "left")} | {"valid": "*i8"}
    types |= {name: "i32" for name in ("stride", "draft_stride", "num_blocks", "num_draft_blocks", "num_chunks")}
    constants = {"CHUNK": draw.CHUNK, "CHUNKS": 32, "BLOCK": sampling.BLOCK}
    for name, kernel, num_warps, wide in (
        ("masses of drafts", rejection.masses_kernel, 4, True),
        ("race of the rest", rejection.race_rest_kernel, 8, True),
        ("acceptance", rejection.accept_kernel, 2, False),  # single blocks of 64 tokens
    ):
        own, fixed = ({arg: known[arg] for arg in kernel.arg_names if arg in known} for known in (types, constants))
        yield Shipped(name, kernel, own, fixed, num_warps, wide_loads=wide)


def _lora() -> Iterator[Shipped]:
    """qkv of Llama-3.1-8B: decodes, then prompts."""
    sizes = lora.Sizes(n_in=4096, n_out=6144, rank=16, num_parts=3)
    types = {name: "*bf16" for name in ("x", "a", "b", "y")} | {"hidden": "*fp32"}
    types |= {name: "*i32" for name in ("tasks", "tokens", "parts")}
    types |= {name: "i32" for name in ("x_stride", "y_stride", "num_places")}
    for block_m in (16, 64):
        for name, kernel in (("shrink", shrink_expand.shrink_kernel), ("expand", shrink_expand.expand_kernel)):
            own = {arg: types[arg] for arg in kernel.arg_names if arg in types}
            constants, matrix = getattr(sizes, name)(block_m, False), "small" if block_m == 16 else "large"
            yield Shipped(f"lora {name}, {block_m} tokens", kernel, own, constants, 4, matrix=matrix)


def _w4a16() -> Iterator[Shipped]:
    """Of Llama-3.1-8B, decodes with shared groups and prompts."""
    types = {"codes": "*u8", "x_stride": "i32", "num_tokens": "i32"}
    types |= {name: "*fp16" for name in ("scales", "minima")} | {name: "*bf16" for name in ("x", "bias")}
    for block_m, split in ((16, True), (64, False)):
        constants = w4a16.constants(4096, 4096, False, split, block_m, False)
        own = types | {"out": "*fp32" if split else "*bf16"}
        matrix = "small" if block_m == 16 else "large"
        yield Shipped(f"w4a16, {block_m} tokens", packed_product.w4a16_kernel, own, constants, 4, 4, matrix=matrix)
    types = {"partial": "*fp32", "bias": "*bf16", "out": "*bf16", "num_splits": "i32"}
    constants = {"N_OUT": 4096, "BIAS": False, "BLOCK": w4a16.BLOCK_ADD}
    yield Shipped("sum of splits", packed_product.add_splits_kernel, types, constants, 4)


def _moe() -> Iterator[Shipped]:
    """Qwen3-30B-A3B: decodes, then prompts."""
    hidden, size, top_k = 2048, 768, 8
    sorts = {"ids": "*i64", "counts": "*i32", "num_pairs": "i32"}
    # A thread reads one id at a time, masked by their number. They are few and come from the cache.
    yield Shipped("pairs by expert", experts.count_kernel, sorts, {"BLOCK": moe.BLOCK}, 4, wide_loads=False)
    tiles = {"pairs": "*i32", "tile_experts": "*i32"}
    constants = moe.place_constants(128, 64)
    types = sorts | tiles | {"num_tiles": "i32"}
    yield Shipped("places of pairs", experts.place_kernel, types, constants, 4, wide_loads=False)
    types = tiles | {name: "*bf16" for name in ("x", "w", "out")} | {"num_pairs": "i32", "x_stride": "i32"}
    for block_m in (16, 64):
        kind = {"kernel": experts.grouped_kernel, "num_warps": 4, "matrix": "small" if block_m == 16 else "large"}
        constants = moe.product_constants(size, hidden, top_k, True, block_m, False) | {"weights": None}
        yield Shipped(f"gate and up of experts, {block_m} rows", types=types, constants=constants, **kind)
        constants = moe.product_constants(hidden, size, 1, False, block_m, False)
        own = types | {"weights": "*fp32"}
        yield Shipped(f"down of experts, {block_m} rows", types=own, constants=constants, **kind)
    types, constants = {"parts": "*bf16", "out": "*bf16"}, {"SIZE": hidden, "TOP_K": top_k, "BLOCK": moe.BLOCK}
    yield Shipped("sum over experts", experts.combine_kernel, types, constants, 4)


def _inputs() -> Iterator[Shipped]:
    types = {name: "*i32" for name in ("all_tokens", "all_tables", "query_start", "table", "out", "writes")}
    types |= {name: "*i64" for name in ("rows", "firsts", "token_ids", "positions", "slots")}
    types |= {name: "i32" for name in ("num_requests", "padded_tokens", "spare_slot", "width")}
    types |= {name: "i32" for name in ("token_stride", "table_stride", "out_stride")}
    strides = ("token_stride", "table_stride", "out_stride")
    for name, kernel, constants, num_warps in (
        ("gather tokens", inputs.gather_tokens_kernel, {"PAGE": 16, "BLOCK": gather.BLOCK}, 4),
        ("gather rows", inputs.gather_rows_kernel, {"BLOCK": gather.BLOCK}, 4),
        ("write rows", inputs.write_rows_kernel, {"BLOCK": 128}, 1),
    ):
        own = {arg: types[arg] for arg in kernel.arg_names if arg not in constants}
        yield Shipped(name, kernel, own, constants, num_warps, unaligned=strides, wide_loads=False)
