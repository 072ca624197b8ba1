"""A model's forward without an engine around it, and the ways to call it: the laboratory of chapter 14."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.attention.base import KVSpec
from minivllm.attention.select import choose
from minivllm.batch import InputBatch, InputSizes
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.compile.graphs import Captures, Exact, Recorder
from minivllm.config import DEFAULT_MODEL
from minivllm.features import ATTENTION
from minivllm.loading.load import load
from minivllm.loading.sources import resolve
from minivllm.models.spec import ModelSpec
from minivllm.runner.forward import EagerForward, ForwardOptions
from minivllm.runner.forward_fused import FusedModel
from minivllm.runner.forward_graphs import FullForward, StaticAttention
from minivllm.runner.forward_piecewise import PiecewiseForward

CPU = torch.device("cpu")
MOST = 512  # tokens of a step
BLOCK_SIZE, LENGTH = 16, 8  # tokens of a block; of each request, its new one included

Forward = Callable[[InputBatch], Tensor]


def thin(spec: ModelSpec) -> ModelSpec:
    """As many layers, of the same operations in the same order; hardly any arithmetic."""
    narrow = {"hidden_size": 64, "num_heads": 3, "num_kv_heads": 1, "head_size": 32, "intermediate_size": 128}
    return replace(spec, **narrow, vocab_size=512, max_position=1024)


def thin_twin(quantization: str) -> nn.Module:
    """Of the default model, with random weights."""
    files = resolve(f"dummy:{DEFAULT_MODEL}")
    return load(replace(files, spec=thin(files.spec)), torch.float32, CPU, quantization=quantization).model


def decodes(num: int) -> InputBatch:
    """So many requests, each in a block of its own, get one token more."""
    at = np.arange(num)
    return InputBatch(
        req_ids=[str(i) for i in range(num)],
        rows=at,
        token_ids=at % 500,
        positions=np.full(num, LENGTH - 1),
        slot_mapping=at * BLOCK_SIZE + LENGTH - 1,
        query_start=np.arange(num + 1, dtype=np.int32),
        seq_lens=np.full(num, LENGTH, np.int32),
        block_tables=at[:, None].astype(np.int32),
        sample_tokens=at,
        sample_requests=at,
        draft_tokens=np.full(num, -1),
        num_tokens=num,
        max_query=1,
        max_seq=LENGTH,
        whole=True,
    )


class Stage:
    """A model, and a KV pool for so many requests at most in which something has been written."""

    def __init__(self, model: nn.Module, most: int, attention: str = "auto"):
        layers = model.attention_layers
        spec = KVSpec(len(layers), layers[0].num_kv_heads, layers[0].head_size, BLOCK_SIZE, torch.float32)
        backend, _ = choose(attention, CPU, layers, ATTENTION)
        self.model = model
        self.attention: Any = backend(layers, spec, most + 1, CPU)
        self.sizes = InputSizes(most, BLOCK_SIZE, BLOCK_SIZE, spare_block=most)
        written = torch.Generator().manual_seed(0)
        self.caches = [torch.randn(self.attention.kv_shape(most + 1), generator=written) for _ in layers]

    def step(self, forward: Forward, num: int) -> Callable[[], Tensor]:
        """The forward of so many requests, ready to be called as often as one likes."""
        batch = decodes(num)
        meta = self.attention.prepare(batch)
        context = ForwardContext(self.attention, meta, self.caches, self.model.attention_layers)

        def run() -> Tensor:
            with torch.inference_mode(), forward_context(context):
                return forward(batch)

        return run


# ---------------------------------------------------------------------------------------- ways to call a forward


def options(**more: Any) -> ForwardOptions:
    return replace(ForwardOptions("off", max_tokens=MOST, num_threads=1, cache=Path()), **more)


def eager(model: nn.Module) -> Forward:
    return EagerForward(model, CPU, options())


def compiled(model: nn.Module, cache: Path, shapes: Exact) -> Forward:
    """From the pieces in the cache, which are built if they are not there."""
    forward = PiecewiseForward(model, CPU, options(compile="wait", cache=cache, shapes=shapes))
    if forward.decision[0] != "piecewise":
        raise SystemExit(f"the pieces cannot be compiled: {forward.decision[1]}")
    return forward


def fused(model: nn.Module) -> Forward:
    return FusedModel(model).run


def in_pieces(model: nn.Module, size: int, recorder: Recorder) -> Forward:
    """Recorded between attentions (V1's way)."""
    return EagerForward(model, CPU, options(shapes=Captures((size,), recorder)))


def in_whole(stage: Stage, size: int, recorder: Recorder) -> Forward:
    """Recorded from end to end (V0's way). The stage's attention then leaves what it prepares at fixed addresses."""
    stage.attention = StaticAttention(stage.attention, stage.sizes)
    return FullForward(eager(stage.model), stage.model, CPU, {1: Captures((size,), recorder)})
