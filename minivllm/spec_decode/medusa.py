"""Medusa: extra heads on the last hidden state guess the tokens behind the next one (Cai et al. 2024).

Head i (from 0) sees the hidden state that gave token t+1 and guesses token t+2+i:

    x = hidden;  for each of its residual layers:  x = x + SiLU(W x + b);  logits = U x

The heads are computed side by side and do not see each other's guesses; nothing is kept between steps. Each head's
likeliest token is taken: a chain of one guess a position, where the paper checks a tree of several.

Two published layouts of weights are read (safetensors):

    the paper's    [medusa_head.]{head}.{layer}.linear.weight | bias, [medusa_head.]{head}.{number of layers}.weight
    vLLM's         blocks.{head}.layers.{layer}.weight | bias, or blocks.{head}.layer.weight; lm_heads.{head}.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.loading.safetensors_io import read_tensors
from minivllm.plan import Join, StepPlan
from minivllm.spec_decode.base import Drafts, Target
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

# (pattern, what it is): groups are head, layer and kind
_LAYOUTS = (
    (re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)"), "layer"),
    (re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(weight)"), "head"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), "layer"),
    (re.compile(r"blocks\.(\d+)\.layer()\.(weight|bias)"), "layer"),
    (re.compile(r"lm_heads\.(\d+)()\.(weight)"), "head"),
)


class MedusaHead:
    """layers: (W [hidden, hidden], b [hidden] or None) each; head: U [vocab, hidden]."""

    def __init__(self, layers: list[tuple[Tensor, Tensor | None]], head: Tensor):
        self.layers, self.head = layers, head

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> logits [N, vocab]"""
        for weight, bias in self.layers:
            hidden = hidden + F.silu(F.linear(hidden, weight, bias))
        return F.linear(hidden, self.head)


def load_heads(
    folder: Path, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> list[MedusaHead]:
    """All heads of the safetensors files in a folder. Raises ModelError unless they fit the model."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no .safetensors file with Medusa heads")
    return assemble(((name, tensor) for name, tensor, _ in read_tensors(files)), hidden_size, vocab_size, dtype, device)


def assemble(
    tensors: Iterable[tuple[str, Tensor]], hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> list[MedusaHead]:
    """Heads from named tensors of either layout."""
    parts: dict[tuple[int, str, int, str], Tensor] = {}
    for name, tensor in tensors:
        found = next(((m, what) for pattern, what in _LAYOUTS if (m := pattern.fullmatch(name))), None)
        if found is None:
            raise ModelError(f'tensor "{name}" is not part of a Medusa head in a known layout')
        (head, layer, kind), what = found[0].groups(), found[1]
        shape = (
            (vocab_size, hidden_size) if what == "head" else (hidden_size, hidden_size)[: 2 if kind == "weight" else 1]
        )
        if tuple(tensor.shape) != shape:
            raise ModelError(f'Medusa tensor "{name}" has shape {list(tensor.shape)}, the model needs {list(shape)}')
        parts[int(head), what, int(layer or 0), kind] = tensor.to(device, dtype)
    num_heads = 1 + max((head for head, *_ in parts), default=-1)
    heads = []
    for i in range(num_heads):
        output = [tensor for (head, what, *_), tensor in parts.items() if head == i and what == "head"]
        numbers = sorted(layer for head, what, layer, kind in parts if (head, what, kind) == (i, "layer", "weight"))
        if len(output) != 1 or numbers != list(range(len(numbers))):
            raise ModelError(f"Medusa head {i} of {num_heads} is not complete")
        layers = [(parts[i, "layer", n, "weight"], parts.get((i, "layer", n, "bias"))) for n in numbers]
        heads.append(MedusaHead(layers, output[0]))
    if not heads:
        raise ModelError("no Medusa head found")
    return heads


def random_heads(
    num_heads: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device, seed: int
) -> list[MedusaHead]:
    """Heads that guess at random, for tests and measurements: spec_decode.model=dummy:medusa."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(hidden_size**-0.5).to(dtype)

    size = hidden_size
    return [MedusaHead([(normal(size, size), normal(size))], normal(vocab_size, size)) for _ in range(num_heads)]


class MedusaProposer:
    lookahead = 0

    def __init__(self, target: Target, heads: list[MedusaHead]):
        self.heads = heads[: target.config.spec_decode.k]
        self.throttle = target.throttle
        self.kv_caches: list[Tensor] = []

    def join(self, row: int, join: Join) -> None:
        self.throttle.reset(row)

    def leave(self, row: int) -> None:
        pass

    def propose(self, plan: StepPlan, batch: InputBatch, tokens: Drafts, hidden: Tensor) -> Drafts:
        if not tokens:
            return {}
        req_ids, rows, last = [], [], []
        for i, (req_id, row) in enumerate(zip(batch.req_ids, batch.rows.tolist(), strict=True)):
            if (new := tokens.get(req_id)) is None:
                continue
            num_drafts = len(plan.drafts.get(req_id, ()))
            if num_drafts:
                self.throttle.learn(row, 0, num_drafts, len(new) - 1)
            req_ids.append(req_id)
            rows.append(row)
            last.append(int(batch.query_start[i + 1]) - 1 - num_drafts + len(new) - 1)  # the row that gave new[-1]
        lengths = [len(self.heads)] * len(rows)
        counts = self.throttle.cut(rows, [0] * len(rows), lengths, len(rows))
        if not any(counts):
            return {}
        states = hidden[upload(np.array(last), hidden.device)]
        guesses = torch.stack([head(states).argmax(-1) for head in self.heads[: max(counts)]], 1).cpu()
        return {r: guess[:n] for r, guess, n in zip(req_ids, guesses.tolist(), counts, strict=True) if n}

    def draft_probs(self, row: int, place: int) -> Tensor | None:
        return None  # each head's likeliest token, for sure
