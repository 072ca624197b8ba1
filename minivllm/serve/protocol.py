"""OpenAI's HTTP protocol as msgspec Structs: the one place that says which fields exist and what they do here.

Every field of a request is of one kind of fields.py: with an effect, accepted, ignored and named so, or refused. Fields
that are not declared are named as ignored, since no parameter is ever ignored in silence (bodies.py). The OpenAPI
document is made of these classes.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.errors import BadRequest
from minivllm.request import SamplingParams
from minivllm.serve.fields import RequestBody, accepted, differs, doc, hint, refused
from minivllm.serve.structured import OTHER_NAMES, ResponseFormat, StructuredOutputs, structured_params
from minivllm.serve.timings import RequestTimings
from minivllm.structured.params import StructuredParams

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MostLogprobs = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: of the whole vocabulary, where --max-logprobs admits it
NotEmpty = Annotated[str, Meta(min_length=1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=4096)]
MAX_TOOLS = 1024
MAX_ITEMS = 16_384  # of a list that is looked at item by item: as many messages are longer than any context
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# OpenAI's limits, of its own endpoints alone; four stops are vLLM's limit too, two of temperature are not.
Temperature = Annotated[float, Meta(le=2)]
Stop = str | Annotated[list[str], Meta(max_length=4)]
AnyName = Annotated[str, Meta(min_length=1, max_length=1024)]  # of a tool, where an API has no limit of its own


NOBODY_ASKS = "nobody asks here who a user is"
ALL_CACHED = "every full block of a prompt is cached, as long as there is room"
ECHO = "an echo of an answer, which the model is not shown"
NO_EFFORT = "the model thinks as much as it does"
AnyBudget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TEXT_ONLY = "this server's models read text only"
NOT_RENDERED = "It is for vLLM's endpoints that render prompts."
ALL_SHOWN = "all tools are shown to the model"
FITTED = "null: as many as the context has room for. More than fit beside the prompt are as many as fit."


class Extensions(RequestBody, kw_only=True):
    """Fields of vLLM's requests for a text that have no use here."""

    mm_payload: Annotated[str | None, accepted(NOT_RENDERED)] = None
    return_mm_kwargs: Annotated[bool | None, accepted(NOT_RENDERED)] = None
    watermarking: Annotated[Any, refused("texts get no watermark", False)] = None
    ec_transfer_params: Annotated[Any, refused("what another server made of pictures", {})] = None
    vllm_xargs: Annotated[Any, refused("arguments of vLLM's plug-ins", {})] = None


class GenerationExtensions(Extensions, kw_only=True):
    """Those that its Anthropic endpoints do not have."""

    session_id: Annotated[str | None, hint("no request is told from others by its session")] = None
    include_reasoning: Annotated[bool | None, hint("all that the model writes is its answer", True)] = None
    thinking_token_budget: Annotated[int | None, hint(NO_EFFORT)] = None
    stream_interval: Annotated[int | None, hint("each step's tokens are sent as they come", 1)] = None
    spaces_between_special_tokens: Annotated[bool | None, accepted("Only slow tokenizers of vLLM's read it.")] = None
    return_token_offsets: Annotated[bool | None, accepted(NOT_RENDERED)] = None
    return_prompt_text: Annotated[Any, refused("/tokenize tells what a prompt becomes", False)] = None
    return_weight_versions: Annotated[Any, refused("weights have no versions here", False)] = None
    routed_experts_prompt_start: Annotated[Any, refused("which experts were used is not told", 0)] = None
    repetition_detection: Annotated[Any, refused("nothing looks for repetitions; see repetition_penalty")] = None
    media_io_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None


class StreamOptions(RequestBody):
    include_usage: Annotated[bool | None, doc("End the stream with a chunk that holds the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, doc("vLLM's: with include_usage, every chunk holds it.")] = None
    include_obfuscation: Annotated[bool | None, accepted()] = None


class Sampling(GenerationExtensions, kw_only=True):
    """The fields that both endpoints share; names and meanings are OpenAI's, then vLLM's."""

    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    n: int | None = None
    temperature: Annotated[Temperature | None, doc("0 is greedy; null: 1.")] = None
    top_p: float | None = None
    seed: Annotated[int | None, doc("The same seed and prompt give the same text, whoever else is being served.")] = (
        None
    )
    stop: Stop | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, doc("By token id.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, hint(NOBODY_ASKS)] = None

    top_k: Annotated[Int32 | None, doc("vLLM's. 0 and -1 keep the whole vocabulary.")] = None
    min_p: Annotated[float | None, doc("vLLM's.")] = None
    repetition_penalty: Annotated[float | None, doc("vLLM's.")] = None
    min_tokens: Annotated[NotNegative | None, doc("vLLM's.")] = None
    ignore_eos: Annotated[bool | None, doc("vLLM's.")] = None
    stop_token_ids: Annotated[list[int] | None, doc("vLLM's; 1,024 at most.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("vLLM's.")] = None
    skip_special_tokens: Annotated[bool | None, doc("vLLM's.")] = None
    bad_words: Annotated[list[str] | None, doc("vLLM's.")] = None
    allowed_token_ids: Annotated[list[int] | None, doc("vLLM's.")] = None
    prompt_logprobs: Annotated[MostLogprobs | None, doc("vLLM's: logprobs of the prompt's tokens; -1: of all.")] = None
    return_token_ids: Annotated[bool | None, doc("vLLM's: add token_ids and prompt_token_ids.")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, doc('vLLM\'s: logprobs call a token "token_id:5"; null: as --return-tokens-as-token-ids has it.')
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        doc("vLLM's: keep the prompt's last tokens, so many; -1: as many as leave room for the answer."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        doc("vLLM's: right: truncate_prompt_tokens keeps the first tokens; null: left."),
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9._:@=+-]{1,128}$")] | None,
        doc("vLLM's: the answer's id ends with it; no other request that runs may have it."),
    ] = None
    priority: Annotated[Int32 | None, doc("vLLM's. Smaller is served earlier, with scheduler.policy=priority.")] = None
    cache_salt: Annotated[CacheSalt | None, doc("vLLM's: prefix-cache blocks are shared only within one salt.")] = None

    response_format: Annotated[ResponseFormat | None, doc("Hold the answer to JSON, or to a JSON Schema.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, doc("vLLM's: what the output must look like.")] = None
    guided_json: Annotated[Any, doc("vLLM's older name of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, doc("vLLM's older name of structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, doc("vLLM's older name of structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, doc("vLLM's older name of structured_outputs.grammar.")] = None
    json_schema: Annotated[Any, doc("llama.cpp's name of structured_outputs.json.")] = None
    grammar: Annotated[str | None, doc("llama.cpp's name of structured_outputs.grammar.")] = None
    guided_decoding_backend: Annotated[Any, refused("the server chooses its backend: structured.backend")] = None
    guided_whitespace_pattern: Annotated[Any, refused("see structured_outputs.disable_any_whitespace")] = None
    logits_processors: Annotated[Any, refused("a request's own code", [])] = None
    logprob_token_ids: Annotated[
        list[int] | None, doc("vLLM's: the logprobs of these tokens in the place of the likeliest; needs logprobs.")
    ] = None
    mm_processor_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None
    kv_transfer_params: Annotated[Any, refused("K and V of another server", {})] = None
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
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, structured=self.structured(), **given)

    def structured(self) -> StructuredParams | None:
        """Raises BadRequest, naming the field, for one that is incomplete, or for two of them."""
        others = {name: getattr(self, name) for name in OTHER_NAMES}
        return structured_params(self.response_format, self.structured_outputs, others)


class ContentPart(RequestBody):
    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    image_url: Annotated[Any, refused(TEXT_ONLY)] = None
    input_audio: Annotated[Any, refused(TEXT_ONLY)] = None
    file: Annotated[Any, refused(TEXT_ONLY)] = None
    refusal: Annotated[str | None, accepted()] = None
    prompt_cache_breakpoint: Annotated[Any, hint(ALL_CACHED)] = None
    cache_control: Annotated[Any, hint(ALL_CACHED)] = None


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
        str,
        Meta(min_length=1, max_length=64),
        differs("Any; the chat template decides. developer is read as system where it does not know it."),
    ]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_ITEMS)] | None = None
    name: Annotated[str | None, doc("Handed to the chat template.")] = None
    refusal: Annotated[str | None, accepted()] = None
    annotations: Annotated[list[Any] | None, hint(ECHO, [])] = None
    tool_calls: Annotated[Annotated[list[CalledTool], Meta(max_length=MAX_ITEMS)] | None, doc("The assistant's.")] = (
        None
    )
    tool_call_id: Annotated[str | None, doc('Of the call that this message of role "tool" answers.')] = None
    reasoning_content: Annotated[str | None, doc("The assistant's; handed to the chat template.")] = None
    reasoning: Annotated[str | None, doc("A newer name of reasoning_content.")] = None
    provider_specific_fields: Annotated[Any, hint(ECHO)] = None
    cache_control: Annotated[Any, hint(ALL_CACHED)] = None
    function_call: Annotated[Any, refused("OpenAI has replaced it by tool_calls")] = None
    audio: Annotated[Any, refused("this server's models write text only")] = None


class Function(RequestBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$", description="Letters, digits, _ and -; 64 at most.")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, doc("The arguments' JSON schema, of an object; null: none.")] = None
    strict: Annotated[
        bool | None,
        differs('Forced calls (tool_choice "required" or a name) always follow the schema, others need not.'),
    ] = None
    defer_loading: Annotated[Any, refused(ALL_SHOWN, False)] = None


class Tool(RequestBody):
    type: Literal["function"]
    function: Function
    defer_loading: Annotated[Any, refused(ALL_SHOWN, False)] = None


class AnyFunction(Function, kw_only=True):
    name: AnyName


class AnyTool(RequestBody):
    """Of an API that sets its tools' names no limit."""

    function: AnyFunction
    type: Annotated[str | None, accepted('Always "function".')] = None
    items: Annotated[Any, accepted()] = None


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
    tools: Annotated[list[FunctionReference], Meta(max_length=MAX_TOOLS)]


class AllowedTools(RequestBody, tag_field="type", tag="allowed_tools"):
    """Only these are offered."""

    allowed_tools: ToolSubset


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], Meta(max_length=MAX_ITEMS)]
    max_completion_tokens: Annotated[Positive | None, differs(FITTED)] = None
    max_tokens: Annotated[Positive | None, differs("The older name of max_completion_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: MostLogprobs | None = None
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
    reasoning_effort: Annotated[
        str | None,
        doc("Handed to a chat template that reads it, or enable_thinking, or thinking; else named as ignored."),
    ] = None
    include_reasoning: Annotated[bool | None, doc("vLLM's; false: leave the model's thinking out.")] = None
    thinking_token_budget: Annotated[
        AnyBudget | None, doc("vLLM's: the model thinks so many tokens at most; -1: as many as it does.")
    ] = None

    metadata: Annotated[Any, hint("nothing is stored", {})] = None
    store: Annotated[bool | None, hint("nothing is stored", False)] = None
    service_tier: Annotated[str | None, hint("there is one tier", "auto", "default")] = None
    safety_identifier: Annotated[str | None, hint(NOBODY_ASKS)] = None
    prompt_cache_key: Annotated[str | None, hint("prompts are matched by content; see cache_salt")] = None
    prompt_cache_options: Annotated[Any, hint(ALL_CACHED)] = None
    prompt_cache_retention: Annotated[str | None, hint(ALL_CACHED)] = None

    chat_template: Annotated[
        str | None, doc("vLLM's: a Jinja template, if the server was started with --trust-request-chat-template.")
    ] = None
    documents: Annotated[Any, refused("put documents into messages", [])] = None
    echo: Annotated[bool | None, doc("vLLM's: the answer begins with the last message, if the assistant's.")] = None
    functions: Annotated[Any, refused("OpenAI has replaced it by tools", [])] = None
    function_call: Annotated[Any, refused("OpenAI has replaced it by tool_choice", "none")] = None
    modalities: Annotated[Any, refused("only text is written", ["text"])] = None
    audio: Annotated[Any, refused("only text is written")] = None
    prediction: Annotated[Any, hint("it would make the answer no other, only faster")] = None
    verbosity: Annotated[Any, hint("the model writes as long as it does", "medium")] = None
    web_search_options: Annotated[Any, refused("web search")] = None
    moderation: Annotated[Any, refused("moderation")] = None
    add_special_tokens: Annotated[Any, refused("the chat template writes them", False)] = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        doc("A text, texts, token ids, or lists of token ids. null or empty only beside prompt_embeds."),
    ] = None
    max_tokens: Annotated[
        NotNegative | None,
        differs("null: 16. 0 needs echo, and scores the prompt. More than fit beside the prompt are as many as fit."),
    ] = None
    echo: Annotated[bool | None, doc("Begin the text with the prompt.")] = None
    logprobs: MostLogprobs | None = None
    suffix: Annotated[Any, refused("filling in the middle", "")] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        doc("vLLM's: prompts as vectors, before those of `prompt`: base64 of what torch.save wrote of a tensor each."),
    ] = None
    best_of: Annotated[
        Positive | None, doc("Generate so many, return the n likeliest, best first. Above n not with stream.")
    ] = None
    add_special_tokens: Annotated[bool | None, doc("vLLM's: such as a BOS token, before a text. null: true.")] = None


class LoadAdapter(RequestBody):
    lora_name: Annotated[str, doc("What requests put in `model`.")]
    lora_path: Annotated[str, doc("A folder in PEFT's format, below one of the server's --lora-dir folders.")]
    load_inplace: Annotated[Any, refused("unload the adapter of this name first", False)] = None
    base_model_name: Annotated[str | None, accepted("There is one base model.")] = None
    is_3d_lora_weight: Annotated[Any, refused("adapters of fused experts", False)] = None


class UnloadAdapter(RequestBody):
    lora_name: str
    lora_int_id: Annotated[Any, refused("adapters are unloaded by name")] = None


# ---------------------------------------------------------------------------------------------------------- answers


def now() -> int:
    return int(time.time())


class CachedTokens(Struct):
    cached_tokens: int = 0


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET  # of models whose thinking can be read


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
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None | UnsetType = UNSET
    reasoning_content: str | None | UnsetType = UNSET  # its older name


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    id: str
    object: str
    created: int = msgspec.field(default_factory=now)
    model: str
    choices: list[Any]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str | None = None
    service_tier: None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    kv_transfer_params: None | UnsetType = UNSET
    metrics: RequestTimings | None | UnsetType = UNSET  # vLLM's, with --enable-per-request-metrics


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
    reasoning: str | None = None
    reasoning_content: str | None = None


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
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET


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


class Load(Struct):
    server_load: int  # sequences asked for, whose answers are not complete


class Version(Struct):
    version: str
