"""Worker: one device's model, KV cache and runner, built from the configuration.

It chooses what was left open ("auto") and reports each choice with its reason. Registries come as arguments: only the
composition root knows them by name.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.attention.base import KVSpec
from minivllm.attention.select import choose as choose_attention
from minivllm.config import Decision, EngineConfig
from minivllm.errors import ConfigError
from minivllm.loading import load_model
from minivllm.plan import StepOutput, StepPlan
from minivllm.registry import Registry
from minivllm.runner.inputs import InputSizes, Rows
from minivllm.runner.memory import choose_max_model_len, size_pool, zeros
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.runner.runner import ModelRunner
from minivllm.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the control plane and the front end need to know of a worker."""

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    model_name: str
    tokenizer_dir: Path
    decisions: list[Decision]
    info: dict[str, Any]


class Worker:
    def __init__(self, config: EngineConfig, attention: Registry, forwards: Registry, inputs: Registry):
        begin = time.perf_counter()
        self.decisions: list[Decision] = []
        device = self._decide("model.device", *choose_device(config.model.device))
        if device.type == "cpu":
            torch.set_num_threads(self._decide("executor.num_threads", *choose_threads(config.executor.num_threads)))
        dtype = self._decide("model.dtype", *choose_dtype(config.model.dtype, device))
        loaded = load_model(
            config.model.path, dtype=dtype, device=device, seed=config.model.seed, tokenizer=config.model.tokenizer
        )
        model = loaded.model
        self._decide("model.linear", *loaded.linear)
        backend_class, (_, reason) = choose_attention(
            config.runner.attention, device, model.attention_layers, attention
        )
        name = next(n for n in attention.names() if attention.get(n) is backend_class)
        self._decide("runner.attention", name, reason)
        layer = model.attention_layers[0]
        spec = KVSpec(len(model.attention_layers), layer.num_kv_heads, layer.head_size, config.kv.block_size, dtype)
        num_blocks, decision = size_pool(config, spec, device, config.model.max_model_len or loaded.spec.max_position)
        self.decisions.append(decision)
        max_model_len, decision = choose_max_model_len(
            config, loaded.spec.max_position, num_blocks * config.kv.block_size
        )
        self.decisions.append(decision)
        max_num_batched_tokens = self._choose_budget(config, max_model_len)
        backend = backend_class(model.attention_layers, config.kv.block_size, device)
        shape = backend.kv_shape(spec, num_blocks + 1)  # one spare block takes the K and V of padding tokens
        sizes = InputSizes(config.scheduler.max_num_seqs, max_model_len, config.kv.block_size, num_blocks)
        self.runner = ModelRunner(
            model=model,
            forward=forwards.get(config.runner.forward)(model, device),
            attention=backend,
            kv_caches=[zeros(shape, dtype, device) for _ in model.attention_layers],
            inputs=inputs.get(config.runner.inputs)(sizes),
            rows=Rows(config.scheduler.max_num_seqs),
            sampler=Sampler(loaded.spec.vocab_size, config.scheduler.max_num_seqs, device),
            prompt_logprobs=PromptLogprobs(model.logits),
        )
        self._facts = WorkerFacts(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            model_name=loaded.name,
            tokenizer_dir=loaded.tokenizer_dir,
            decisions=self.decisions,
            info={
                "model": loaded.name,
                "device": str(device),
                "vocab_size": loaded.spec.vocab_size,
                "dtype": str(dtype).removeprefix("torch."),
                "attention": name,
                "num_blocks": num_blocks,
                "block_size": config.kv.block_size,
                "kv_tokens": num_blocks * config.kv.block_size,
                "max_model_len": max_model_len,
                "load_seconds": round(time.perf_counter() - begin, 3),
            },
        )

    def facts(self) -> WorkerFacts:
        return self._facts

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.runner.execute(plan)

    def _decide(self, field: str, value: Any, reason: str) -> Any:
        shown = str(value).removeprefix("torch.") if not isinstance(value, int) else value
        self.decisions.append(Decision(field, shown, reason))
        return value

    def _choose_budget(self, config: EngineConfig, max_model_len: int) -> int:
        budget = config.scheduler.max_num_batched_tokens
        if config.scheduler.chunked_prefill or budget >= max_model_len:
            return budget
        reason = "without chunked prefill one step must be able to take the longest request"
        return self._decide("scheduler.max_num_batched_tokens", max_model_len, reason)


def choose_device(name: str) -> tuple[torch.device, str]:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("model.device=cuda, but torch sees no CUDA device. Use model.device=cpu or auto")
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu"), "a CUDA device is there" if has_cuda else "no CUDA device"
    return torch.device(name), "as configured"


def choose_threads(asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return asked, "as configured"
    try:
        return len(os.sched_getaffinity(0)), "the cores that this process may use"
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1, "the cores of this machine"


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name != "auto":
        return getattr(torch, name), "as configured"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return torch.bfloat16, "the GPU computes in bfloat16"
        return torch.float16, "the GPU has no bfloat16"
    if _cpu_has_bf16():
        return torch.bfloat16, "the CPU multiplies in bfloat16: half the memory traffic of float32"
    return torch.float32, "the CPU has no bfloat16 instructions, so bfloat16 would be emulated"


def _cpu_has_bf16() -> bool:
    """AVX-512 BF16 or AMX. torch has only private probes for them, so each may be missing."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
