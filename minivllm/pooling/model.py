"""PoolingModel: lists of token ids in, one vector each out, in one forward without a cache.

The texts are sorted by length and laid back to back: no padding in any linear layer. An encoder and a decoder run the
same way; whether a token sees what follows is a property of their attention layers. A decoder's LM head is not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.packed import PackedAttention
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.config import Decision, EngineConfig
from minivllm.errors import ConfigError, ModelError
from minivllm.loading import load, resolve
from minivllm.loading.sources import ModelFiles
from minivllm.models import ENCODERS
from minivllm.pooling.pool import POOLERS, normalize
from minivllm.pooling.settings import PoolerSettings, read_settings
from minivllm.pooling.task import SCORE
from minivllm.pooling.text import Text
from minivllm.runner.worker import choose_device, choose_dtype, choose_threads


class PoolingModel:
    """decisions: every choice made for the user, with its reason."""

    def __init__(self, config: EngineConfig, task: str):
        asked, self.decisions = config.model, []
        self.device = self._decide("model.device", *choose_device(asked.device))
        if self.device.type == "cpu":
            torch.set_num_threads(self._decide("executor.num_threads", *choose_threads(config.executor.num_threads)))
        files = resolve(asked.path, tokenizer=asked.tokenizer)
        self.dtype = self._decide("model.dtype", *choose_pooling_dtype(asked.dtype, files.spec.dtype, self.device))
        self.is_encoder, self.scores = files.spec.architecture in ENCODERS, task == SCORE
        if self.scores and files.spec.num_labels != 1:
            raise ModelError(
                f"{asked.path}: a classification head of {files.spec.num_labels} labels gives no score of a pair; "
                "a cross-encoder has one"
            )
        self.settings = self._settings(files, config)
        if not self.is_encoder:
            files = replace(files, spec=replace(files.spec, has_head=False))
        # Steps have many tokens, where packed weights gain nothing, and a vector must not depend on how many.
        plain, reason = asked.quantization == "auto", "steps of many tokens gain nothing from packed weights"
        quantization = "none" if plain else asked.quantization
        loaded = load(files, self.dtype, self.device, asked.seed, quantization, asked.dense_copy)
        self._decide("model.quantization", loaded.quantization[0], reason if plain else loaded.quantization[1])
        self._decide("model.linear", *loaded.linear)
        self.name, self.tokenizer_dir = files.name, files.tokenizer_dir
        self.model, self.spec = loaded.model, loaded.spec
        layers = self.model.attention_layers
        self._attention = PackedAttention(layers, self.device)
        self._caches = [torch.empty(0, device=self.device)] * len(layers)  # attention keeps nothing
        self.max_tokens = min(self.settings.max_tokens or self.spec.max_position, self.spec.max_position)
        self.width = 1 if self.scores else self.spec.hidden_size

    def run(self, texts: Sequence[Text]) -> np.ndarray:
        """[B, width] float32, in the order of `texts`: vectors, or scores of a cross-encoder. At least one text, none
        of them empty; a cross-encoder's are pairs."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].token_ids))
        lengths = [len(texts[i].token_ids) for i in order]
        hidden = self._forward([texts[i] for i in order], lengths)
        found = self._reduce(hidden, torch.tensor(lengths, device=self.device)).cpu().numpy()
        back = np.empty_like(found)
        back[order] = found
        return back

    def info(self) -> dict[str, Any]:
        return {"attention": "packed", "dtype": str(self.dtype).removeprefix("torch."), "width": self.width}

    @torch.inference_mode()
    def _forward(self, texts: list[Text], lengths: list[int]) -> Tensor:
        """[T, hidden]"""
        places = [range(length) for length in lengths]
        columns = [[t for text in texts for t in text.token_ids], [p for place in places for p in place]]
        if self.scores:  # a pair's second text is of another type
            columns.append([int(p >= text.second) for text, place in zip(texts, places, strict=True) for p in place])
        inputs = (torch.tensor(column, device=self.device) for column in columns)
        meta = self._attention.prepare(lengths)
        with forward_context(ForwardContext(self._attention, meta, self._caches, self.model.attention_layers)):
            return self.model(*inputs)

    @torch.inference_mode()
    def _reduce(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        if self.scores:
            first = POOLERS["cls"](hidden, lengths).to(self.dtype)
            scores = self.model.classify(first).float()
            return scores.sigmoid() if self.spec.sigmoid else scores
        vectors = POOLERS[self.settings.kind](hidden, lengths)
        return normalize(vectors) if self.settings.normalize else vectors

    def _settings(self, files: ModelFiles, config: EngineConfig) -> PoolerSettings:
        folder = files.weights[0].parent if files.weights else None
        if self.scores:
            if config.model.pooling != "auto":
                raise ConfigError("model.pooling does not go with a cross-encoder, which has a head of its own")
            return PoolerSettings("cls", False, None, "the classification head reads the first token")
        settings = read_settings(folder, self.is_encoder, config.model.pooling)
        shown = f"{settings.kind}, {'unit length' if settings.normalize else 'not normalised'}"
        self._decide("model.pooling", shown, settings.reason)
        return settings

    def _decide(self, field: str, value: Any, reason: str) -> Any:
        shown = value if isinstance(value, int) else str(value).removeprefix("torch.")
        self.decisions.append(Decision(field, shown, reason))
        return value


def choose_pooling_dtype(asked: str, checkpoint: str, device: torch.device) -> tuple[torch.dtype, str]:
    """A vector is compared with others, made elsewhere or earlier, so a checkpoint in float32 is not rounded."""
    if asked == "auto" and checkpoint == "float32":
        return torch.float32, "the checkpoint's: vectors are compared with such as others have made"
    return choose_dtype(asked, device)
