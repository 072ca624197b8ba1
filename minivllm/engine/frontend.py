"""FrontEnd: text on one side, tokens on the other. What LLM and AsyncLLM share, with no loop of its own.

prompt -> tokenise, check, resolve -> EngineRequest ... Delta -> detokenise, stop strings -> RequestOutput
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from minivllm.config import Decision, EngineConfig, from_vllm_names
from minivllm.engine.audio import KEY as AUDIO
from minivllm.engine.audio import AudioReader
from minivllm.engine.build import build
from minivllm.engine.core import Observer
from minivllm.engine.detokenizer import AnswerFinder
from minivllm.engine.link import Link, ThreadLink
from minivllm.engine.messages import Facts
from minivllm.engine.output import Named, OutputProcessor, RequestOutput
from minivllm.engine.pooling import PoolingFrontEnd
from minivllm.engine.prepare import children, fitted, resolve
from minivllm.engine.prompt_embeds import KEY as PROMPT_EMBEDS
from minivllm.engine.prompt_embeds import check_params, embeds_of
from minivllm.engine.speech import Speech
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest, ConfigError
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter, find, lora_is_off
from minivllm.plan import Delta
from minivllm.pooling.task import GENERATE
from minivllm.request import BeamSearchParams, Beside, EngineRequest, SamplingParams, sequence_ids

# Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dictionary may have a "cache_salt", and with or
# without a text or ids "prompt_embeds", vectors that stand before them. Of a model that hears, a text gets no special
# tokens but those that are written in it, and "multi_modal_data" is {"audio": (samples, how many a second)}.
Prompt = str | Sequence[int] | Mapping[str, Any]
OutputKind = Literal["cumulative", "delta", "final"]
Messages = Sequence[Mapping[str, Any]]
Asked = LoRARequest | str | None  # an adapter: to be loaded if need be, or the name of one that is loaded


def make_config(
    model: str | None, preset: str, overrides: Mapping[str, Any] | None, vllm_names: Mapping[str, Any]
) -> EngineConfig:
    """One configuration from every way to say it; `overrides` win over vLLM's names, those over the preset."""
    named = from_vllm_names({"model": model, **vllm_names} if model is not None else vllm_names)
    return EngineConfig.build(preset, {**named, **(overrides or {})})


class Hearing(NamedTuple):
    """What a model that hears is asked with."""

    audio: AudioReader
    speech: Speech


class EngineHandle:
    """A model and its engine: the ground of LLM and AsyncLLM.

    model: an alias, a folder, a .gguf file, dummy:<shape> or a Hub id; the default needs no account and no GPU.
    preset and overrides={"kv.prefix": "none"} set any option; vLLM's keywords (max_model_len, max_num_seqs,
    max_num_batched_tokens, enable_prefix_caching, dtype, seed ...) do the same for the common ones. clock: seconds, for
    all times of requests; one that is not the machine's needs a core in this process.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        preset: str = "v1",
        overrides: Mapping[str, Any] | None = None,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        **vllm_names: Any,
    ):
        self._use(_connect(make_config(model, preset, overrides, vllm_names), observers, clock))

    def _use(self, link: Link, front_end: int = 0) -> None:
        """front_end: its number, where several share the engine."""
        self._link = link
        self._core = link.core if isinstance(link, ThreadLink) else None
        self.clock = self._core.clock if self._core else time.monotonic
        facts = link.facts
        self.config = facts.config
        self.decisions: list[Decision] = facts.decisions
        self.max_model_len = facts.max_model_len
        self.model_name = facts.model_name
        self.info = facts.info
        self._loras = {adapter.name: adapter for adapter in facts.adapters}
        self.task: str = facts.info.get("task", GENERATE)
        front = FrontEnd if self.task == GENERATE else PoolingFrontEnd
        self._front = front(facts, front_end, self.clock)
        self.tokenizer = self._front.tokenizer
        self._start()

    def _start(self) -> None:
        """What a subclass needs beside the engine."""

    @property
    def texts(self) -> PoolingFrontEnd:
        """What a model that embeds or scores takes. Raises BadRequest for one that was loaded to generate."""
        if isinstance(self._front, PoolingFrontEnd):
            return self._front
        raise BadRequest(f'{self.model_name} was loaded to generate: LLM(model, task="embed") embeds and scores')

    @property
    def hearing(self) -> Hearing:
        """Raises BadRequest for a model that reads text alone."""
        if isinstance(self._front, FrontEnd) and self._front.hearing is not None:
            return self._front.hearing
        raise BadRequest(f"{self.model_name} reads text alone; whisper-tiny.en writes down what is said", "model")

    def list_loras(self) -> list[Adapter]:
        """The LoRA adapters that requests may name, oldest first."""
        return list(self._loras.values())

    def _know_loras(self, listed: list[dict[str, Any]]) -> None:
        """listed: what each of the engine's calls about adapters gives."""
        self._loras = {adapter.name: adapter for adapter in msgspec.convert(listed, list[Adapter])}

    def _loaded(self, name: str | None) -> str:
        """The name of a loaded adapter, "" for none. Raises UnknownAdapter."""
        if name and not self.config.lora.enabled:
            raise lora_is_off()
        return find(self._loras, name).name if name else ""


def _connect(config: EngineConfig, observers: Sequence[Observer], clock: Callable[[], float]) -> Link:
    if config.engine.core == "inproc":
        return ThreadLink(build(config, observers, clock))
    if observers:
        raise ConfigError("observers watch a core in this process: engine.core=inproc (for a trace: debug.trace=FILE)")
    if clock is not time.monotonic:
        raise ConfigError("a clock of your own can only be read by a core in this process: engine.core=inproc")
    from minivllm.engine.replicas import start_cores  # ZeroMQ's, which a core in this process has no use for

    return start_cores(config)


def salt_of(prompt: Prompt) -> str:
    """A prompt dictionary's "cache_salt", "" for none."""
    salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
    if not isinstance(salt, str) or (isinstance(prompt, Mapping) and "cache_salt" in prompt and not salt):
        raise BadRequest(f"cache_salt must be a text that is not empty, got {salt!r}", "cache_salt")
    return salt


class FrontEnd:
    def __init__(self, facts: Facts, number: int = 0, clock: Callable[[], float] = time.monotonic):
        """number: of several front ends of one engine; each draws seeds of its own. clock: the core's."""
        self.max_model_len = facts.max_model_len
        self.tokenizer = TextTokenizer.load(Path(facts.tokenizer_dir))
        self.processor = OutputProcessor(self.tokenizer)
        self.clock = clock
        self._vocab_size = facts.info["vocab_size"]
        self._embed_size = facts.info.get("embed_size", 0)
        self.hearing = self._hearing(facts)
        self._max_logprobs = facts.config.engine.max_logprobs
        self._own = object()  # tells what this front end has resolved from what another has
        self._rng = random.Random(f"{facts.config.model.seed}/{number}" if number else facts.config.model.seed)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text if it was given, token ids). Raises BadRequest for anything that is no prompt."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", PROMPT_EMBEDS, AUDIO}
            if unknown or not prompt:
                raise BadRequest(
                    'a prompt dictionary has "prompt", "prompt_token_ids" or "prompt_embeds", and may have '
                    f'"cache_salt" and, where the model hears, "multi_modal_data"; not {sorted(unknown)}',
                    "prompt",
                )
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt", [] if PROMPT_EMBEDS in prompt else None))
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=self.hearing is None)
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
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        kind: OutputKind,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        client: str = "",
        find_answer: Callable[[], AnswerFinder] | None = None,
    ) -> list[EngineRequest]:
        """The engine requests of one prompt: one for each of n samples, or one that searches with beams. Their outputs
        are expected from now on.

        adapter: the name of a LoRA adapter; the engine core refuses one that is not loaded when the request arrives.
        client: whose share of the engine they take, where scheduler.policy is fair. find_answer: for a model that
        thinks, of each output: what its stops look at.
        """
        text, token_ids = self.tokenize(prompt)
        beside = self._beside(prompt)
        if beside.token_ids:
            token_ids = [*beside.token_ids, *token_ids]
            check_params(params.step if isinstance(params, BeamSearchParams) else params)
        cache_salt = salt_of(prompt) or cache_salt
        beam = params if isinstance(params, BeamSearchParams) else None
        resolved = self.prepare(beam.step, token_ids, -1) if beam else self.prepare(params, token_ids)
        each = [resolved] if beam else children(resolved)
        num_outputs = beam.beam_width if beam else resolved.num_sequences
        ids = sequence_ids(request_id, num_outputs)
        group = request_id if num_outputs > 1 else ""
        now = self.clock()
        self.processor.add(request_id, text, token_ids, resolved, ids, now, kind, find_answer)
        return [
            EngineRequest(
                *(req_id, token_ids, child, now, priority, adapter, cache_salt, group, beam, client),
                items=beside.items,
                contents=beside.contents,
            )
            for req_id, child in zip(ids, each, strict=False)
        ]

    def _hearing(self, facts: Facts) -> Hearing | None:
        """None: the model reads text alone."""
        shape = facts.info.get("audio_shape")
        if not shape:
            return None
        reader, folder = AudioReader(*shape), Path(facts.tokenizer_dir)
        reader.check(folder)
        return Hearing(reader, Speech(self.tokenizer, folder, self._vocab_size))

    def _beside(self, prompt: Prompt) -> Beside:
        """What it has beside its tokens. Raises BadRequest."""
        if self.hearing is not None:
            return self.hearing.audio.read(prompt)
        if isinstance(prompt, Mapping) and AUDIO in prompt:
            raise BadRequest("this model takes text alone, and no sound or images", AUDIO)
        return embeds_of(prompt, self._embed_size, self.max_model_len)

    def prepare(self, params: SamplingParams, token_ids: list[int], most: int | None = None) -> SamplingParams:
        """Check the parameters against prompt, model and tokenizer, and decide what was left open. most: reported
        tokens of a position; None: as configured."""
        most = self._max_logprobs if most is None else most
        return fitted(self._resolved(params, most), token_ids, self.max_model_len, self._rng, self._vocab_size)

    def _resolved(self, params: SamplingParams, most: int) -> SamplingParams:
        """Made once for all prompts of a request, which come with one object, and between those of other requests."""
        owner, resolved = params.__dict__.get("resolved", (None, None))
        if owner is not self._own:
            resolved = resolve(params, self.tokenizer, self._vocab_size, most)
            params.__dict__["resolved"] = self._own, resolved
        return resolved

    def process(self, deltas: list[Delta], named: Named | None = None) -> tuple[list[RequestOutput], list[str]]:
        """Outputs for the clients, and the ids that the engine core shall abort (a stop string was found). named:
        OutputProcessor.named's, if that has been called."""
        return self.processor.process(deltas, self.clock(), named)
