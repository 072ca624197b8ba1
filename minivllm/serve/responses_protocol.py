"""OpenAI's Responses API as Structs; which field has an effect is said as in protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.request import MAX_LOGPROBS
from minivllm.serve.protocol import (
    ALL_CACHED,
    ALL_SHOWN,
    FITTED,
    MAX_ITEMS,
    MAX_TOOLS,
    NOBODY_ASKS,
    TEXT_ONLY,
    AnyName,
    CachedTokens,
    CacheSalt,
    GenerationExtensions,
    Int32,
    Positive,
    ReasoningTokens,
    RequestBody,
    Stop,
    StructuredOutputs,
    Temperature,
    TokenLogprob,
    accepted,
    differs,
    doc,
    hint,
    now,
    refused,
)
from minivllm.serve.structured import ALWAYS_HELD
from minivllm.serve.timings import RequestTimings

BUILT_IN = "only functions and custom tools are tools here"
NO_LARK = 'Lark grammars; take syntax "regex", or a function with a schema'
NO_SUMMARY = "the reasoning itself is in the answer"
NO_WAITING = "the model waits for the result of a call"
COMES_BACK = "Outputs that are sent back hold it."
NO_CONVERSATIONS = "the Conversations API; previous_response_id goes on from a response"
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
INCLUDED = f"{LOGPROBS} adds the log-probabilities of the text. Of the others there is nothing to include."


class InputPart(RequestBody):
    type: str  # texts: input_text, output_text, refusal, reasoning_text
    text: str | None = None
    refusal: Annotated[str | None, accepted()] = None
    annotations: Annotated[list[Any] | None, accepted(COMES_BACK)] = None
    logprobs: Annotated[list[Any] | None, accepted(COMES_BACK)] = None
    prompt_cache_breakpoint: Annotated[Any, hint(ALL_CACHED)] = None
    image_url: Annotated[Any, refused(TEXT_ONLY)] = None
    detail: Annotated[Any, refused(TEXT_ONLY)] = None
    file_id: Annotated[Any, refused(TEXT_ONLY)] = None
    file_data: Annotated[Any, refused(TEXT_ONLY)] = None
    file_url: Annotated[Any, refused(TEXT_ONLY)] = None
    filename: Annotated[Any, refused(TEXT_ONLY)] = None
    input_audio: Annotated[Any, refused(TEXT_ONLY)] = None


class InputItem(RequestBody):
    """A message, a call, a call's result, the reasoning before one of the first two, or the id of one that is kept."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "item_reference",
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Annotated[
        str | Annotated[list[InputPart], Meta(max_length=MAX_ITEMS)] | None,
        doc("A reasoning item's is handed to the chat template, which decides."),
    ] = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: Annotated[str | None, doc("Of a custom_tool_call.")] = None
    output: str | Annotated[list[InputPart], Meta(max_length=MAX_ITEMS)] | None = None
    id: Annotated[str | None, doc("An item_reference is the item of this id, of a response that is kept.")] = None
    status: Annotated[str | None, accepted(COMES_BACK)] = None
    phase: Annotated[Any, accepted(COMES_BACK)] = None
    summary: Annotated[Any, accepted("What is read of earlier reasoning is its content.")] = None
    encrypted_content: Annotated[Any, accepted("What is read of earlier reasoning is its content.")] = None
    caller: Annotated[Any, refused("only the model calls tools", {"type": "direct"})] = None
    namespace: Annotated[Any, refused(BUILT_IN)] = None
    async_: Annotated[Any, refused(NO_WAITING, False)] = msgspec.field(default=None, name="async")


class FunctionTool(RequestBody, tag_field="type", tag="function"):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]  # OpenAI's specification, FunctionToolParam
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: Annotated[bool | None, differs("Forced calls always follow the schema, others need not.")] = None
    allowed_callers: Annotated[Any, refused("only the model calls tools", ["direct"])] = None
    defer_loading: Annotated[Any, refused(ALL_SHOWN, False)] = None
    output_schema: Annotated[Any, refused("results are text")] = None
    async_: Annotated[Any, refused(NO_WAITING, False)] = msgspec.field(default=None, name="async")


class TextInput(RequestBody, tag_field="type", tag="text"):
    """Any text."""


class GrammarInput(RequestBody, tag_field="type", tag="grammar"):
    """Text that a regular expression matches, from its beginning to its end."""

    definition: Annotated[str, differs("Forced calls always follow it, others need not.")]
    syntax: Annotated[Any, refused(NO_LARK, "regex")]


class TextTool(RequestBody, tag_field="type", tag="custom"):
    """The model is told of a function with one text, its input."""

    name: AnyName
    description: str | None = None
    format: TextInput | GrammarInput | None = None
    allowed_callers: Annotated[Any, refused("only the model calls tools", ["direct"])] = None
    defer_loading: Annotated[Any, refused(ALL_SHOWN, False)] = None
    async_: Annotated[Any, refused(NO_WAITING, False)] = msgspec.field(default=None, name="async")


class FunctionChoice(RequestBody, tag_field="type", tag="function"):
    name: str


class CustomChoice(RequestBody, tag_field="type", tag="custom"):
    name: str


class AllowedFunction(RequestBody):
    type: Literal["function", "custom"]
    name: str


class AllowedChoice(RequestBody, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, accepted("OpenAI requires it.")] = None
    schema: Annotated[dict[str, Any] | None, doc("The JSON Schema of the answer.")] = None
    description: Annotated[str | None, accepted()] = None
    strict: Annotated[bool | None, differs(ALWAYS_HELD)] = None


class TextConfig(RequestBody):
    format: TextFormat | None = None
    verbosity: Annotated[Any, hint("the model writes as long as it does", "medium")] = None


class ReasoningOptions(RequestBody):
    effort: Annotated[
        str | None, doc("Handed to a chat template that reads it, as reasoning_effort; else named as ignored.")
    ] = None
    summary: Annotated[Any, hint(NO_SUMMARY)] = None
    generate_summary: Annotated[Any, hint(NO_SUMMARY)] = None
    context: Annotated[Any, hint("the chat template decides what the model reads again", "auto")] = None
    mode: Annotated[Any, hint("there is one mode", "standard")] = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Annotated[bool | None, accepted()] = None


Metadata = Annotated[  # within OpenAI's limits
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
InputItems = Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]


class ResponsesRequest(GenerationExtensions, kw_only=True):
    input: Annotated[str | InputItems, doc("A text, or the items of a conversation.")]
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    instructions: Annotated[str | None, doc("A system message before the input.")] = None
    max_output_tokens: Annotated[Positive | None, differs(FITTED)] = None
    temperature: Temperature | None = None
    top_p: float | None = None
    tools: Annotated[
        Annotated[list[FunctionTool | TextTool], Meta(max_length=MAX_TOOLS)] | None, doc(f"{BUILT_IN}.")
    ] = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice | None = None
    parallel_tool_calls: Annotated[bool | None, doc("false: one call at most.")] = None
    text: TextConfig | None = None
    stream: bool | None = None
    metadata: Annotated[Metadata | None, doc("Comes back in the response. 16 pairs of 64 and 512 characters.")] = None

    stream_options: ResponseStreamOptions | None = None
    cache_salt: Annotated[CacheSalt | None, doc("vLLM's: prefix-cache blocks are shared only within one salt.")] = None
    user: Annotated[str | None, hint(NOBODY_ASKS)] = None
    safety_identifier: Annotated[str | None, hint(NOBODY_ASKS)] = None
    service_tier: Annotated[str | None, hint("there is one tier", "auto", "default")] = None
    prompt_cache_key: Annotated[str | None, hint("prompts are matched by content; see cache_salt")] = None
    prompt_cache_options: Annotated[Any, hint(ALL_CACHED)] = None
    prompt_cache_retention: Annotated[str | None, hint(ALL_CACHED)] = None
    max_tool_calls: Annotated[int | None, accepted("It counts the calls of built-in tools.")] = None

    store: Annotated[
        bool | None, doc("Keep the response; null: true. Ignored, and named so, by a server with --no-store.")
    ] = None
    previous_response_id: Annotated[
        str | None, doc("Go on from this response: its input and output come before the input.")
    ] = None
    background: Annotated[
        bool | None, doc("Answer at once with a response that is queued, and work on it whoever leaves.")
    ] = None
    include: Annotated[list[Includable] | None, doc(INCLUDED)] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None, doc(f"Above 0 it asks for {LOGPROBS} too.")
    ] = None
    conversation: Annotated[Any, refused(NO_CONVERSATIONS)] = None
    background_options: Annotated[Any, refused("there is one queue; leave it to background")] = None
    truncation: Annotated[Any, hint("a prompt that is too long is an error", "disabled")] = None
    prompt: Annotated[Any, refused("stored prompts")] = None
    reasoning: ReasoningOptions | None = None
    context_management: Annotated[Any, refused("a context is never edited here", [])] = None
    moderation: Annotated[Any, refused("moderation")] = None
    image: Annotated[Any, refused("only text is written")] = None
    access_programs: Annotated[Any, refused("access programs")] = None

    # vLLM's beside OpenAI's, as /v1/chat/completions has them.
    top_k: Annotated[Int32 | None, doc("0 and -1 keep the whole vocabulary.")] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[Int32 | None, doc("Smaller is served earlier, with scheduler.policy=priority.")] = None
    request_id: Annotated[Any, hint("a response's id is the server's")] = None
    enable_response_messages: Annotated[Any, refused("/tokenize tells what a prompt becomes", False)] = None
    previous_input_messages: Annotated[Any, refused("send the whole conversation as input", [])] = None
    kv_transfer_params: Annotated[Any, refused("K and V of another server", {})] = None
    mm_processor_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


class RetrieveQuery(RequestBody):
    stream: Annotated[bool | None, doc("The events, of a response with background and stream.")] = None
    starting_after: Annotated[
        Annotated[int, Meta(ge=0)] | None, doc("With stream: only the events after the one of this sequence_number.")
    ] = None
    include: Annotated[list[Includable] | None, accepted("What was included when it was made is there.")] = None
    include_obfuscation: Annotated[bool | None, accepted()] = None


class InputItemsQuery(RequestBody):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Annotated[Literal["asc", "desc"], doc("desc: the last item first.")] = "desc"
    after: Annotated[str | None, doc("The id of an item: those behind it in this order.")] = None
    include: Annotated[list[Includable] | None, accepted("Items are as they were sent.")] = None


class InputTokensRequest(RequestBody):
    """What of a request the prompt depends on."""

    input: Annotated[str | InputItems | None, doc("A text, or the items of a conversation.")] = None
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    instructions: Annotated[str | None, doc("A system message before the input.")] = None
    previous_response_id: Annotated[
        str | None, doc("Go on from this response: its input and output come before the input.")
    ] = None
    tools: Annotated[
        Annotated[list[FunctionTool | TextTool], Meta(max_length=MAX_TOOLS)] | None, doc(f"{BUILT_IN}.")
    ] = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice | None = None
    parallel_tool_calls: Annotated[bool | None, accepted("It changes no prompt.")] = None
    text: Annotated[TextConfig | None, accepted("It changes no prompt.")] = None
    truncation: Annotated[str | None, hint("a prompt that is too long is counted whole", "disabled")] = None
    reasoning: ReasoningOptions | None = None
    personality: Annotated[str | None, hint("the model has the one that it has")] = None
    conversation: Annotated[Any, refused(NO_CONVERSATIONS)] = None


# ---------------------------------------------------------------------------------------------------------- answers


class OutputText(Struct):
    text: str = ""
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: str = "in_progress"
    content: list[OutputText] = []


class ReasoningText(Struct):
    text: str = ""
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputReasoning(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: str = "in_progress"


class OutputCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class OutputCustomCall(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str = ""
    status: str = "in_progress"


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokens
    output_tokens_details: ReasoningTokens = ReasoningTokens()


class Incomplete(Struct):
    reason: str


class ResponseError(Struct):
    code: str
    message: str


class ResponseObject(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: TextConfig
    reasoning: ReasoningOptions | None
    tools: list[FunctionTool | TextTool]
    tool_choice: Any
    error: ResponseError | None = None
    previous_response_id: str | None = None
    background: bool = False
    store: bool = False
    completed_at: int | None = None
    top_logprobs: int
    truncation: str = "disabled"
    metrics: RequestTimings | None | UnsetType = UNSET  # vLLM's, with --enable-per-request-metrics

    @classmethod
    def of(cls, body: ResponsesRequest, **fields: Any) -> ResponseObject:
        """What repeats the request, and `fields`."""
        return cls(
            created_at=now(),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            text=body.text or TextConfig(format=TextFormat(type="text")),
            reasoning=body.reasoning,
            tools=body.tools or [],
            tool_choice=body.tool_choice or ("auto" if body.tools else "none"),
            previous_response_id=body.previous_response_id,
            background=bool(body.background),
            top_logprobs=body.top_logprobs or 0,
            **fields,
        )


class ResponseEvent(Struct, kw_only=True):
    """Which of the fields are there depends on the type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: Annotated[Any, doc("An output_text or a reasoning_text.")] = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | None | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | None | UnsetType = UNSET


class ItemList(Struct):
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokenCount(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ResponseDeleted(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
