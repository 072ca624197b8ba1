"""OpenAI's HTTP protocol as msgspec Structs: the one place that says which fields exist and what they do here.

Every field of a request is one of three kinds. Plain ones have an effect. `accepted(...)` ones are OpenAI's but carry
no behaviour in this server. `refused(...)` ones are OpenAI's (or vLLM's) and not supported: any value but one that asks
for nothing is a 400 which names the field. Whatever is not declared is a 400 too, so that no parameter is ever ignored
in silence. The OpenAPI document is generated from these classes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.errors import BadRequest
from minivllm.registry import did_you_mean
from minivllm.request import MAX_LOGPROBS, SamplingParams
from minivllm.serve.structured import structured_params

T = TypeVar("T", bound="RequestBody")

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NotEmpty = Annotated[str, Meta(min_length=1)]
MAX_TOOLS = 1024
MAX_ITEMS = 16_384  # of a list that is looked at item by item: as many messages are longer than any context
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


def doc(text: str) -> Meta:
    return Meta(description=text)


def accepted(why: str = "") -> Meta:
    return Meta(description=f"Accepted; carries no behaviour here. {why}".strip())


def refused(what: str, *no_ops: Any) -> Meta:
    """A field that is known and not supported. `no_ops`: the values beside null that ask for nothing."""
    return Meta(description=f"Not supported: {what}.", extra={"refused": what, "no_ops": (None, *no_ops)})


class RequestBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Anything that a client sends."""


class StreamOptions(RequestBody):
    include_usage: Annotated[bool | None, doc("End the stream with a chunk that holds the usage.")] = None
    include_obfuscation: Annotated[bool | None, accepted()] = None


class JSONSchema(RequestBody):
    name: Annotated[str, accepted("OpenAI requires it.")]
    schema: Annotated[Any, doc("The JSON Schema of the answer.")] = None
    description: Annotated[str | None, accepted()] = None
    strict: Annotated[bool | None, accepted("An answer is always held to its schema.")] = None


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(RequestBody):
    json: Annotated[Any, doc("A JSON Schema, as an object or as its text.")] = None
    json_object: Annotated[bool | None, doc("Any JSON object.")] = None
    regex: Annotated[str | None, doc("A regular expression, of the whole output.")] = None
    choice: Annotated[list[str] | None, doc("One of these.")] = None
    grammar: Annotated[str | None, doc("EBNF in llama.cpp's notation.")] = None
    disable_any_whitespace: Annotated[bool | None, doc("JSON on one line.")] = None
    structural_tag: Annotated[Any, refused("structural tags")] = None
    whitespace_pattern: Annotated[Any, refused("see disable_any_whitespace")] = None
    disable_additional_properties: Annotated[Any, refused("say additionalProperties in the schema", False)] = None
    disable_fallback: Annotated[Any, refused("the server chooses its backend: structured.backend", False)] = None


class Sampling(RequestBody, kw_only=True):
    """The fields that both endpoints share; names and meanings are OpenAI's, then vLLM's."""

    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    n: int | None = None
    temperature: Annotated[float | None, doc("0 is greedy; null: 1.")] = None
    top_p: float | None = None
    seed: Annotated[int | None, doc("The same seed and prompt give the same text, whoever else is being served.")] = (
        None
    )
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, accepted()] = None

    top_k: Annotated[Int32 | None, doc("vLLM's. 0 and -1 keep the whole vocabulary.")] = None
    min_p: Annotated[float | None, doc("vLLM's.")] = None
    repetition_penalty: Annotated[float | None, doc("vLLM's.")] = None
    min_tokens: Annotated[NotNegative | None, doc("vLLM's.")] = None
    ignore_eos: Annotated[bool | None, doc("vLLM's.")] = None
    stop_token_ids: Annotated[list[int] | None, doc("vLLM's.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("vLLM's.")] = None
    skip_special_tokens: Annotated[bool | None, doc("vLLM's.")] = None
    bad_words: Annotated[list[str] | None, doc("vLLM's.")] = None
    allowed_token_ids: Annotated[list[int] | None, doc("vLLM's.")] = None
    prompt_logprobs: Annotated[NotNegative | None, doc("vLLM's: logprobs of the prompt's tokens.")] = None
    return_token_ids: Annotated[bool | None, doc("vLLM's: add token_ids and prompt_token_ids.")] = None
    priority: Annotated[Int32 | None, doc("vLLM's. Smaller is served earlier, with scheduler.policy=priority.")] = None
    cache_salt: Annotated[NotEmpty | None, doc("vLLM's: prefix-cache blocks are shared only within one salt.")] = None

    response_format: Annotated[ResponseFormat | None, doc("Hold the answer to JSON, or to a JSON Schema.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, doc("vLLM's: what the output must look like.")] = None
    guided_json: Annotated[Any, doc("vLLM's older name of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, doc("vLLM's older name of structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, doc("vLLM's older name of structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, doc("vLLM's older name of structured_outputs.grammar.")] = None
    guided_decoding_backend: Annotated[Any, refused("the server chooses its backend: structured.backend")] = None
    guided_whitespace_pattern: Annotated[Any, refused("see structured_outputs.disable_any_whitespace")] = None
    use_beam_search: Annotated[bool | None, doc("vLLM's: return the n likeliest texts. Not with stream.")] = None
    length_penalty: Annotated[float | None, doc("Of use_beam_search: above 1 favours longer texts; null: 1.")] = None
    early_stopping: Annotated[bool | None, doc("Of use_beam_search: stop once n texts have ended.")] = None

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Raises BadRequest, naming the field, for a value that SamplingParams does not admit."""
        if not self.use_beam_search and (self.early_stopping or self.length_penalty not in (None, 1)):
            name = "early_stopping" if self.early_stopping else "length_penalty"
            raise BadRequest(f"{name} needs use_beam_search=true", name)
        names = set(SamplingParams.__struct_fields__) & set(self.__struct_fields__) - {"max_tokens", "logprobs"}
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, structured=structured_params(self), **given)


class ContentPart(RequestBody):
    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    image_url: Annotated[Any, refused("this server's models read text only")] = None
    input_audio: Annotated[Any, refused("this server's models read text only")] = None
    file: Annotated[Any, refused("this server's models read text only")] = None
    refusal: Annotated[str | None, accepted()] = None
    prompt_cache_breakpoint: Annotated[Any, accepted("Every full block of a prompt is cached.")] = None


class CalledFunction(RequestBody):
    name: str
    arguments: Annotated[str, doc("A JSON object, as text.")]


class CalledTool(RequestBody):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Annotated[int | None, accepted("Clients that put a stream together leave it in.")] = None


class Message(RequestBody):
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        doc("developer is read as system; function, the older name of tool, is refused."),
    ]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_ITEMS)] | None = None
    name: Annotated[str | None, doc("Handed to the chat template.")] = None
    refusal: Annotated[str | None, accepted()] = None
    annotations: Annotated[list[Any] | None, accepted()] = None
    tool_calls: Annotated[list[CalledTool] | None, doc("The assistant's.")] = None
    tool_call_id: Annotated[str | None, doc('Of the call that this message of role "tool" answers.')] = None
    function_call: Annotated[Any, refused("OpenAI has replaced it by tool_calls")] = None
    audio: Annotated[Any, refused("this server's models write text only")] = None


class Function(RequestBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$", description="Letters, digits, _ and -; 64 at most.")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, doc("The arguments' JSON schema, of an object; null: none.")] = None
    strict: Annotated[
        bool | None,
        accepted('Forced calls (tool_choice "required" or a name) always follow the schema, others need not.'),
    ] = None


class Tool(RequestBody):
    type: Literal["function"]
    function: Function


class FunctionName(RequestBody):
    name: str


class NamedTool(RequestBody, tag_field="type", tag="function"):
    """This function is called."""

    function: FunctionName


class FunctionReference(RequestBody):
    type: Literal["function"]
    function: FunctionName


class ToolSubset(RequestBody):
    mode: Literal["auto", "required"]
    tools: list[FunctionReference]


class AllowedTools(RequestBody, tag_field="type", tag="allowed_tools"):
    """Only these are offered."""

    allowed_tools: ToolSubset


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], Meta(max_length=MAX_ITEMS)]
    max_completion_tokens: Annotated[Positive | None, doc("null: as many as the context has room for.")] = None
    max_tokens: Annotated[Positive | None, doc("The older name of max_completion_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: Annotated[bool | None, doc("vLLM's; null: true.")] = None
    continue_final_message: Annotated[bool | None, doc("vLLM's: the answer goes on where the last message ends.")] = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("vLLM's: variables for the chat template.")] = None
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None, doc("Functions that the model may call.")
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
        doc("null: auto if there are tools. With none the model is not told of them."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("false: one call at most.")] = None

    metadata: Annotated[dict[str, str] | None, accepted()] = None
    store: Annotated[bool | None, accepted("Nothing is ever stored.")] = None
    service_tier: Annotated[str | None, accepted()] = None
    safety_identifier: Annotated[str | None, accepted()] = None
    prompt_cache_key: Annotated[str | None, accepted("Prompts are matched by content; see cache_salt.")] = None
    prompt_cache_options: Annotated[Any, accepted()] = None
    prompt_cache_retention: Annotated[str | None, accepted()] = None

    functions: Annotated[Any, refused("OpenAI has replaced it by tools", [])] = None
    function_call: Annotated[Any, refused("OpenAI has replaced it by tool_choice", "none")] = None
    modalities: Annotated[Any, refused("only text is written", ["text"])] = None
    audio: Annotated[Any, refused("only text is written")] = None
    prediction: Annotated[Any, refused("predicted outputs")] = None
    reasoning_effort: Annotated[Any, refused("the effort of a reasoning model", "none")] = None
    verbosity: Annotated[Any, refused("verbosity", "medium")] = None
    web_search_options: Annotated[Any, refused("web search")] = None
    moderation: Annotated[Any, refused("moderation")] = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: Annotated[str | list[str | int | list[int]], doc("A text, texts, token ids, or lists of token ids.")]
    max_tokens: Annotated[NotNegative | None, doc("null: 16. 0 needs echo, and scores the prompt.")] = None
    echo: Annotated[bool | None, doc("Begin the text with the prompt.")] = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[Any, refused("filling in the middle", "")] = None
    best_of: Annotated[
        Positive | None, doc("Generate so many, return the n likeliest, best first. Above n not with stream.")
    ] = None


class LoadAdapter(RequestBody):
    lora_name: Annotated[str, doc("What requests put in `model`.")]
    lora_path: Annotated[str, doc("A folder in PEFT's format, below one of the server's --lora-dir folders.")]
    load_inplace: Annotated[Any, refused("unload the adapter of this name first", False)] = None
    base_model_name: Annotated[str | None, accepted("There is one base model.")] = None


class UnloadAdapter(RequestBody):
    lora_name: str
    lora_int_id: Annotated[Any, refused("adapters are unloaded by name")] = None


def parse(data: bytes, kind: type[T]) -> T:
    """The request in `data`. Raises BadRequest, naming the field, for anything that the protocol does not admit."""
    try:
        body = _decoder(kind).decode(data)
    except msgspec.ValidationError as e:
        raise _bad_field(str(e), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is not valid JSON: {e}") from None
    refuse_unsupported(body)
    return body


def refuse_unsupported(body: Struct, path: str = "") -> None:
    for field, refusal in _refusals(type(body)):
        value = getattr(body, field)
        if value is None:
            continue
        if refusal and value not in refusal["no_ops"]:
            raise BadRequest(f"{path}{field} is not supported: {refusal['refused']}. Leave it out.", f"{path}{field}")
        for inner_path, inner in _structs_in(value, f"{path}{field}"):
            refuse_unsupported(inner, f"{inner_path}.")


def _structs_in(value: Any, name: str) -> Iterator[tuple[str, Struct]]:
    if isinstance(value, Struct):
        yield name, value
    elif isinstance(value, list):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Struct))


@functools.cache
def _refusals(kind: type[Struct]) -> tuple[tuple[str, dict[str, Any] | None], ...]:
    """Each field, and what is said of it if it is refused: looking that up takes longer than decoding a request."""
    return tuple((field.name, _refusal(field)) for field in msgspec.structs.fields(kind))


def _refusal(field: msgspec.structs.FieldInfo) -> dict[str, Any] | None:
    metas = getattr(field.type, "__metadata__", ())
    return next((meta.extra for meta in metas if meta.extra and "refused" in meta.extra), None)


def _bad_field(text: str, kind: type[Struct]) -> BadRequest:
    """msgspec's 'Expected `float`, got `str` - at `$.temperature`' as a BadRequest with its param."""
    what, _, where = text.partition(" - at ")
    where = where.rpartition("`$")[2].strip("`.")
    if "unknown field" not in what:
        missing = what.split("`")[1] if "missing required" in what else ""
        field = ".".join(filter(None, [where, missing])) or None
        return BadRequest(f"{where or 'the body'}: {what.replace('`', '')}", field)
    name = what.split("`")[1]
    known = {f for struct in ([kind] if not where else RequestBody.__subclasses__()) for f in struct.__struct_fields__}
    full = f"{where}.{name}".strip(".")
    return BadRequest(f'unknown field "{full}".{did_you_mean(name, sorted(known))}', full)


_decoder = functools.cache(msgspec.json.Decoder)  # by type


# ---------------------------------------------------------------------------------------------------------- answers


def now() -> int:
    return int(time.time())


class CachedTokens(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob] | None
    refusal: None = None


class PromptLogprob(Struct):
    """vLLM's prompt_logprobs: for each position, {token id: this}."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class FunctionCall(Struct):
    name: str
    arguments: str = ""


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    id: str
    object: str
    created: int = msgspec.field(default_factory=now)
    model: str
    choices: list[Any]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct):
    """The first of a call has its id, type and name; all have a piece of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta = msgspec.field(default_factory=ChatDelta)
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Answer, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class LegacyLogprobs(Struct):
    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str = ""
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Answer, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minivllm"
    root: str
    max_model_len: int
    parent: str | None = None  # of a LoRA adapter: the model that it changes


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ModelDeleted(Struct):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct):
    error: ErrorDetail


class Health(Struct):
    status: Literal["ok", "degraded", "stalled", "dead"]  # degraded: some replicas run, others are being started


class Version(Struct):
    version: str
