"""LoRA's products in the interpreter against their reference, token by token. Run by test_interpreter.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import PRODUCT

from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.lora import SlotTable, Tasks
from minivllm.lora.layer import Delta, Group, Part, add_deltas_naive

assert INTERPRETED
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RESULT = {torch.bfloat16: torch.float32}  # the interpreter truncates to bfloat16 where a GPU rounds
COLUMNS = [slice(0, 48), slice(48, 64), slice(64, 224)]  # the last one in two blocks


def delta(n_in: int, ranks: dict[int, int], dtype: torch.dtype, seed: int) -> Delta:
    """ranks: by the index of a part. Products of unit size."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(sum(ranks.values()), n_in, generator=generator) / n_in**0.5
    parts, first = [], 0
    for part, rank in ranks.items():
        columns = COLUMNS[part]
        b = torch.randn(rank, columns.stop - columns.start, generator=generator) / rank**0.5
        parts.append(Part(slice(first, first + rank), columns, b.to(dtype)))
        first += rank
    return Delta(a.to(dtype), tuple(parts))


def compare(n_in: int, groups: dict[int, list[int]], deltas: list[Delta | None], num_tokens: int, dtype) -> None:
    table = SlotTable(len(deltas), n_in, COLUMNS, 16, dtype, CPU)
    for slot, content in enumerate(deltas):
        table.fill(slot, *deltas[0])  # by an earlier adapter, of which nothing may remain
        table.clear(slot) if content is None else table.fill(slot, *content)
    found = [(slot, np.array(rows)) for slot, rows in groups.items()]
    x, y = torch.randn(num_tokens, n_in).to(dtype), torch.randn(num_tokens, 224).to(RESULT.get(dtype, dtype))
    wanted = y.double()
    add_deltas_naive(wanted, x, [Group(slot, torch.from_numpy(rows)) for slot, rows in found], deltas)
    got = y.clone()
    table.add(got, x, Tasks(found, CPU))
    torch.testing.assert_close(got.double(), wanted, **PRODUCT[dtype])
    untouched = sorted(set(range(num_tokens)) - {row for rows in groups.values() for row in rows})
    assert torch.equal(got[untouched], y[untouched])
    changed = sorted(row for slot, rows in groups.items() if deltas[slot] is not None for row in rows)
    assert (got[changed] != y[changed]).any(1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_in", [16, 100, 1100])
def test_tokens_of_several_adapters(dtype, n_in):
    """Of other ranks, one that leaves parts alone, an empty slot; tokens without an adapter; n_in in splits."""
    ranks = [{0: 16, 1: 16, 2: 16}, {2: 3}, {0: 8, 1: 2}]
    deltas = [delta(n_in, r, dtype, seed) for seed, r in enumerate(ranks)] + [None]
    compare(n_in, {2: [7, 0, 3], 0: list(range(10, 30)), 3: [1, 2], 1: [8]}, deltas, 32, dtype)


@pytest.mark.parametrize("count", [33, 64, 65])
def test_a_prompt_takes_large_tasks(count):
    deltas = [delta(40, {1: 4}, torch.float32, seed) for seed in (0, 1)]
    compare(40, {1: list(range(2, 2 + count)), 0: [0]}, deltas, 70, torch.float32)
