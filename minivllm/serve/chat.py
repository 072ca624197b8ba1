"""/v1/chat/completions: messages through the model's chat template, answers as messages or their deltas."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from minivllm.engine.output import CompletionOutput, Logprob, RequestOutput
from minivllm.errors import BadRequest
from minivllm.serve.generation import Job, Prompt, Service, check_context, finite, new_id, prompt_logprobs, tokenize
from minivllm.serve.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Message,
    TokenLogprob,
    TopLogprob,
    Usage,
    now,
)

RESERVED = {"self", "template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


async def prepare(body: ChatRequest, service: Service) -> tuple[Job, ChatShape]:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("max_tokens is the older name of max_completion_tokens: give one of them", "max_tokens")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    params = body.sampling(max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    prompt = await tokenize(service, render(body, service), add_special_tokens=False)
    check_context(service, [prompt], max_tokens, "messages", name)
    job = Job(service, new_id("chatcmpl"), [prompt], params, body)
    return job, ChatShape(job.id, service, body)


def render(body: ChatRequest, service: Service) -> str:
    if not body.messages:
        raise BadRequest("messages is empty: give at least one, such as a user's", "messages")
    goes_on = bool(body.continue_final_message)
    add_prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on and (add_prompt or body.messages[-1].role != "assistant"):
        why = "needs a last message of the assistant, and add_generation_prompt=false"
        raise BadRequest(f"continue_final_message {why}", "continue_final_message")
    if reserved := RESERVED & set(body.chat_template_kwargs or {}):
        raise BadRequest(f"chat_template_kwargs may not set {sorted(reserved)[0]}", "chat_template_kwargs")
    return service.engine.tokenizer.apply_chat_template(
        [as_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        add_generation_prompt=add_prompt,
        continue_final_message=goes_on,
        **(body.chat_template_kwargs or {}),
    )


def as_template_message(message: Message, path: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise BadRequest(f'{path}.role "{message.role}" is not supported: tool calling', f"{path}.role")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                where = f"{path}.content[{i}]"
                raise BadRequest(f'{where}: only parts of type "text", with a text, are supported', where)
        content = "\n".join(part.text for part in content)
    if content is None:
        raise BadRequest(f"{path}.content is missing", f"{path}.content")
    return {"role": role, "content": content} | ({"name": message.name} if message.name else {})


class ChatShape:
    def __init__(self, id: str, service: Service, body: ChatRequest):
        self.id, self.model, self.body, self.created = id, service.answers_as(body), body, now()
        self.tokenizer = service.engine.tokenizer
        self.prompt_token_ids: list[int] | UnsetType = UNSET  # to go with the next chunk

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> ChatChunkChoice:
        if self.body.return_token_ids and choice == 0:
            self.prompt_token_ids = prompt.token_ids
        return ChatChunkChoice(index=choice, delta=ChatDelta(role="assistant", content=""))

    def delta(self, choice: int, out: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice,
            delta=ChatDelta(content=out.text),
            logprobs=self._logprobs(out),
            token_ids=self._token_ids(out),
        )

    def ending(self, choice: int, out: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(index=choice, finish_reason=out.finish_reason, stop_reason=out.stop_reason)

    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=choice,
            message=ChatMessage(out.text),
            logprobs=self._logprobs(out),
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            token_ids=self._token_ids(out),
        )

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | None | UnsetType,
        outputs: list[RequestOutput] | None = None,
    ) -> ChatChunk | ChatCompletion:
        common = {"id": self.id, "model": self.model, "created": self.created, "choices": choices, "usage": usage}
        if outputs is None:
            prompt_token_ids, self.prompt_token_ids = self.prompt_token_ids, UNSET
            return ChatChunk(**common, prompt_token_ids=prompt_token_ids)
        if self.body.return_token_ids:
            common["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self.body.prompt_logprobs is not None:
            common["prompt_logprobs"] = prompt_logprobs(outputs[0])
        return ChatCompletion(**common)

    def _logprobs(self, out: CompletionOutput) -> ChatLogprobs | None:
        if out.logprobs is None:
            return None
        return ChatLogprobs([self._position(*each) for each in zip(out.token_ids, out.logprobs, strict=True)])

    def _position(self, taken: int, position: dict[int, Logprob]) -> TokenLogprob:
        def triple(token: int) -> tuple[str, float, list[int]]:
            lp = position[token]
            return lp.decoded_token, finite(lp.logprob), list(self.tokenizer.token_bytes(token))

        likeliest = sorted(position, key=lambda token: -position[token].logprob)[: self.body.top_logprobs or 0]
        return TokenLogprob(*triple(taken), [TopLogprob(*triple(token)) for token in likeliest])

    def _token_ids(self, out: CompletionOutput) -> list[int] | UnsetType:
        return list(out.token_ids) if self.body.return_token_ids else UNSET
