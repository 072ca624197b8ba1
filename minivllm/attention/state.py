"""Layers with a recurrent state, in two rules: the oracle, and the chunked form.

A layer keeps of a request a matrix S [key size, value size] for each value head, which maps keys to values. Token by
token, with its decay a, in (0, 1), and its rate b:

    S <- a S                    what is known fades
    S <- S + b k (v - k S)      gated_delta: what S says of k is replaced by v, or the part b of it
    S <- S + b k v              ssd: v is added
    out = q S + d v             d: of the channel, whatever the token

gated_delta is the gated delta rule (Gated DeltaNet, Yang, Kautz and Hatamizadeh 2025), in which d is 0; q and k have
unit length, and q is divided by the root of its size (transformers, modeling_qwen3_5.py). ssd is Mamba-2's (state space
duality, Dao and Gu 2024), whose names are C for q, B for k, x for v, dt for b, exp(A dt) for a, D for d and heads in
groups for those that share keys. q, k and v come out of a short causal convolution with SiLU. All is computed in
float32.

Where a state stands: a block's page has the state behind the block's last token (kv_groups.py). A request's tokens are
cut where they cross into another block, and each cut reads the state of the block before and leaves its own behind, so
every full block can be found again by a prefix cache.

A page is shared memory: in a group of attention layers the same bytes are K and V. Here it is float32, whatever K and V
are kept in: the matrices of all heads, then the last inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec
from minivllm.kv_groups import StateSpec

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

CHUNK = 64  # tokens of the chunked form at once: products within a chunk grow with it, those with S shrink
FEW = 8  # tokens that are taken one by one: products of so few cost more
EPS = 1e-6  # of unit length


class Span(NamedTuple):
    """Token rows first : end of a batch, which are one request's and end in one block."""

    first: int
    end: int
    read: int  # the block that has the state before them; -1: they are the request's first
    write: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)


class Meta(NamedTuple):
    ones: Sequence[Span]  # of requests that have one token
    others: Sequence[Span]  # of all others. Of one request each reads what the one before it wrote
    num_tokens: int


class StateReference:
    """Token by token, one request at a time."""

    def __init__(
        self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device, block_axis: int
    ):
        assert all(layer.state is not None for layer in layers), layers
        self.block_size, self.block_axis = spec.block_size, block_axis

    def prepare(self, batch: InputBatch) -> Meta:
        ones, others = [], []
        for spans in spans_of(batch, self.block_size):
            (ones if spans[-1].end - spans[0].first == 1 else others).extend(spans)
        return Meta(ones, others, batch.num_tokens)

    def forward(
        self, qkv: Tensor, gates: Tensor, weights: Tensor, kv: Tensor, meta: Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        state = state_of(layer)
        pages, skip = Pages(kv, self.block_axis, state), skip_of(weights, state)
        for span in (*meta.ones, *meta.others):
            kept = pages.read(span.read)
            q, k, v, inputs = heads_of(qkv[span.rows], kept.inputs, weights, state)
            answers, matrices = self.take(state.rule, kept.matrices, q, k, v, gates[span.rows])
            out[span.rows] = answers + skip * v
            pages.write(span.write, Kept(matrices, inputs))
        out[meta.num_tokens :] = 0  # padding rows: nobody reads them, but they pass through the layers that follow

    def take(
        self, rule: str, matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """matrices [H, key size, value size]; q, k [n, H, key size]; v [n, H, value size]; gates [n, 2, H] -> what is
        answered [n, H, value size], without d v, and the matrices then."""
        answers = []
        for i in range(len(q)):
            answer, matrices = step(rule, matrices, q[i], k[i], v[i], gates[i])
            answers.append(answer)
        return torch.stack(answers), matrices


class StateChunked(StateReference):
    """Requests of one token all at once, the tokens of others in chunks: products of matrices."""

    def forward(
        self, qkv: Tensor, gates: Tensor, weights: Tensor, kv: Tensor, meta: Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        super().forward(qkv, gates, weights, kv, meta._replace(ones=()), layer, out)
        if not meta.ones:
            return
        state = state_of(layer)
        pages, rows = Pages(kv, self.block_axis, state), [span.first for span in meta.ones]
        kept = zip(*(pages.read(span.read) for span in meta.ones), strict=True)
        matrices, before = map(torch.stack, kept)
        q, k, v, inputs = heads_of(qkv[rows, None], before, weights, state)
        answers, matrices = step(state.rule, matrices, q[:, 0], k[:, 0], v[:, 0], gates[rows])
        out[rows] = answers + skip_of(weights, state) * v[:, 0]
        for span, *own in zip(meta.ones, matrices, inputs, strict=True):
            pages.write(span.write, Kept(*own))

    def take(
        self, rule: str, matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor]:
        if len(q) <= FEW:
            return super().take(rule, matrices, q, k, v, gates)
        answers = []
        for first in range(0, len(q), CHUNK):
            own = slice(first, first + CHUNK)
            answer, matrices = take_chunk(rule, matrices, q[own], k[own], v[own], gates[own])
            answers.append(answer)
        return torch.cat(answers), matrices


# ------------------------------------------------------------------------------------------------- where states stand


class Kept(NamedTuple):
    """Of one request. A new one's are zeros."""

    matrices: Tensor  # [H, key size, value size] float32
    inputs: Tensor  # [kernel - 1, channels] float32: of the convolution, the latest last


class Pages:
    """A layer's tensor of the cache as pages of states. A page is one run of memory, or several where K and V,
    or their heads, lie apart."""

    def __init__(self, kv: Tensor, block_axis: int, state: StateSpec):
        floats = kv.flatten(block_axis + 1).view(torch.float32)
        apart = floats.flatten(0, block_axis - 1) if block_axis else floats[None]
        self.runs = apart.transpose(0, 1)  # [num_blocks, runs, floats]
        self.state, self.num_runs = state, self.runs.shape[1]
        self.width = -(-state.num_floats // self.num_runs)  # floats of a state in each run
        assert self.width <= self.runs.shape[2], "a state does not fit a block (kv_groups.block_size_for)"

    def read(self, block: int) -> Kept:
        """-1: a new request's. It may be a view of the page."""
        of = self.state
        page = self.runs.new_zeros(of.num_floats) if block < 0 else self.runs[block, :, : self.width].reshape(-1)
        matrices, inputs = page[: of.num_floats].split([of.num_matrix_floats, of.num_floats - of.num_matrix_floats])
        return Kept(matrices.view(of.num_v_heads, of.k_size, of.v_size), inputs.view(of.kernel - 1, of.channels))

    def write(self, block: int, kept: Kept) -> None:
        page = torch.cat((kept.matrices.flatten(), kept.inputs.flatten()))
        padding = self.num_runs * self.width - len(page)
        self.runs[block, :, : self.width] = F.pad(page, (0, padding)).view(self.num_runs, self.width)


def spans_of(batch: InputBatch, block_size: int) -> Iterator[list[Span]]:
    """Of each request, in the order of its tokens."""
    bounds, tables = batch.query_start.tolist(), batch.block_tables
    for r, seq_len in enumerate(batch.seq_lens.tolist()):
        shift = bounds[r + 1] - seq_len  # from a position of the request to its token row
        at = bounds[r] - shift
        table = tables[r, max(at - 1, 0) // block_size : -(-seq_len // block_size)].tolist()
        read = table.pop(0) if at > 0 and at % block_size == 0 else table[0] if at > 0 else -1
        spans = []
        for write in table:
            end = min(seq_len, (at // block_size + 1) * block_size)
            spans.append(Span(at + shift, end + shift, read, write))
            at, read = end, write
        yield spans


# ---------------------------------------------------------------------------------------------------- what is computed


def state_of(layer: AttentionSpec) -> StateSpec:
    assert layer.state is not None, layer
    return layer.state


def skip_of(weights: Tensor, state: StateSpec) -> Tensor:
    """[H, value size]: d."""
    return weights[-1, state.places[2]].view(state.num_v_heads, state.v_size)


def heads_of(qkv: Tensor, before: Tensor, weights: Tensor, state: StateSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The convolution and what is made of it. qkv [.., n, channels], before [.., kernel - 1, channels], weights
    [kernel + 2, channels] -> q and k [.., n, H, key size], v [.., n, H, value size], and the last kernel - 1 inputs."""
    n, inputs = qkv.shape[-2], torch.cat((before, qkv.float()), -2)
    mixed = sum((inputs[..., j : j + n, :] * weights[j] for j in range(state.kernel)), weights[state.kernel])
    q, k, v = (F.silu(mixed)[..., place] for place in state.places)
    q, k = (x.unflatten(-1, (state.num_k_heads, state.k_size)) for x in (q, k))
    if state.rule == "gated_delta":
        q, k = unit(q) * state.k_size**-0.5, unit(k)
    q, k = (x.repeat_interleave(state.num_v_heads // state.num_k_heads, -2) for x in (q, k))
    return q, k, v.unflatten(-1, (state.num_v_heads, state.v_size)), inputs[..., n:, :]


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def step(rule: str, matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """One token. matrices [.., H, key size, value size]; q, k [.., H, key size]; v [.., H, value size]; gates [.., 2,
    H] -> what is answered [.., H, value size], and the matrices then."""
    decay, rate = gates[..., 0, :, None].exp(), gates[..., 1, :, None]
    matrices = matrices * decay[..., None]
    known = torch.einsum("...k,...kv->...v", k, matrices) if rule == "gated_delta" else 0
    matrices = matrices + k[..., None] * (rate * (v - known))[..., None, :]
    return torch.einsum("...k,...kv->...v", q, matrices), matrices


def take_chunk(rule: str, matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """As StateReference.take, by products: with what each of the chunk's tokens adds, every answer is a sum (Dao and Gu
    2024, section 6). By the delta rule what they add follows from each other, by a triangular system (Yang et al. 2024,
    "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", with decay as in Gated DeltaNet,
    section 3.3).

    With G_i the sum of the decays' logarithms up to i, S that of the chunk's beginning, and u_i what token i adds:
    S_i = exp(G_i) S + sum over j <= i of exp(G_i - G_j) k_j u_j, and u_i = b_i v_i, or b_i (v_i - k_i S_(i-1)
    exp(g_i))."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, n, size]
    total, rate = gates[:, 0].T.double().cumsum(-1), gates[:, 1].T[..., None]  # [H, n], of which differences count
    fade = (total[:, :, None] - total[:, None, :]).tril().float().exp().tril()  # [H, n, n]: from j to i
    faded = total.float().exp()[..., None]
    if rule == "gated_delta":
        system = torch.eye(k.shape[1], device=k.device) + (rate * (k @ k.mT) * fade).tril(-1)
        wanted = rate * (v - (k * faded) @ matrices)
        added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    else:
        added = rate * v
    answers = (q * faded) @ matrices + ((q @ k.mT) * fade) @ added
    left = (total[:, -1:] - total).float().exp()[..., None]  # of each token's, at the chunk's end
    matrices = faded[:, -1:] * matrices + (k * left).mT @ added
    return answers.transpose(0, 1), matrices
