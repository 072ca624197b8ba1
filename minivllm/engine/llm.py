"""LLM: offline batches. Same call shapes and keyword names as vLLM's class, where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from minivllm.engine.beam import BeamSearch, BeamSearchParams, search
from minivllm.engine.client import InprocClient
from minivllm.engine.frontend import Asked, EngineHandle, Messages, Prompt
from minivllm.engine.output import CompletionOutput, RequestOutput
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.lora.table import Adapter
from minivllm.plan import PositionLogprobs
from minivllm.request import SamplingParams


class LLM(EngineHandle):
    """Offline batches: a call returns when all of its prompts are done. Arguments: see EngineHandle."""

    def _start(self) -> None:
        self._client = InprocClient(self._core)
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Asked | Sequence[Asked] = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs in the order of the prompts.

        lora_request: the adapter of all prompts or of each, as a LoRARequest (loaded if it is not) or a loaded name.
        Raises BadRequest before anything runs if one prompt or its parameters cannot be served.
        """
        prompts = _as_list(prompts)
        each = _one_each("sampling_params", sampling_params or SamplingParams(), len(prompts))
        priorities = _one_each("priority", priority or 0, len(prompts))
        loras = _one_each("lora_request", lora_request, len(prompts))
        ids: list[str] = []
        try:
            for prompt, params, prio, lora in zip(prompts, each, priorities, loras, strict=True):
                ids.append(str(next(self._ids)))
                name = self._name_of(lora)
                for request in self._front.requests(prompt, params, ids[-1], "final", prio, adapter=name):
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Asked | Sequence[Asked] = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self._front.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
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
        """The beam_width best completions of each prompt, best first (engine/beam.py has the rules).

        cumulative_logprob is the sum that a completion was scored by. Raises BadRequest as generate() does.
        """
        prompts = _as_list(prompts)
        texts, searches = [], []
        for prompt in prompts:
            text, token_ids = self._front.tokenize(prompt)
            asked = params.step.replace(max_tokens=params.max_tokens, ignore_eos=False)
            prepared = self._front.prepare(asked, token_ids)
            eos = () if params.ignore_eos else prepared.eos_token_ids
            texts.append(text)
            searches.append(BeamSearch(params, token_ids, eos, prepared.max_tokens))

        def ask(contexts: list[list[int]]) -> list[PositionLogprobs]:
            step = params.step.replace(detokenize=False)
            outputs = self.generate(contexts, step, use_tqdm=False, lora_request=lora_request)
            return [_positions(output) for output in outputs]

        search(searches, ask)
        return [self._beam_output(text, one) for text, one in zip(texts, searches, strict=True)]

    def _beam_output(self, text: str | None, one: BeamSearch) -> RequestOutput:
        decode = self.tokenizer.decode
        completions = [
            CompletionOutput(i, decode(beam.token_ids), list(beam.token_ids), beam.logprob, None, beam.finish_reason)
            for i, beam in enumerate(one.finished)
        ]
        return RequestOutput(str(next(self._ids)), text, one.prompt_token_ids, outputs=completions, finished=True)

    def load_lora(self, name: str, path: str) -> Adapter:
        """Load an adapter (PEFT's folder) to be named by requests. Raises AdapterError."""
        return self._adapters.load(name, path)

    def unload_lora(self, name: str) -> None:
        """Raises UnknownAdapter."""
        self._adapters.unload(name)

    def get_tokenizer(self) -> TextTokenizer:
        return self.tokenizer

    def shutdown(self) -> None:
        """Free the model and the cache, close traces. The object cannot be used afterwards."""
        self._core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

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


def _positions(output: RequestOutput) -> PositionLogprobs:
    """The reported tokens of a one-token answer."""
    (position,) = output.outputs[0].logprobs
    return [(token, logprob.logprob, logprob.rank) for token, logprob in position.items()]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
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
