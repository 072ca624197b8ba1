"""A kernel beside its reference on a little input, for kernels/dispatch.py: of those whose references are in
reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels import reference
from minivllm.kernels.triton import elementwise, gather, moe


def copy_blocks(device: torch.device) -> bool:
    """Within a pool of three layers, to the host's and back; every byte. On a GPU the host's memory is pinned."""

    def pool(num_blocks: int, device: torch.device) -> list[Tensor]:
        on_host = torch.randn(3, 2, num_blocks, 4, 16, 80, generator=generator)  # a block is more than one program's
        on_host = on_host.pin_memory() if pinned and device.type == "cpu" else on_host
        return list(on_host.to(device))

    generator, pinned = torch.Generator().manual_seed(0), device.type == "cuda"
    near, far = pool(6, device), pool(4, torch.device("cpu"))
    near_wanted, far_wanted = ([x.to("cpu", copy=True) for x in caches] for caches in (near, far))
    for moved, wanted, pairs in (
        ((near, near), (near_wanted, near_wanted), [(0, 3), (0, 5), (2, 1)]),
        ((near, far), (near_wanted, far_wanted), [(5, 0), (4, 3)]),
        ((far, near), (far_wanted, near_wanted), [(2, 0), (0, 4)]),
    ):
        where = torch.tensor(pairs)
        elementwise.BlockCopier(*moved)(where.to(device))
        reference.copy_blocks(*wanted, where)
    got = [x.cpu() for x in (*near, *far)]  # the device's first: then what it wrote to the host is there too
    return all(torch.equal(x, y) for x, y in zip(got, (*near_wanted, *far_wanted), strict=True))


def rope_write(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """A few tokens with a norm, in a cache of kv_dtype. In float64's light: codes may be one step apart where another
    order of sums is rounded otherwise."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, size, page = 4, 2, 32, 16

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    is_quantised = kv_dtype in elementwise.KINDS
    inner = (page * (size + 4),) if is_quantised else (page, size)
    inputs = random(5, heads + 2 * kv_heads, size)
    slots, positions = torch.tensor([3, 17, 40, 0, 31], device=device), torch.tensor([5, 0, 9, 3, 7], device=device)
    angles = torch.rand(10, size // 2, generator=generator) * 6
    turn = positions, angles.cos().to(device, dtype), angles.sin().to(device, dtype), random(2, size), 1e-6
    results = []
    for run in (elementwise.rope_write, reference.rope_write):
        q, caches = random(5, heads, size), torch.zeros(2, 3, kv_heads, *inner, dtype=kv_dtype, device=device)
        run(inputs, q, *caches, slots, *turn)
        numbers = [reference.read_quantised(cache, size) for cache in caches] if is_quantised else list(caches)
        results.append([q, *numbers])
    (q, *kv), (q_wanted, *kv_wanted) = results
    near = 4 * torch.finfo(dtype).eps
    step = near + {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 8}.get(kv_dtype, 0)
    pairs = [(q, q_wanted, near), *((x, y, step) for x, y in zip(kv, kv_wanted, strict=True))]
    return all((x.double() - y.double()).abs().max() <= bound * y.abs().max() for x, y, bound in pairs)


def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of four requests: tokens [4, 90], blocks [4, 90], and three of their rows."""
    tokens, blocks = torch.randint(1 << 20, (2, 4, 90), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return tokens.to(device), blocks.to(device), torch.tensor([3, 0, 2], device=device)


def gather_tokens(device: torch.device, block_size: int) -> bool:
    """Two decodes and a chunk between them, with padding."""
    tables, firsts = _tables(device), torch.tensor([5, 0, 80], device=device)
    query_start = torch.tensor([0, 1, 31, 32], dtype=torch.int32, device=device)
    sizes = {"block_size": block_size, "spare_block": 7}
    out = gather.Inputs(*torch.full((3, 40), -1, device=device))
    got = gather.gather_tokens(*tables, firsts, query_start, out, **sizes)
    wanted = reference.gather_tokens(*tables, firsts, query_start, 40, **sizes)
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def gather_rows(device: torch.device) -> bool:
    _, table, rows = _tables(device)
    return torch.equal(gather.gather_rows(table, rows, table.new_empty(3, 70)), reference.gather_rows(table, rows, 70))


def write_rows(device: torch.device) -> bool:
    """A row that is another's from now on, one that grows, one that is cleared."""
    table = _tables(device)[0]
    wanted, writes = table.clone(), [(2, 0, [5, 6, 7], 60), (0, 88, [1, 2], 0), (3, 0, [], 90)]
    gather.write_rows(table, writes)
    reference.write_rows(wanted, writes)
    return torch.equal(table, wanted)


def experts(device: torch.device, dtype: torch.dtype) -> bool:
    """A few tokens, one of them alone, and so many that tiles are large. Sizes that fill no block."""
    generator = torch.Generator().manual_seed(0)
    hidden, size, num_experts, top_k = 72, 40, 4, 2

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    gate_up, down = random(num_experts, 2 * size, hidden), random(num_experts, hidden, size)
    # Products of size 1: sums in float32; a token's parts are rounded to the dtype, then their sum.
    near = {"atol": max(4 * torch.finfo(dtype).eps, 1e-5), "rtol": 2 * torch.finfo(dtype).eps}
    for num_tokens in (1, 5, 40):
        x = random(num_tokens, hidden) * hidden**0.5
        shares = torch.randn(num_tokens, num_experts, generator=generator).softmax(-1).to(device)
        weights, ids = shares.topk(top_k)
        wanted = reference.experts(x, ids, weights, gate_up, down)
        if not torch.allclose(moe.moe(x, ids, weights, gate_up, down).double(), wanted, **near):
            return False
    return True
