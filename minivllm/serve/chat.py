"""/v1/chat/completions: messages through the model's chat template, answers as messages or their deltas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from minivllm.engine import template_child
from minivllm.engine.output import CompletionOutput, Logprob, RequestOutput
from minivllm.engine.template_shapes import text_of
from minivllm.errors import BadRequest, ModelError
from minivllm.request import SamplingParams
from minivllm.serve import price
from minivllm.serve.beams import beam_search
from minivllm.serve.generation import (
    Job,
    Prompt,
    Service,
    check_context,
    check_logprobs,
    finite,
    is_shown,
    new_id,
    prompt_logprobs,
    tokenize,
    truncated,
    wants_tokens,
    with_nulls,
)
from minivllm.serve.protocol import (
    NO_EFFORT,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ContentPart,
    Message,
    ReasoningTokens,
    TokenLogprob,
    TopLogprob,
    Usage,
    now,
)
from minivllm.serve.reasoning.ask import (
    Thinking,
    budget,
    effort_variables,
    pattern_of,
    special_id,
    thinking,
    with_thinking,
)
from minivllm.serve.structured import is_of_raw_text
from minivllm.serve.tools.answer import Answer, PlainAnswer, ToolAnswer
from minivllm.serve.tools.ask import ToolUse, asked, enforced
from minivllm.serve.tools.forms import Writing
from minivllm.serve.tools.parsers import ArgumentsParser, ArrayParser, ToolParser
from minivllm.structured.params import StructuredParams

MAX_TEMPLATE_CHARS = 2**16  # of a request's own; those of models have a few thousand
WHOLE = ("prompt_token_ids", "prompt_logprobs", "service_tier", "kv_transfer_params")  # null where there is nothing
RESERVED = {"self", "template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
RESERVED |= {"run"}


def prepare(body: ChatRequest, service: Service) -> tuple[Job, ChatShape]:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise BadRequest("logprob_token_ids needs logprobs=true", "logprob_token_ids")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("max_tokens is the older name of max_completion_tokens: give one of them", "max_tokens")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    params = body.sampling(max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    use = asked(body)
    parser = find_parser(use, service)
    params = for_tools(params, use, parser, service)
    text = rendered(body, use, service)
    prompt = tokenize(service, text, add_special_tokens=False)
    prompt = truncated(prompt, body, max_tokens, service)
    check_context(service, [prompt], max_tokens, "messages", name)
    reports = {"top_logprobs": body.top_logprobs, "prompt_logprobs": body.prompt_logprobs}
    check_logprobs(service, reports, [prompt])
    may_call = use.schemas if use.mode == "auto" else ()
    thought, tokenizer = thinking(body, text, service.reasoning_parser, may_call), service.engine.tokenizer
    if thought is not None:
        params = with_thinking(params, thought, budget(body), tokenizer)
    if body.use_beam_search:
        room = service.engine.max_model_len - len(prompt.token_ids)
        params = beam_search(body, min(max_tokens or room, room))
    job = Job(service, new_id("chatcmpl", body.request_id), [prompt], params, body)
    price.check(job, price.Names("messages", name, "top_logprobs"))
    job.ignored = ignored_effort(body, service)
    if thought is not None:
        job.thinking, job.usage.completion_tokens_details = thought.tokens(tokenizer), ReasoningTokens()
        job.find_answer = thought.reader
    call_id = (service.tool_parser or parser or ArrayParser).new_id
    return job, ChatShape(job.id, service, body, partial(make_answer, use, parser, thought, call_id))


def make_answer(
    use: ToolUse, parser: type[ToolParser] | None, thought: Thinking | None, call_id: Callable[[], str]
) -> Answer:
    """That reads one choice: thinking first, calls in what is none. call_id: makes one such as the model's chat
    template reads, for forced calls, too."""
    rest = PlainAnswer() if parser is None else ToolAnswer(parser(use.schemas), use.parallel, call_id)
    return rest if thought is None else thought.answer(rest)


def find_parser(use: ToolUse, service: Service) -> type[ToolParser] | None:
    """None: the request has no tools, or wants no calls. A forced call is JSON, whatever the model is used to."""
    if use.mode != "auto":
        return {"none": None, "required": ArrayParser, "named": ArgumentsParser}[use.mode]
    if service.tool_parser is None:
        why = "this model's chat template writes calls in a form that no parser here reads"
        raise BadRequest(f'{why}; start the server with --tool-call-parser, or use tool_choice "required"', "tools")
    return service.tool_parser


def for_tools(
    params: SamplingParams, use: ToolUse, parser: type[ToolParser] | None, service: Service
) -> SamplingParams:
    """With the grammar of a forced call, or, where the model may call, with a way out of the grammar that its answer is
    held to, unless that is about the raw text; and with special tokens in the text if a call's markers are such."""
    special = partial(special_id, service.engine.tokenizer)
    if (schema := enforced(use)) is not None:
        params = params.replace(structured=StructuredParams(json=schema, disable_any_whitespace=True, field=use.field))
    elif parser is not None and params.structured is not None and not is_of_raw_text(params.structured):
        params = params.replace(structured=beside_calls(params.structured, use, parser, special))
    hidden = any(special(marker) is not None for marker in (parser.markers if parser else ()))
    return params.replace(skip_special_tokens=False) if hidden else params


def beside_calls(
    structured: StructuredParams, use: ToolUse, parser: type[ToolParser], special: Callable[[str], int | None]
) -> StructuredParams:
    """With calls that follow their functions' schemas; where the format is none of JSON, with what a call begins with,
    behind which it is free."""
    specials = {marker: token for marker in parser.markers if (token := special(marker)) is not None}
    writing = Writing(use, partial(pattern_of, specials=specials))
    forms = tuple(parser.forms(writing))
    if any(len(form) > 1 for form in forms):
        return msgspec.structs.replace(structured, calls=writing.calls(forms))
    escapes = tuple(specials.get(text, text) for (texts,) in forms for text in texts)
    return msgspec.structs.replace(structured, escapes=escapes)


def rendered(body: ChatRequest, use: ToolUse, service: Service) -> str:
    """By the model's template, or by the request's, in a process of its own: how long that takes is up to the client,
    so no loop waits for it (bodies.taken)."""
    if body.chat_template is None:
        return render(body, use, service)
    check_template(body.chat_template, service)
    try:
        return render(body, use, service)
    except ModelError as error:
        raise BadRequest(f"chat_template: {error}", "chat_template") from None


def check_template(source: str, service: Service) -> None:
    if not service.trust_templates:
        why = (
            "a request's own chat template is not run here: the server's option --trust-request-chat-template allows it"
        )
        raise BadRequest(why, "chat_template")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise BadRequest(f"chat_template has {len(source)} characters; {MAX_TEMPLATE_CHARS} at most", "chat_template")


def render(body: ChatRequest, use: ToolUse, service: Service) -> str:
    if not body.messages:
        raise BadRequest("messages is empty: give at least one, such as a user's", "messages")
    goes_on = bool(body.continue_final_message)
    add_prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on and (add_prompt or body.messages[-1].role != "assistant"):
        why = "needs a last message of the assistant, and add_generation_prompt=false"
        raise BadRequest(f"continue_final_message {why}", "continue_final_message")
    if reserved := RESERVED & set(body.chat_template_kwargs or {}):
        raise BadRequest(f"chat_template_kwargs may not set {sorted(reserved)[0]}", "chat_template_kwargs")
    variables = service.engine.tokenizer.template_variables
    held = service.control_tokens.held
    return service.control_tokens.rendered(
        service.engine.tokenizer.apply_chat_template(
            [
                held(as_template_message(message, f"messages[{i}]"), f"messages[{i}]")
                for i, message in enumerate(body.messages)
            ],
            add_generation_prompt=add_prompt,
            continue_final_message=goes_on,
            tools=held(use.for_template(), "tools"),
            template=body.chat_template,
            variables=effort_variables(body.reasoning_effort, variables)
            | held(body.chat_template_kwargs or {}, "chat_template_kwargs"),
            **({} if body.chat_template is None else {"run": template_child.render}),
        )
    )


def last_message(body: ChatRequest) -> str:
    """What `echo` repeats: the last message, if the answer is of its role (vLLM). That is the assistant's, or any where
    the prompt does not end with who speaks."""
    message = body.messages[-1]
    if message.role != "assistant" and body.add_generation_prompt is not False:
        return ""
    return text_of(as_template_message(message, ""))


def ignored_effort(body: ChatRequest, service: Service) -> dict[str, str]:
    """The field and the reason, if the chat template has no use for the effort that is asked for."""
    variables = service.engine.tokenizer.template_variables
    asks_for_nothing = body.reasoning_effort == "none" and service.reasoning_parser is None
    if body.reasoning_effort is None or asks_for_nothing or effort_variables(body.reasoning_effort, variables):
        return {}
    return {"reasoning_effort": NO_EFFORT}


def as_template_message(message: Message, path: str) -> dict[str, Any]:
    """Raises BadRequest for a content that is missing where none of the assistant's may be."""
    content = message.content if message.content is not None else message.refusal
    if isinstance(content, list):
        for i, part in enumerate(content):
            if said_in(part) is None:
                where = f"{path}.content[{i}]"
                raise BadRequest(f'{where}: only parts of type "text", with a text, are supported', where)
        content = [{"type": "text", "text": said_in(part)} for part in content]
    if content is None and message.role != "assistant":
        raise BadRequest(f"{path}.content is missing", f"{path}.content")
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [as_template_call(call) for call in message.tool_calls or ()],
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
    }
    return {"role": message.role, "content": content} | {key: value for key, value in optional.items() if value}


def said_in(part: ContentPart) -> str | None:
    return {"text": part.text, "refusal": part.refusal}.get(part.type)


def as_template_call(call: CalledTool) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatShape:
    def __init__(self, id: str, service: Service, body: ChatRequest, make_answer: Callable[[], Answer]):
        self.id, self.model, self.body, self.created = id, service.answers_as(body), body, now()
        self.tokenizer, self.fingerprint = service.engine.tokenizer, service.fingerprint
        self.prompt_token_ids: list[int] | UnsetType = UNSET  # to go with the next chunk
        self.echoed = last_message(body) if body.echo else ""
        self.make_answer = make_answer
        self.answers: defaultdict[int, Answer] = defaultdict(make_answer)  # of a stream, by choice

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> ChatChunkChoice:
        if self.body.return_token_ids and choice == 0:
            self.prompt_token_ids = prompt.token_ids
        return ChatChunkChoice(index=choice, delta=ChatDelta(role="assistant", content=self.echoed))

    def deltas(self, choice: int, out: CompletionOutput) -> list[ChatChunkChoice]:
        """One for text, one for each part of a call; tokens and logprobs go with the first."""
        answer = self.answers[choice]
        deltas = answer.deltas(out.text, finished=out.finished)
        if not deltas and isinstance(answer, PlainAnswer) and is_shown(out):
            deltas = [ChatDelta(content="")]
        if not deltas and not wants_tokens(self.body, out):
            return []
        first, *more = deltas or [ChatDelta()]
        return [
            ChatChunkChoice(index=choice, delta=first, logprobs=self._logprobs(out), token_ids=self._token_ids(out)),
            *(ChatChunkChoice(index=choice, delta=delta) for delta in more),
        ]

    def ending(self, choice: int, out: CompletionOutput) -> ChatChunkChoice:
        reason = self.answers[choice].finish_reason(out.finish_reason)
        return ChatChunkChoice(index=choice, finish_reason=reason, stop_reason=out.stop_reason)

    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> ChatChoice:
        answer = self.make_answer()
        message = answer.message(out.text)
        if self.echoed:
            message.content = self.echoed + (message.content or "")
        made = ChatChoice(
            index=choice,
            message=message,
            logprobs=self._logprobs(out),
            finish_reason=answer.finish_reason(out.finish_reason),
            stop_reason=out.stop_reason,
            token_ids=self._token_ids(out),
        )
        return with_nulls(made, ("token_ids",))

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | None | UnsetType,
        outputs: list[RequestOutput] | None = None,
    ) -> ChatChunk | ChatCompletion:
        common = {"id": self.id, "model": self.model, "created": self.created, "choices": choices, "usage": usage}
        common["system_fingerprint"] = self.fingerprint
        if outputs is None:
            prompt_token_ids, self.prompt_token_ids = self.prompt_token_ids, UNSET
            return ChatChunk(**common, prompt_token_ids=prompt_token_ids)
        if self.body.return_token_ids:
            common["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self.body.prompt_logprobs is not None:
            common["prompt_logprobs"] = prompt_logprobs(outputs[0])
        return with_nulls(ChatCompletion(**common), WHOLE)

    def _logprobs(self, out: CompletionOutput) -> ChatLogprobs | None:
        if out.logprobs is None:
            return None
        return ChatLogprobs([self._position(*each) for each in zip(out.token_ids, out.logprobs, strict=True)])

    def _position(self, taken: int, position: dict[int, Logprob]) -> TokenLogprob:
        def triple(token: int) -> tuple[str, float, list[int]]:
            lp = position[token]
            name = f"token_id:{token}" if self.body.return_tokens_as_token_ids else lp.decoded_token
            return name, finite(lp.logprob), list(self.tokenizer.token_bytes(token))

        return TokenLogprob(*triple(taken), [TopLogprob(*triple(token)) for token in self._rivals(position)])

    def _rivals(self, position: dict[int, Logprob]) -> list[int]:
        """The tokens of a position that are named beside the one taken: the likeliest, of which it may be one; or those
        that the request has chosen, behind it."""
        if self.body.logprob_token_ids:
            return list(position)
        num = self.body.top_logprobs or 0
        return sorted(position, key=lambda token: -position[token].logprob)[: len(position) if num == -1 else num]

    def _token_ids(self, out: CompletionOutput) -> list[int] | UnsetType:
        return list(out.token_ids) if self.body.return_token_ids else UNSET
