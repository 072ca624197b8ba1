"""LLM: offline batches. Same call shapes and keyword names as vLLM's class, where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from minivllm.engine.client import EngineClient, InprocClient, LinkClient
from minivllm.engine.frontend import Asked, EngineHandle, Messages, Prompt
from minivllm.engine.link import ThreadLink
from minivllm.engine.output import RequestOutput
from minivllm.engine.pooled import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from minivllm.engine.pooling import Prompt as PoolingPrompt
from minivllm.engine.pooling import paired
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.lora.request import LoRARequest
from minivllm.lora.table import Adapter
from minivllm.pooling.text import Cut, Text
from minivllm.request import BeamSearchParams, PoolingParams, SamplingParams

if TYPE_CHECKING:
    import numpy as np

Params = SamplingParams | BeamSearchParams


class LLM(EngineHandle):
    """Offline batches: a call returns when all of its prompts are done. Arguments: see EngineHandle.

    A model that embeds, or task="embed", has embed() and score() instead of generate() and what stands on it; one with
    a classification head has classify(), and score() if that has one label.
    """

    def _start(self) -> None:
        link = self._link
        is_here = isinstance(link, ThreadLink)
        self._client: EngineClient = InprocClient(link.engine) if is_here else LinkClient(link)
        self.stats = self._client.stats
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Asked | Sequence[Asked] = None,
        client: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts. Greedy, sampled and beam requests may be mixed.

        prompts: texts, lists of token ids, {"prompt": text} or {"prompt_token_ids": ids}, the last two also with a
        "cache_salt". sampling_params: for all, or one each. priority: one each; the lowest goes first where
        scheduler.policy is priority.
        lora_request: the adapter of all prompts or of each, as a LoRARequest (loaded if it is not) or a loaded name.
        client: whose share of the engine they take, one or one each, where scheduler.policy is fair.
        Raises BadRequest, and runs nothing on, if one prompt or its parameters cannot be served.
        """
        prompts = as_list(prompts)
        each = _one_each("sampling_params", sampling_params or SamplingParams(), len(prompts))
        priorities = _one_each("priority", priority or 0, len(prompts))
        adapters = [self._adapter(asked) for asked in _one_each("lora_request", lora_request, len(prompts))]
        clients = _one_each("client", client, len(prompts))
        ids: list[str] = []
        try:
            for prompt, params, prio, adapter, whose in zip(prompts, each, priorities, adapters, clients, strict=True):
                ids.append(str(next(self._ids)))
                asked = {"priority": prio, "adapter": adapter, "client": whose}
                for request in self._front.requests(prompt, params, ids[-1], "final", **asked):
                    self._client.add(request)
            outputs = self._run(len(prompts), use_tqdm)
        except BaseException:  # an error, or Ctrl-C: leave nothing running behind
            self._client.abort([child for req_id in ids for child in self._front.processor.abort(req_id)])
            raise
        return [outputs[req_id] for req_id in ids]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Asked | Sequence[Asked] = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template.

        messages: [{"role": ..., "content": ...}, ...]. tools: what the model is told that it may call, as in OpenAI's
        requests. Its calls are in the text, as the model writes them. continue_final_message: the last message is the
        beginning of the answer; then add_generation_prompt must be False. Raises BadRequest as generate() does.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self._front.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        lora_request: Asked = None,
    ) -> list[RequestOutput]:
        """The beam_width best completions of each prompt, best first (scheduler/beam_search.py has the rules).

        cumulative_logprob is the sum that a completion was scored by. Raises BadRequest as generate() does.
        """
        return self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each text's vector, in their order.

        dimensions: only the first numbers, at unit length again if the model's vectors are (Matryoshka).
        use_activation: at unit length or not; None: as the model says.
        truncate_prompt_tokens: leave out the end of texts that have more tokens; -1: more than the model takes.
        truncation_side: "left": their start.
        prompt_name: which of the model's prompts to put before each text (sentence-transformers); None: its default.
        Raises BadRequest before anything runs if one of the texts cannot be embedded.
        """
        self.texts.check_dimensions(dimensions)
        cut = Cut(truncate_prompt_tokens, truncation_side)
        texts = [self.texts.text(prompt, cut, prompt_name=prompt_name) for prompt in as_list(prompts)]
        vectors = self._pool(texts, PoolingParams(dimensions=dimensions, use_activation=use_activation), use_tqdm)
        return [
            EmbeddingRequestOutput(str(next(self._ids)), list(text.token_ids), EmbeddingOutput(vector.tolist()))
            for text, vector in zip(texts, vectors, strict=True)
        ]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
    ) -> list[ScoringRequestOutput]:
        """How well each document answers the query: by cosine similarity, or by a cross-encoder's head. Each of several
        queries goes with the document at its place. use_activation: False leaves a head's scores as they are, before
        its sigmoid. truncate_prompt_tokens, truncation_side: as in embed(); of a cross-encoder's pair the longer text
        gives way. Raises BadRequest."""
        scoring = self.texts.scoring(paired(query, documents), Cut(truncate_prompt_tokens, truncation_side))
        scores = scoring.scores(self._pool(scoring.texts, PoolingParams(use_activation=use_activation), use_tqdm))
        return [
            ScoringRequestOutput(str(next(self._ids)), list(scoring.texts[document].token_ids), ScoringOutput(score))
            for document, score in zip(scoring.documents, scores, strict=True)
        ]

    def classify(
        self,
        prompts: PoolingPrompt | Sequence[PoolingPrompt],
        *,
        use_tqdm: bool = True,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] = "right",
    ) -> list[ClassificationRequestOutput]:
        """Of each text, how likely it is of each class. use_activation: False leaves the head's logits as they are,
        before its softmax or sigmoid. truncate_prompt_tokens, truncation_side: as in embed(). Raises BadRequest."""
        self.texts.check_classes()
        cut = Cut(truncate_prompt_tokens, truncation_side)
        texts = [self.texts.text(prompt, cut) for prompt in as_list(prompts)]
        found = self._pool(texts, PoolingParams(use_activation=use_activation), use_tqdm)
        made = [ClassificationOutput(probs.tolist(), self.texts.label_of(probs)) for probs in found]
        return [
            ClassificationRequestOutput(str(next(self._ids)), list(text.token_ids), output)
            for text, output in zip(texts, made, strict=True)
        ]

    def load_lora(self, name: str, path: str) -> Adapter:
        """Load an adapter (PEFT's folder) to be named by requests. Raises AdapterError."""
        self._know_loras(self._client.call("load_lora", name, path))
        return self._loras[name]

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. Raises UnknownAdapter."""
        self._know_loras(self._client.call("unload_lora", name))

    def _adapter(self, asked: Asked) -> str:
        """The name of a request's adapter, "" for none; a LoRARequest's is loaded if it is not."""
        if not isinstance(asked, LoRARequest):
            return self._loaded(asked)
        self._know_loras(self._client.call("ensure_lora", asked))
        return asked.lora_name

    def get_tokenizer(self) -> TextTokenizer:
        return self.tokenizer

    def shutdown(self) -> None:
        """Free the model and the cache, close traces. The object cannot be used afterwards."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _pool(self, texts: Sequence[Text], asked: PoolingParams, use_tqdm: bool) -> list[np.ndarray]:
        """The vector of each."""
        from tqdm import tqdm

        ids = [str(next(self._ids)) for _ in texts]
        number = {req_id: i for i, req_id in enumerate(ids)}
        found: dict[str, np.ndarray] = {}
        try:
            for req_id, text in zip(ids, texts, strict=True):
                for request in self.texts.pooling_requests([text], req_id, asked):
                    self._client.add(request)
            with tqdm(total=len(ids), desc="Processed texts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while len(found) < len(ids):
                    for output in self._front.process(self._client.poll(None))[0]:
                        (found[output.request_id],) = output.all_vectors(f"text {number[output.request_id]}: ")
                        bar.update()
        except BaseException:  # an error, or Ctrl-C: leave nothing running behind
            self._client.abort([child for req_id in ids for child in self._front.processor.abort(req_id)])
            raise
        return [found[req_id] for req_id in ids]

    def _run(self, num_prompts: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        from tqdm import tqdm

        outputs: dict[str, RequestOutput] = {}
        num_in = num_out = 0
        with tqdm(total=num_prompts, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while len(outputs) < num_prompts:
                finished, aborts = self._front.process(self._client.poll(None))
                self._client.abort(aborts)
                for output in finished:
                    outputs[output.request_id] = output
                    num_in += len(output.prompt_token_ids)
                    num_out += sum(len(completion.token_ids) for completion in output.outputs)
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    speed = f"input: {num_in / seconds:.1f} tokens/s, output: {num_out / seconds:.1f} tokens/s"
                    bar.set_postfix_str(speed, refresh=False)
                bar.update(len(finished))
        return outputs


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, or a list of token ids, is one prompt; any other sequence is several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return list(prompts)


def _one_each(name: str, values: Any, n: int) -> list:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * n
    if len(values) != n:
        raise BadRequest(f"{n} prompts, but {len(values)} of {name}", name)
    return list(values)
