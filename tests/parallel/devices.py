"""One rank of a model as a thread runs it: attention and a KV cache, of its own heads and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from models.pairs import FP32_TOLERANCE, oracle_logits, random_tokens
from parallel.threads import all_ranks, on_all
from torch import Tensor

from minivllm.attention.base import kv_spec
from minivllm.attention.groups import make_backend
from minivllm.attention.latent import LatentReference
from minivllm.attention.reference import ReferenceAttention
from minivllm.attention.select import is_latent
from minivllm.attention.state import StateReference
from minivllm.batch import InputBatch
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.kv_groups import block_size_for
from minivllm.loading import load_model
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS = 8, 12
NUM_PROMPT = 21


class Device:
    """One rank's model with its cache: a request, as many tokens of it a step as one likes."""

    def __init__(self, folder: Any, ranks: Ranks = ONE_DEVICE, **how: Any):
        self.model = load_model(str(folder), torch.float32, CPU, ranks=ranks, **how).model
        layers, self.at, self.length = self.model.attention_layers, ranks.placement, 0
        kind, states = LatentReference if is_latent(layers) else ReferenceAttention, None
        self.block, self.num_groups = BLOCK, 1
        if (of_state := next((layer.state for layer in layers if layer.state is not None), None)) is not None:
            self.block = block_size_for(of_state, kv_spec(layers[:1], 1, torch.float32).bytes_per_block, BLOCK)
            self.num_groups, states = 2, StateReference
            layers[:] = [replace(layer, group=int(layer.state is not None)) for layer in layers]
        sizes = kv_spec(layers, self.block, torch.float32), NUM_BLOCKS, CPU
        self.backend = make_backend(kind, layers, *sizes, states)
        self.caches = [torch.zeros(self.backend.kv_shape(NUM_BLOCKS)) for _ in layers]

    def step(self, token_ids: Sequence[int]) -> Tensor | None:
        """-> logits [T, vocab] on the last stage."""
        meta = self.backend.prepare(self._batch(token_ids))
        context = ForwardContext(self.backend, meta, self.caches, self.model.attention_layers)
        positions = torch.arange(self.length, self.length + len(token_ids))
        with torch.inference_mode(), forward_context(context):
            hidden = self.model(self.model.embed(torch.tensor(token_ids)), positions)
            self.length += len(token_ids)
            return self.model.logits(hidden) if self.at.is_last_stage else None

    def _batch(self, token_ids: Sequence[int]) -> InputBatch:
        end, count = self.length + len(token_ids), len(token_ids)
        positions, table = np.arange(self.length, end), np.arange(NUM_BLOCKS)[::-1]  # blocks in no order of their own
        slots = table[positions // self.block] * self.block + positions % self.block
        tables = table[None].astype(np.int32)
        if self.num_groups > 1:  # each layer has a cache of its own: the same blocks of all
            slots, tables = (np.stack([column] * self.num_groups) for column in (slots, tables))
        return InputBatch(
            req_ids=["a"],
            rows=np.zeros(1, np.int64),
            token_ids=np.array(token_ids),
            positions=positions,
            slot_mapping=slots,
            query_start=np.array([0, count], np.int32),
            seq_lens=np.array([end], np.int32),
            block_tables=tables,
            sample_tokens=np.array([count - 1]),
            sample_requests=np.zeros(1, np.int64),
            draft_tokens=np.full(1, -1),
            num_tokens=count,
            max_query=count,
            max_seq=end,
        )


def run(folder: Any, ranks: Ranks, tokens: Sequence[int], **how: Any) -> Tensor | None:
    """The prompt in two chunks, then one token a step: logits [T, vocab]."""
    device = Device(folder, ranks, **how)
    chunks = [tokens[:13], tokens[13:NUM_PROMPT], *([token] for token in tokens[NUM_PROMPT:])]
    steps = [device.step(chunk) for chunk in chunks]
    return torch.cat(steps) if device.at.is_last_stage else None


def together(folder: Any, placement: Placement, texts: Sequence[Sequence[int]], **how: Any) -> list[list[Tensor]]:
    """For each replica: what each rank of its last stage has."""
    ranks = all_ranks(placement)
    found = on_all(ranks, lambda own: run(folder, own, texts[own.placement.dp_rank], **how))
    replicas: list[list[Tensor]] = [[] for _ in range(placement.dp)]
    for own, logits in zip(ranks, found, strict=True):
        replicas[own.placement.dp_rank] += [] if logits is None else [logits]
    return replicas


def check_ranks(placement: Placement, folder: Any, oracle: Any = None) -> None:
    """The logits of the last stage's ranks are one device's and, if it is given, those of transformers' model."""
    text = random_tokens(length=24)
    expected = [run(folder, ONE_DEVICE, text)] + ([] if oracle is None else [oracle_logits(oracle, text)])
    for logits in together(folder, placement, [text])[0]:
        for wanted in expected:
            torch.testing.assert_close(logits, wanted, rtol=0, atol=FP32_TOLERANCE)
