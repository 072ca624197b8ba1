"""The worker of an engine that pools: model.task=embed, score or classify. A model without KV, under a head that makes
vectors.

An encoder and a decoder run the same way, whole prompts without a cache: whether a token sees what follows is a
property of their attention layers. Of a decoder K and V could be kept, but for what? Nothing is decoded, so only a
prompt that is cut, or one that begins like another, would read them, and a mean needs the hidden states of all tokens,
also of those that a prefix cache has. Its LM head is not loaded.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from minivllm.attention.packed import PackedAttention
from minivllm.config import Decision, Decisions, EngineConfig
from minivllm.engine.build.facts import About, facts_without_kv
from minivllm.errors import ConfigError
from minivllm.facts import WorkerFacts
from minivllm.loading import LoadedModel, load, resolve
from minivllm.loading.cache import default_cache_dir
from minivllm.loading.sources import ModelFiles
from minivllm.lora.slots import NoAdapters
from minivllm.models import ENCODERS
from minivllm.pooling.pool import ACTIVATIONS, POOLERS, normalize
from minivllm.pooling.settings import PoolerSettings, read_settings
from minivllm.pooling.task import EMBED, choose_task
from minivllm.runner.async_sampling import send_for
from minivllm.runner.block_moves import NoBlockMoves
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward import EagerForward, ForwardOptions
from minivllm.runner.forward_pairs import PairsForward
from minivllm.runner.head_pooling import Activation, Pool, PoolingHead
from minivllm.runner.inputs import Rows
from minivllm.runner.inputs_packed import PackedInputs
from minivllm.runner.model_state import NoState
from minivllm.runner.platform import choose_device, choose_dtype, choose_threads
from minivllm.runner.runner import ModelRunner
from minivllm.runner.worker import Worker


class PoolingWorkerBuilder:
    """settled: what was decided before torch was there."""

    def __init__(self, config: EngineConfig, settled: Decision):
        self.config = config
        task = choose_task(config)
        self.task, self.has_head = task.value, task.value != EMBED
        self.decisions = Decisions([task])
        self.device = self.decisions.note("model.device", *choose_device(config.model.device))
        if self.device.type == "cpu":
            threads = choose_threads(config.executor.num_threads)
            torch.set_num_threads(self.decisions.note("executor.num_threads", *threads))
            self.decisions.append(settled)

    def build(self) -> Worker:
        begin, asked = time.perf_counter(), self.config.model
        files = resolve(asked.path, tokenizer=asked.tokenizer)
        dtype = choose_pooling_dtype(asked.dtype, files.spec.dtype, self.device)
        self.dtype = self.decisions.note("model.dtype", *dtype)
        settings = self._settings(files)
        loaded = self._load(files)
        longest = self._longest(files, settings)
        worker = Worker(self._runner(loaded, settings), DummyBatches(0, 1, longest), self.decisions)
        worker.known = self._facts(loaded, settings, longest, time.perf_counter() - begin)
        return worker

    def _settings(self, files: ModelFiles) -> PoolerSettings:
        asked, is_encoder = self.config.model.pooling, files.spec.architecture in ENCODERS
        if self.has_head:
            if asked != "auto":
                raise ConfigError(
                    "model.pooling does not go with a classification head, which reads a token of its own"
                )
            kind, which = ("cls", "first") if is_encoder else ("last", "last")
            return PoolerSettings(kind, False, None, f"the classification head reads the {which} token")
        settings = read_settings(files.folder, is_encoder, asked)
        shown = f"{settings.kind}, {'unit length' if settings.normalize else 'not normalised'}"
        self.decisions.note("model.pooling", shown, settings.reason)
        return settings

    def _load(self, files: ModelFiles) -> LoadedModel:
        asked = self.config.model
        if files.spec.architecture not in ENCODERS:
            files = replace(files, spec=replace(files.spec, has_head=False))
        # Steps have many tokens, where packed weights gain nothing, and a vector must not depend on how many.
        bits, reason = self.config.quantization.activation_bits, "steps of many tokens gain nothing from packed weights"
        plain = asked.quantization == bits == "auto"
        quantization = "none" if plain else asked.quantization
        packing = {"quantization": quantization, "dense_copy": asked.dense_copy, "activation_bits": bits}
        loaded = load(files, self.dtype, self.device, asked.seed, **packing)
        self.decisions.note("model.quantization", loaded.quantization[0], reason if plain else loaded.quantization[1])
        if loaded.activation_bits is not None:
            self.decisions.note("quantization.activation_bits", *loaded.activation_bits)
        self.decisions.note("model.linear", *loaded.linear)
        return loaded

    def _longest(self, files: ModelFiles, settings: PoolerSettings) -> int:
        """Tokens of a text."""
        asked, budget = self.config.model.max_model_len, self.config.scheduler.max_num_batched_tokens
        positions = files.spec.max_position
        made_for = min(settings.max_tokens or positions, positions)
        if asked is not None and asked > min(positions, budget):
            raise ConfigError(
                f"model.max_model_len={asked}: the model has {positions} positions, and one step {budget} tokens "
                "(scheduler.max_num_batched_tokens)"
            )
        length, reason = asked or min(made_for, budget), "as configured"
        if not asked and budget >= made_for:
            reason = "what the model was made for"
        elif not asked:
            reason = f"of {made_for}: a step takes a text whole, and scheduler.max_num_batched_tokens={budget}"
        return self.decisions.note("model.max_model_len", length, reason)

    def _runner(self, loaded: LoadedModel, settings: PoolerSettings) -> ModelRunner:
        model, layers = loaded.model, loaded.model.attention_layers
        cache = default_cache_dir() / "compiled"
        options = ForwardOptions("off", self.config.scheduler.max_num_batched_tokens, torch.get_num_threads(), cache)
        send = send_for(self.config.engine.overlap, self.device)
        head = PoolingHead(self._pool(model, settings), self._activation(model, settings), send)
        pairs = self.has_head and loaded.spec.architecture in ENCODERS
        return ModelRunner(
            model=model,
            forward=(PairsForward if pairs else EagerForward)(model, self.device, options),
            attention=PackedAttention(layers, self.device),
            kv_caches=[torch.empty(0, device=self.device)] * len(layers),  # attention keeps nothing
            inputs=PackedInputs(pairs=pairs),
            rows=Rows(self.config.scheduler.max_num_seqs),
            head=head,
            block_moves=NoBlockMoves(),
            adapters=NoAdapters(),
            model_state=NoState(),
            states=(head,),
        )

    def _pool(self, model: nn.Module, settings: PoolerSettings) -> Pool:
        pool = POOLERS[settings.kind]
        return partial(logits_of, model, self.dtype, pool) if self.has_head else pool

    def _activation(self, model: nn.Module, settings: PoolerSettings) -> Activation:
        if not self.has_head:
            return Activation(normalize, settings.normalize)
        return Activation(ACTIVATIONS[model.spec.classifier.activation], True)

    def _facts(self, loaded: LoadedModel, settings: PoolerSettings, longest: int, seconds: float) -> WorkerFacts:
        dtype, labels = str(self.dtype).removeprefix("torch."), loaded.spec.classifier.labels if self.has_head else ()
        more = {"task": self.task, "width": len(labels) or loaded.spec.hidden_size, "normalized": settings.normalize}
        more |= {"prompts": tuple(settings.prompts), "labels": labels}
        told = loaded.name, loaded.tokenizer_dir, str(self.device), loaded.spec.vocab_size, dtype, "packed", more
        return facts_without_kv(self.config, About(*told), longest, self.decisions, seconds)


def logits_of(model: nn.Module, dtype: torch.dtype, pool: Pool, hidden: Tensor, lengths: Tensor) -> Tensor:
    """A Pool: what the classification head says of each text's one token [B, labels] fp32."""
    return model.classify(pool(hidden, lengths).to(dtype)).float()


def choose_pooling_dtype(asked: str, checkpoint: str, device: torch.device) -> tuple[torch.dtype, str]:
    """A vector is compared with others, made elsewhere or earlier, so a checkpoint in float32 is not rounded."""
    if asked == "auto" and checkpoint == "float32":
        return torch.float32, "the checkpoint's: vectors are compared with such as others have made"
    return choose_dtype(asked, device)
