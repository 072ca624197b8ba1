"""Stand-ins for libraries that need a GPU: their documented signatures and checks, in plain torch on a CPU.

Names, order and defaults of the arguments are those of flash-attn 2.8.4 (flash_attn/flash_attn_interface.py),
FlashAttention 3 (hopper/flash_attn_interface.py, August 2026) and FlashInfer 0.6.18 (decode.py, prefill.py): a keyword
that one of them lacks is a TypeError here too. What their kernels refuse, such as an index in int64, is an assertion.
Arguments behind the last one that minivllm passes are left out.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, cap: float) -> Tensor:
    """q [n, heads, D], the last of the positions of k, v [L, kv_heads, D]; float64. A query at position p sees keys p -
    left .. p + right; -1: no bound."""
    n, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(length) - torch.arange(length - n, length)[:, None]
    hidden = torch.zeros(n, length, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).to(q.dtype)


def request_keys(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """cache [num_blocks, block_size, kv_heads, D] -> [length, kv_heads, D]"""
    return cache[table.long()].flatten(0, 1)[:length]


def check_cache(q: Tensor, *caches: Tensor) -> None:
    for cache in caches:
        assert cache.dim() == 4 and cache.stride(-1) == 1 and cache.dtype == q.dtype, (cache.shape, cache.dtype)
    assert q.dtype in (torch.float16, torch.bfloat16) and q.stride(-1) == 1
    assert q.shape[-1] == caches[0].shape[-1] <= 256 and q.shape[-1] % 8 == 0


def check_index(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype == torch.int32 and x.stride(-1) == 1, (x.dtype, x.stride())


class FlashAttn2:
    """The module `flash_attn`."""

    @staticmethod
    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert all(x is None for x in (k, v, rotary_cos, cache_batch_idx, cache_leftpad, alibi_slopes))
        check_cache(q, k_cache, v_cache)
        check_index(cache_seqlens, block_table)
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert q.dim() == 4 and len(q) == len(cache_seqlens) == len(block_table)
        return _batched(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap)

    @staticmethod
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert dropout_p == 0.0 and alibi_slopes is None
        check_cache(q, k, v)
        check_index(cu_seqlens_q, cu_seqlens_k, block_table)
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        lengths = cu_seqlens_k.diff()
        rows = cu_seqlens_q, max_seqlen_q
        return _ragged(q, k, v, *rows, lengths, block_table, softmax_scale, causal, window_size, softcap)


class FlashAttn3:
    """The module `flash_attn_interface`."""

    @staticmethod
    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        check_cache(q, k_cache, v_cache)
        check_index(cache_seqlens, page_table)
        options = softmax_scale, causal, window_size, softcap
        if cu_seqlens_q is None:
            assert q.dim() == 4 and len(q) == len(cache_seqlens) == len(page_table)
            return _batched(q, k_cache, v_cache, cache_seqlens, page_table, *options)
        check_index(cu_seqlens_q)
        return _ragged(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, cache_seqlens, page_table, *options)


def _batched(q, keys, values, seqlens, table, scale, causal, window, cap):
    rows = []
    for i, length in enumerate(seqlens.tolist()):
        own = (request_keys(cache, table[i], length) for cache in (keys, values))
        rows.append(attend(q[i], *own, scale, window[0], 0 if causal else window[1], cap))
    return torch.stack(rows)


def _ragged(q, keys, values, starts, longest, seqlens, table, scale, causal, window, cap):
    assert q.dim() == 3 and len(starts) == len(seqlens) + 1 == len(table) + 1
    assert starts[0] == 0 and starts[-1] == len(q) and longest == int(starts.diff().max())
    parts = []
    for i, length in enumerate(seqlens.tolist()):
        own = (request_keys(cache, table[i], length) for cache in (keys, values))
        parts.append(attend(q[starts[i] : starts[i + 1]], *own, scale, window[0], 0 if causal else window[1], cap))
    return torch.cat(parts)


class _Wrapper:
    """What both of FlashInfer's wrappers do with a page table."""

    head_sizes = (64, 128, 256)

    def _remember(self, query_start, indptr, indices, last_page_len, heads, page_size, options):
        check_index(query_start, indptr, indices, last_page_len)
        num_qo_heads, num_kv_heads, head_dim = heads
        assert head_dim in self.head_sizes and num_qo_heads % num_kv_heads == 0
        assert len(indptr) == len(last_page_len) + 1 and indptr[0] == 0 and indptr[-1] == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert options["q_data_type"] in (torch.float16, torch.bfloat16), "the default, float16, was left"
        self.planned = (query_start, indptr, indices, last_page_len, heads, page_size, options)

    def _run(self, q, paged_kv_cache, causal):
        query_start, indptr, indices, last_page_len, heads, page_size, options = self.planned
        num_qo_heads, num_kv_heads, head_dim = heads
        assert q.shape == (int(query_start[-1]), num_qo_heads, head_dim) and q.is_contiguous()
        assert q.dtype == options["q_data_type"]
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (num_kv_heads, page_size, head_dim) and cache.dtype == options["kv_data_type"]
        parts = []
        for i, tail in enumerate(last_page_len.tolist()):
            pages = indices[indptr[i] : indptr[i + 1]]
            length = (len(pages) - 1) * page_size + tail
            own = (request_keys(cache.transpose(1, 2), pages, length) for cache in paged_kv_cache)
            rows, left, cap = q[query_start[i] : query_start[i + 1]], options["window_left"], options["logits_soft_cap"]
            parts.append(attend(rows, *own, options["sm_scale"], left, 0 if causal else -1, cap))
        return torch.cat(parts)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert kv_layout == "HND" and (float_workspace_buffer == 0).all()
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ):
        if not self.use_tensor_cores:
            assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8), "Unsupported group_size"
        options = dict(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        options |= dict(q_data_type=q_data_type, kv_data_type=kv_data_type)
        heads = num_qo_heads, num_kv_heads, head_dim
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        self._remember(one_each, indptr, indices, last_page_len, heads, page_size, options)

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False):
        return self._run(q, paged_kv_cache, causal=False)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        assert kv_layout == "HND" and (float_workspace_buffer == 0).all()

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
    ):
        options = dict(window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        options |= dict(q_data_type=q_data_type, kv_data_type=kv_data_type)
        heads, pages = (num_qo_heads, num_kv_heads, head_dim_qk), (paged_kv_indptr, paged_kv_indices)
        self.causal = causal
        self._remember(qo_indptr, *pages, paged_kv_last_page_len, heads, page_size, options)

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None):
        return self._run(q, paged_kv_cache, self.causal)


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
)
