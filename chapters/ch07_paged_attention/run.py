"""Chapter 7: how does attention read a shuffled past? One attention layer of the default model's shape, over blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from chapters.ch07_paged_attention.solution import attend
from chapters.harness import in_time, main, milliseconds, note
from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.attention.reference import attend_dense
from minivllm.batch import InputBatch
from minivllm.features import ATTENTION

LAYER = AttentionSpec(num_heads=9, num_kv_heads=3, head_size=64, scale=64**-0.5)
BLOCK_SIZE = 16
SPEC = KVSpec(1, LAYER.num_kv_heads, LAYER.head_size, BLOCK_SIZE, torch.float32)
BACKENDS = ("reference", "sdpa", "cpu")  # slow and plain; torch's own operators; C++ over the blocks as they lie
SCENE = ((130, 1), (5, 5), (40, 3))  # (tokens, how many of them are this step's queries) of each request
NUM_DECODES = 8
LENGTHS, SMOKE_LENGTHS = (64, 256, 512, 1024, 2048), (64, 512)
SECONDS, SMOKE_SECONDS = 1.5, 0.3
CPU = torch.device("cpu")


class Past(NamedTuple):
    """K and V of some requests, each in one piece, and where their blocks lie."""

    keys: list[Tensor]  # each [tokens, kv_heads, head_size]
    values: list[Tensor]
    tables: np.ndarray  # [requests, blocks] int32

    def batch(self, queries: list[int]) -> InputBatch:
        """The last so many tokens of each request."""
        seq_lens = np.array([len(k) for k in self.keys], np.int32)
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        positions = np.concatenate([np.arange(n - q, n) for n, q in zip(seq_lens, queries, strict=True)])
        owners = np.repeat(np.arange(len(queries)), queries)
        blocks = self.tables[owners, positions // BLOCK_SIZE].astype(np.int64)
        return InputBatch(
            req_ids=[str(r) for r in range(len(queries))],
            rows=np.arange(len(queries)),
            token_ids=np.zeros(len(positions), np.int64),
            positions=positions,
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start=starts,
            seq_lens=seq_lens,
            block_tables=self.tables,
            sample_tokens=starts[1:].astype(np.int64) - 1,
            sample_requests=np.arange(len(queries)),
            draft_tokens=np.full(len(queries), -1, np.int64),
            num_tokens=len(positions),
            max_query=max(queries),
            max_seq=int(seq_lens.max()),
        )

    def last(self, of: list[Tensor], queries: list[int]) -> Tensor:
        return torch.cat([x[len(x) - num :] for x, num in zip(of, queries, strict=True)])


def past(lengths: list[int], shuffled: bool, seed: int = 0) -> Past:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    keys, values = (
        [torch.randn(n, LAYER.num_kv_heads, LAYER.head_size, generator=generator) for n in lengths] for _ in range(2)
    )
    width = -(-max(lengths) // BLOCK_SIZE)
    order = rng.permutation(len(lengths) * width) if shuffled else np.arange(len(lengths) * width)
    return Past(keys, values, order.reshape(len(lengths), width).astype(np.int32))


def queries_of(num: int) -> Tensor:
    return torch.randn(num, LAYER.num_heads, LAYER.head_size, generator=torch.Generator().manual_seed(1))


def make(name: str, num_blocks: int) -> tuple[AttentionBackend, Tensor]:
    """A backend, and a cache in which every slot holds NaN: whoever reads what nobody wrote, shows it."""
    backend = ATTENTION.get(name)([LAYER], SPEC, num_blocks, CPU)
    return backend, torch.full(backend.kv_shape(num_blocks), torch.nan)


def attend_over_blocks(name: str, here: Past, queries: list[int]) -> Tensor:
    """Write the past, then this step's tokens, and attend: [tokens of the step, heads, head_size]."""
    backend, cache = make(name, here.tables.size + 1)
    before = [len(k) - num for k, num in zip(here.keys, queries, strict=True)]
    old = [i for i, num in enumerate(before) if num]
    keys, values = ([of[i][: before[i]] for i in old] for of in (here.keys, here.values))
    earlier = Past(keys, values, here.tables[old])
    run(backend, cache, earlier, [before[i] for i in old])
    return run(backend, cache, here, queries)


def run(backend: AttentionBackend, cache: Tensor, here: Past, queries: list[int]) -> Tensor:
    q = queries_of(sum(queries))
    out = torch.empty_like(q)
    batch = here.batch(queries)
    k, v = here.last(here.keys, queries), here.last(here.values, queries)
    backend.forward(q, k, v, cache, backend.prepare(batch), LAYER, out)
    return out


def correctness(names: list[str]) -> list[dict[str, Any]]:
    """Each backend over a shuffled past, beside attention over K and V that lie in one piece."""
    lengths, queries = [n for n, _ in SCENE], [q for _, q in SCENE]
    here, straight = past(lengths, shuffled=True), past(lengths, shuffled=False)
    q, wanted, at = queries_of(sum(queries)), [], 0
    for k, v, num in zip(here.keys, here.values, queries, strict=True):
        wanted.append(attend_dense(q[at : at + num], k, v, LAYER))
        at += num
    rows = []
    for name in names:
        shuffled, ordered = (attend_over_blocks(name, p, queries) for p in (here, straight))
        rows.append(
            {
                "name": name,
                "error": float((shuffled - torch.cat(wanted)).abs().max()),
                "to_ordered": float((shuffled - ordered).abs().max()),
                "nan": int(shuffled.isnan().sum()),
            }
        )
    return rows


def order_is_nothing() -> float:
    """The exercise's loop over full blocks in their order, and in any other: the largest difference."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(6, BLOCK_SIZE, LAYER.head_size, generator=generator) for _ in range(2))
    q = torch.randn(LAYER.head_size, generator=generator)

    def over(table: list[int]) -> Tensor:
        return attend(q, lambda block: (keys[block], values[block]), table, 6 * BLOCK_SIZE, LAYER.scale)

    return float((over([0, 1, 2, 3, 4, 5]) - over([4, 1, 5, 0, 3, 2])).abs().max())


def decode_step(name: str, here: Past, q: Tensor) -> Callable[[], None]:
    """One layer of a step in which each request computes one token more."""
    backend, cache = make(name, here.tables.size + 1)
    run(backend, cache, here, [len(k) for k in here.keys])  # fills the cache
    queries = [1] * len(here.keys)
    k, v = here.last(here.keys, queries), here.last(here.values, queries)
    meta, out = backend.prepare(here.batch(queries)), torch.empty_like(q)
    return lambda: backend.forward(q, k, v, cache, meta, LAYER, out)


def time_of_decodes(length: int, names: list[str], seconds: float) -> dict[str, Any]:
    """ms of one layer, for requests that have so many tokens each and compute one more."""
    here, q = past([length] * NUM_DECODES, shuffled=True), queries_of(NUM_DECODES)
    steps = {name: decode_step(name, here, q) for name in names}
    steps["in_order"] = decode_step(names[-1], past([length] * NUM_DECODES, shuffled=False), q)
    keys, values = (torch.stack(of).transpose(1, 2).contiguous() for of in (here.keys, here.values))

    def in_one_piece() -> None:  # torch's fused kernel, on a past that is not paged
        F.scaled_dot_product_attention(q[:, :, None], keys, values, scale=LAYER.scale, enable_gqa=True)

    return {"length": length, **milliseconds({"in_one_piece": in_one_piece, **steps}, seconds)}


@torch.inference_mode()
def measure(smoke: bool) -> dict[str, Any]:
    names = [name for name in BACKENDS if ATTENTION.get(name).unavailable(CPU) is None]
    torch.set_num_threads(1)  # one layer of a small model is too little work to share
    note("  the same result from a shuffled past")
    found = correctness(names)
    rows = []
    for length in SMOKE_LENGTHS if smoke else LENGTHS:
        note(f"  decodes after {length} tokens")
        rows.append(time_of_decodes(length, names, SMOKE_SECONDS if smoke else SECONDS))
    kernel = names[-1]
    return {
        "backends": names,
        "kernel": kernel,
        "block_size": BLOCK_SIZE,
        "num_decodes": NUM_DECODES,
        "threads": torch.get_num_threads(),
        "correctness": found,
        "order": order_is_nothing(),
        "rows": [{**row, "kernel": row[kernel]} for row in rows],
    }


def check(results: dict[str, Any]) -> None:
    for row in results["correctness"]:
        assert row["nan"] == 0, "somebody read a slot that nobody wrote"
        assert row["error"] < 1e-4, "a shuffled past gives another result"
        assert row["to_ordered"] < 1e-4, "where the blocks lie changed the result"
    assert results["order"] < 1e-4, "the order of full blocks matters to a decode"
    first, last = results["rows"][0], results["rows"][-1]
    for gathered in ("reference", "sdpa"):
        in_time(last["kernel"]["min"] < last[gathered]["min"], f"the kernel is no faster than {gathered}, which copies")
    in_time(0.5 < last["kernel"]["min"] / last["in_order"]["min"] < 2, "blocks in order make much of a difference")
    in_time(last["kernel"]["min"] > first["kernel"]["min"], "a longer past takes no longer to read")


def tell(results: dict[str, Any]) -> str:
    lines = ["over a shuffled past, every other slot holding NaN:", ""]
    for row in results["correctness"]:
        lines.append(
            f"  {row['name']:10} {row['nan']} NaN; off by {row['error']:.0e} from attention in one piece, "
            f"by {row['to_ordered']:.0e} from blocks in order"
        )
    lines += [
        f"  full blocks in any order: off by {results['order']:.0e}",
        "",
        f"{results['num_decodes']} requests, one token each, one layer (ms):",
        f"{'':13}{'not paged':>12}{'in shuffled blocks':>{12 * len(results['backends'])}}{'in order':>12}",
        f"{'past':13}" + "".join(f"{name:>12}" for name in ("torch", *results["backends"], results["kernel"])),
    ]
    for row in results["rows"]:
        times = "".join(f"{row[name]['min']:12.3f}" for name in ("in_one_piece", *results["backends"], "in_order"))
        lines.append(f"{row['length']:5} tokens {times}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("07", measure, check, tell)
