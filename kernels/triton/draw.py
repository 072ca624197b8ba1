"""Launching the sampling kernels. Tokens equal those of minivllm.sampling.draw and minivllm.sampling.rejection."""

import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import rejection, sampling

CHUNK = 64  # blocks a program: 4096 tokens


def find_cuts(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """probs [S, V] fp32 >= 0; top_k [S] int64, 0: off; top_p [S] fp64, 1: off; min_p [S] fp32 -> cuts [S] fp32: tokens
    at least so likely stay."""
    assert probs.dtype == torch.float32 and probs.stride(1) == 1
    assert (top_k.dtype, top_p.dtype, min_p.dtype) == (torch.int64, torch.float64, torch.float32)
    assert top_k.shape == top_p.shape == min_p.shape == (len(probs),)
    cuts = torch.empty(len(probs), dtype=torch.float32, device=probs.device)
    arguments = probs, top_k, top_p, min_p, cuts, probs.stride(0), probs.shape[1]
    sampling.find_cuts_kernel[(len(probs),)](*arguments, LOOP=sampling.LOOP, num_warps=8)
    return cuts


def draw(probs: Tensor, seeds: Tensor, positions: Tensor, cuts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """probs [S, V] fp32 >= 0, V a multiple of 64, need not sum to 1; seeds [S] int64, the bits of uint64; positions [S]
    int64 >= 0; cuts [S] fp32: less likely tokens are out. -> (tokens [S] int64, valid [S] bool)."""
    count, size = probs.shape
    assert probs.dtype == torch.float32 and probs.stride(1) == 1 and size % sampling.BLOCK == 0
    assert seeds.dtype == positions.dtype == torch.int64 and seeds.shape == positions.shape == (count,)
    device, num_blocks = probs.device, size // sampling.BLOCK
    num_chunks = triton.cdiv(num_blocks, CHUNK)
    cuts = torch.zeros(count, dtype=torch.float32, device=device) if cuts is None else cuts
    times, masses = torch.empty(2, count, num_chunks, dtype=torch.float64, device=device)
    winners = torch.empty(count, num_chunks, dtype=torch.int64, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    valid = torch.empty(count, dtype=torch.int8, device=device)
    shared = probs, cuts, seeds, positions, times, winners, masses
    sampling.race_blocks_kernel[(count, num_chunks)](
        *shared, probs.stride(0), num_blocks, CHUNK=CHUNK, BLOCK=sampling.BLOCK, num_warps=4
    )
    sampling.race_tokens_kernel[(count,)](
        *(*shared, tokens, valid, probs.stride(0), num_chunks),
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=sampling.BLOCK,
        num_warps=2,
    )
    return tokens, valid.bool()


def reject(
    probs: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    draft_rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """probs [S, V] fp32 >= 0 that need not sum to 1; drafts [S] int64 < V, -1: draw freely; draft_probs [D, at most V]
    fp32 >= 0 likewise; draft_rows [S] int64: the row that a draft was drawn from, -1: it was proposed for sure; seeds,
    positions [S] int64. Both widths are multiples of 64. -> (tokens [S] int64, valid [S] bool)."""
    (count, size), block = probs.shape, sampling.BLOCK
    draft_probs = probs[:0] if draft_probs is None else draft_probs
    assert probs.dtype == draft_probs.dtype == torch.float32 and probs.stride(1) == draft_probs.stride(1) == 1
    assert size % block == draft_probs.shape[1] % block == 0 and draft_probs.shape[1] <= size
    vectors = draft_rows, drafts, seeds, positions
    assert all(x.dtype == torch.int64 and x.shape == (count,) for x in vectors)
    num_blocks, num_draft_blocks = size // block, draft_probs.shape[1] // block
    num_chunks = triton.cdiv(num_blocks, CHUNK)
    masses, times, left = torch.empty(3, count, 2, num_chunks, dtype=torch.float64, device=probs.device)
    winners = torch.empty(count, 2, num_chunks, dtype=torch.int64, device=probs.device)
    tokens = torch.empty(count, dtype=torch.int64, device=probs.device)
    valid = torch.empty(count, dtype=torch.int8, device=probs.device)
    strides = probs.stride(0), draft_probs.stride(0)
    rejection.masses_kernel[(count, num_chunks)](
        *(probs, draft_probs, draft_rows, masses, *strides, num_blocks, num_draft_blocks),
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=4,
    )
    rejection.race_rest_kernel[(count, num_chunks)](
        *(probs, draft_probs, *vectors, masses, times, winners, left, *strides, num_blocks, num_draft_blocks),
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=block,
        num_warps=8,
    )
    rejection.accept_kernel[(count,)](
        *(probs, draft_probs, *vectors, masses, times, winners, left, tokens, valid),
        *(*strides, num_chunks, num_draft_blocks),
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCK=block,
        num_warps=2,
    )
    return tokens, valid.bool()
