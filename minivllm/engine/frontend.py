"""FrontEnd: text on one side, tokens on the other. What LLM and AsyncLLM share, with no loop of its own.

prompt -> tokenise, check, resolve -> EngineRequest ... Delta -> detokenise, stop strings -> RequestOutput
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from minivllm.config import Decision, EngineConfig, from_vllm_names
from minivllm.engine.build import Engine, build
from minivllm.engine.core import EngineStats, Observer
from minivllm.engine.output import OutputProcessor, RequestOutput
from minivllm.engine.prepare import child_ids, children, prepare
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter
from minivllm.plan import Delta
from minivllm.request import EngineRequest, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
OutputKind = Literal["cumulative", "delta", "final"]
Messages = Sequence[Mapping[str, Any]]
Asked = LoRARequest | str | None  # an adapter: to be loaded if need be, or the name of one that is loaded


def make_config(
    model: str | None, preset: str, overrides: Mapping[str, Any] | None, vllm_names: Mapping[str, Any]
) -> EngineConfig:
    """One configuration from every way to say it; `overrides` win over vLLM's names, those over the preset."""
    named = from_vllm_names({"model": model, **vllm_names} if model is not None else vllm_names)
    return EngineConfig.build(preset, {**named, **(overrides or {})})


class EngineHandle:
    """A model and its engine in this process: the ground of LLM and AsyncLLM.

    model: an alias, a folder, a .gguf file, dummy:<shape> or a Hub id; the default needs no account and no GPU.
    preset and overrides={"kv.prefix": "none"} set any option; vLLM's keywords (max_model_len, max_num_seqs,
    max_num_batched_tokens, enable_prefix_caching, dtype, seed ...) do the same for the common ones.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        preset: str = "v1",
        overrides: Mapping[str, Any] | None = None,
        observers: Sequence[Observer] = (),
        **vllm_names: Any,
    ):
        engine = build(make_config(model, preset, overrides, vllm_names), observers)
        self.config = engine.config
        self.decisions: list[Decision] = engine.decisions
        self.max_model_len = engine.max_model_len
        self.model_name = engine.model_name
        self.info = engine.info
        self._core = engine.core
        self._adapters = engine.adapters
        self._front = FrontEnd(engine)
        self.tokenizer = self._front.tokenizer
        self._start()

    def _start(self) -> None:
        """What a subclass needs beside the engine."""

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    def list_loras(self) -> list[Adapter]:
        """The LoRA adapters that requests may name, oldest first."""
        return list(self._adapters.loaded.values())

    def _name_of(self, asked: Asked) -> str:
        """The adapter's name, "" for none; a LoRARequest's is loaded now, which belongs to the thread that steps."""
        if isinstance(asked, LoRARequest):
            return self._adapters.ensure(asked)
        return self._adapters.find(asked).name if asked else ""


class FrontEnd:
    def __init__(self, engine: Engine):
        self.max_model_len = engine.max_model_len
        self.tokenizer = TextTokenizer.load(engine.tokenizer_dir)
        self.processor = OutputProcessor(self.tokenizer)
        self._vocab_size = engine.info["vocab_size"]
        self._rng = random.Random(engine.config.model.seed)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text if it was given, token ids). Raises BadRequest for anything that is no prompt."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise BadRequest(
                    f'a prompt dictionary has "prompt" or "prompt_token_ids", not {sorted(unknown)}', "prompt"
                )
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            return None, list(prompt)
        raise BadRequest(f"a prompt is text or a list of token ids, got {type(prompt).__name__}", "prompt")

    def chat_prompt(self, messages: Messages, **template_args: Any) -> dict[str, Any]:
        """The conversation as one prompt. The template writes the special tokens itself."""
        text = self.tokenizer.apply_chat_template(messages, **template_args)
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        kind: OutputKind,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
    ) -> list[EngineRequest]:
        """The engine requests of one prompt (params.n of them), with their outputs expected from now on.

        adapter: the name of a LoRA adapter; the engine core refuses one that is not loaded when the request arrives.
        """
        text, token_ids = self.tokenize(prompt)
        resolved = self.prepare(params, token_ids)
        now = time.monotonic()
        each = children(resolved)
        ids = child_ids(request_id, len(each))
        group = request_id if len(each) > 1 else ""
        self.processor.add(request_id, text, token_ids, resolved, ids, now, kind)
        return [
            EngineRequest(req_id, token_ids, child, now, priority, adapter, cache_salt, group)
            for req_id, child in zip(ids, each, strict=True)
        ]

    def prepare(self, params: SamplingParams, token_ids: list[int]) -> SamplingParams:
        """Check the parameters against prompt, model and tokenizer, and decide what was left open."""
        return prepare(params, token_ids, self.tokenizer, self.max_model_len, self._rng, self._vocab_size)

    def process(self, deltas: list[Delta]) -> tuple[list[RequestOutput], list[str]]:
        """Outputs for the clients, and the ids that the engine core shall abort (a stop string was found)."""
        return self.processor.process(deltas, time.monotonic())
