"""A rank's part of each layer: column-, row- and vocabulary-parallel products, experts cut or spread, a stage's ends.

    qkv, gate_up   each rank has some outputs (whole heads), and tells nobody
    o, down        each rank has the inputs that its own qkv or gate_up made; the products of all are added
    embedding      each rank looks up its own tokens, the others' rows are 0; all are added
    LM head        each rank has the logits of its own tokens; all are laid side by side
    experts        each rank computes its own experts, or its cut of each; all are added

So a layer costs two sums over the ranks (Megatron-LM, Shoeybi et al. 2019). Beside its weights a module has `shards`,
which say what of the checkpoint's matrices they are: the loader, adapters and formats read that, and know no ranks.

The functions at the end choose a class when the model is made: on one device the layer of linear.py, embedding.py or
experts.py itself, which talks to nobody and asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.embedding import Embedding, LMHead, TiedLMHead
from minivllm.layers.experts import Experts, Router, Routes, SparseMLP
from minivllm.layers.linear import NO_SHARDS, Linear, QuantMethod
from minivllm.layers.norm import WholeQKNorm
from minivllm.layers.stored import Shard
from minivllm.parallel.group import Group, Line, Ranks
from minivllm.parallel.placement import Span


class ColumnParallel(Linear):
    """Some of the outputs of each part."""

    def __init__(self, n_in: int, parts: Mapping[str, Span], *, bias: bool, dtype: torch.dtype, method: QuantMethod):
        sizes = {part: span.size for part, span in parts.items()}
        super().__init__(n_in, sizes, bias=bias, dtype=dtype, method=method)
        self.shards = {part: Shard("outputs", *span) for part, span in parts.items()}


class RowParallel(Linear):
    """Some of the inputs. The bias is added once, by the first rank: no other has it."""

    def __init__(self, n_in: Span, n_out: int, group: Group, *, bias: bool, dtype: torch.dtype, method: QuantMethod):
        super().__init__(n_in.size, {"": n_out}, bias=bias and group.rank == 0, dtype=dtype, method=method)
        self.shards = {"": Shard("inputs", *n_in)}
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, its inputs] -> [T, n_out], of all inputs."""
        return self.group.all_reduce(super().forward(x))


class ShardedWholeQKNorm(WholeQKNorm):
    """The heads of one of several ranks. KV heads may be on several, all equally often."""

    def __init__(self, heads: Span, kv_heads: Span, head_size: int, eps: float, dtype: torch.dtype, group: Group):
        super().__init__(heads.size, kv_heads.size, head_size, eps, dtype)
        spans = {"q": heads.times(head_size), "k": kv_heads.times(head_size)}
        self.shards = {part: Shard("outputs", *span) for part, span in spans.items()}
        self.group = group

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        squares = self.group.all_reduce(x.float().square().sum(-1, keepdim=True))  # [T, 1]
        inverse = (squares / (x.shape[-1] * self.group.size) + self.eps).rsqrt()
        return (x.float() * inverse * weight.float()).to(x.dtype)


# ---------------------------------------------------------------------------------------------------- the vocabulary


class VocabularyEmbedding(Embedding):
    """The rows of some tokens."""

    def __init__(self, own: Span, hidden_size: int, group: Group, dtype: torch.dtype):
        super().__init__(own.size, hidden_size, dtype)
        self.shards = {"": Shard("outputs", *own)}
        self.own, self.group = own, group

    def forward(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64, any -> [T, hidden], in `out` if that is given. Adding zeros rounds nothing."""
        rows = token_ids - self.own.start
        is_other = (rows < 0) | (rows >= self.own.size)
        x = F.embedding(rows.masked_fill(is_other, 0), self.weight).masked_fill(is_other[:, None], 0)
        x = self.group.all_reduce(x)
        return x if out is None else out.copy_(x)


class VocabularyHead(LMHead):
    """The logits of some tokens, to which those of all others are added behind and before."""

    def __init__(
        self, hidden_size: int, own: Span, group: Group, *, bias: bool = False, dtype: torch.dtype, method: QuantMethod
    ):
        super().__init__(hidden_size, own.size, bias=bias, dtype=dtype, method=method)
        self.shards = {"": Shard("outputs", *own)}
        self.own, self.group = own, group

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> logits [S, vocab] in fp32."""
        return _of_all_tokens(super().forward(hidden), self.own, self.group)


class VocabularyTiedHead(TiedLMHead):
    """The same, whose matrix is the embedding's."""

    def __init__(self, embedding: VocabularyEmbedding, method: QuantMethod):
        super().__init__(embedding, method)
        self.shards, self.own, self.group = embedding.shards, embedding.own, embedding.group

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> logits [S, vocab] in fp32."""
        return _of_all_tokens(super().forward(hidden), self.own, self.group)


def _of_all_tokens(logits: Tensor, own: Span, group: Group) -> Tensor:
    """logits [S, own] -> [S, vocab]. Ranks bring equally many, so the last pads what it lacks; that is cut off."""
    padding = -(-own.of // group.size) - own.size
    brought = F.pad(logits, (0, padding)) if padding else logits
    return group.all_gather(brought, -1)[:, : own.of].contiguous()


# -------------------------------------------------------------------------------------------------------- the experts


class CutExperts(SparseMLP):
    """Each rank has all experts, and of each a part of its inner size."""

    def __init__(self, router: Router, experts: Experts, group: Group):
        super().__init__(router, experts)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, n_in] -> like x."""
        return self.group.all_reduce(super().forward(x))


class SpreadExperts(SparseMLP):
    """Each rank has some of the experts, and computes for them whatever any rank's tokens ask of them.

    Tokens are gathered from the replicas (dp), which have different ones, and are the same already on the ranks that
    share a replica (tp). A router runs where its tokens are. What the ranks computed is added, and each replica takes
    its own tokens' sums back: vLLM's "all-gather, reduce-scatter" dispatch. All replicas bring equally many tokens.
    """

    def __init__(self, router: Router, experts: Experts, own: Span, ranks: Ranks):
        super().__init__(router, experts)
        self.own, self.tp, self.dp = own, ranks.tp, ranks.dp

    def forward(self, x: Tensor) -> Tensor:
        """x [T, n_in] -> like x."""
        ids, weights = self.router(x)
        routes = Routes(self.dp.all_gather(ids), self.dp.all_gather(weights))
        results = self._of_own(self.dp.all_gather(x), routes)
        return self.dp.reduce_scatter(self.tp.all_reduce(results))

    def _of_own(self, x: Tensor, routes: Routes) -> Tensor:
        """Of each token, the sum over those of its experts that are here."""
        is_own = (routes.ids >= self.own.start) & (routes.ids < self.own.stop)
        tokens, choices = is_own.nonzero(as_tuple=True)  # pairs of a token and an expert
        pairs = Routes(*(column[tokens, choices, None] for column in routes))
        results = self.experts(x[tokens], pairs._replace(ids=pairs.ids - self.own.start))
        return torch.zeros_like(x).index_add_(0, tokens, results)


# ------------------------------------------------------------------------------------------------ a stage's two ends


class FromStage(nn.Module):
    """Where the first stage has its embedding: the hidden states of the stage before."""

    def __init__(self, line: Line, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.line, self.hidden_size, self.dtype = line, hidden_size, dtype

    def forward(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T], of which it needs the number -> [T, hidden], in `out` if that is given."""
        if out is None:
            out = torch.empty(len(token_ids), self.hidden_size, dtype=self.dtype, device=token_ids.device)
        return self.line.recv(out, self.line.rank - 1)


class ToStage(nn.Module):
    """Where the last stage has its final norm: the hidden states go to the stage after."""

    def __init__(self, line: Line):
        super().__init__()
        self.line = line

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> x."""
        self.line.send(x, self.line.rank + 1)
        return x


# ----------------------------------------------------------------------------------------- what a model's files call


def qkv_linear(
    ranks: Ranks,
    n_in: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    *,
    bias: bool,
    dtype: torch.dtype,
    method: QuantMethod,
) -> Linear:
    """Whole heads; KV heads with the query heads that share them, and more than once where there are too few."""
    at = ranks.placement
    q, kv = at.part(num_heads).times(head_size), at.kv_heads(num_kv_heads).times(head_size)
    return _column(ranks, n_in, {"q": q, "k": kv, "v": kv}, bias=bias, dtype=dtype, method=method)


def column_linear(
    ranks: Ranks, n_in: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype, method: QuantMethod
) -> Linear:
    spans = {part: ranks.placement.part(size) for part, size in parts.items()}
    return _column(ranks, n_in, spans, bias=bias, dtype=dtype, method=method)


def _column(
    ranks: Ranks, n_in: int, parts: Mapping[str, Span], *, bias: bool, dtype: torch.dtype, method: QuantMethod
) -> Linear:
    if ranks.placement.tp > 1:
        return ColumnParallel(n_in, parts, bias=bias, dtype=dtype, method=method)
    return Linear(n_in, {part: span.size for part, span in parts.items()}, bias=bias, dtype=dtype, method=method)


def row_linear(ranks: Ranks, n_in: int, n_out: int, *, bias: bool, dtype: torch.dtype, method: QuantMethod) -> Linear:
    if ranks.placement.tp == 1:
        return Linear(n_in, {"": n_out}, bias=bias, dtype=dtype, method=method)
    return RowParallel(ranks.placement.part(n_in), n_out, ranks.tp, bias=bias, dtype=dtype, method=method)


def shards_of(ranks: Ranks, parts: Mapping[str, Span]) -> Mapping[str, Shard]:
    """Of a module whose parts lie along outputs."""
    return {part: Shard("outputs", *span) for part, span in parts.items()} if ranks.placement.tp > 1 else NO_SHARDS


def whole_qk_norm(
    ranks: Ranks, num_heads: int, num_kv_heads: int, head_size: int, eps: float, dtype: torch.dtype
) -> WholeQKNorm:
    """num_heads, num_kv_heads: of the whole model."""
    at = ranks.placement
    if at.tp == 1:
        return WholeQKNorm(num_heads, num_kv_heads, head_size, eps, dtype)
    return ShardedWholeQKNorm(at.part(num_heads), at.kv_heads(num_kv_heads), head_size, eps, dtype, ranks.tp)


def vocabulary_embedding(ranks: Ranks, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> Embedding:
    if ranks.placement.tp == 1:
        return Embedding(vocab_size, hidden_size, dtype)
    return VocabularyEmbedding(ranks.placement.vocabulary(vocab_size), hidden_size, ranks.tp, dtype)


def vocabulary_head(
    ranks: Ranks, hidden_size: int, vocab_size: int, *, bias: bool = False, dtype: torch.dtype, method: QuantMethod
) -> LMHead:
    if ranks.placement.tp == 1:
        return LMHead(hidden_size, vocab_size, bias=bias, dtype=dtype, method=method)
    own = ranks.placement.vocabulary(vocab_size)
    return VocabularyHead(hidden_size, own, ranks.tp, bias=bias, dtype=dtype, method=method)


def tied_head(embedding: Embedding, method: QuantMethod) -> TiedLMHead:
    is_shared = isinstance(embedding, VocabularyEmbedding)
    return VocabularyTiedHead(embedding, method) if is_shared else TiedLMHead(embedding, method)


def sparse_mlp(ranks: Ranks, router: Router, n_in: int, size: int, num_experts: int, dtype: torch.dtype) -> SparseMLP:
    """size: the inner one of an expert."""
    at = ranks.placement
    if at.tp == at.ep == 1:
        return SparseMLP(router, Experts(n_in, size, num_experts, dtype))
    own, part = at.experts(num_experts), at.expert_part(size)
    experts = Experts(n_in, part.size, own.size, dtype, first=own.start)
    experts.gate_up.shards = dict.fromkeys(experts.gate_up.rows, Shard("outputs", *part))
    experts.down.shards = dict.fromkeys(experts.down.rows, Shard("inputs", *part))
    return CutExperts(router, experts, ranks.tp) if at.ep == 1 else SpreadExperts(router, experts, own, ranks)


def first_of_stage(ranks: Ranks, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> nn.Module:
    """A decoder's embedding, or what stands in its place."""
    if not ranks.placement.is_first_stage:
        return FromStage(ranks.pp, hidden_size, dtype)
    return vocabulary_embedding(ranks, vocab_size, hidden_size, dtype)


def last_of_stage(ranks: Ranks, norm: nn.Module) -> nn.Module:
    """A decoder's final norm, or what stands in its place."""
    return norm if ranks.placement.is_last_stage else ToStage(ranks.pp)
