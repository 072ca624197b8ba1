"""OpenAI's Responses API as Structs; which field has an effect is said as in protocol.py. Nothing is stored here, so
whatever refers to an earlier response is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.serve.protocol import CachedTokens, NotEmpty, Positive, RequestBody, accepted, doc, now, refused

TEXT_ONLY = "this server's models read text only"
BUILT_IN = "only functions are tools here"
COMES_BACK = "Outputs that are sent back hold it."


class InputPart(RequestBody):
    type: Literal["input_text", "output_text", "refusal", "input_image", "input_file", "input_audio"]
    text: str | None = None
    refusal: Annotated[str | None, accepted()] = None
    annotations: Annotated[list[Any] | None, accepted(COMES_BACK)] = None
    logprobs: Annotated[list[Any] | None, accepted(COMES_BACK)] = None
    prompt_cache_breakpoint: Annotated[Any, accepted("Every full block of a prompt is cached.")] = None
    image_url: Annotated[Any, refused(TEXT_ONLY)] = None
    detail: Annotated[Any, refused(TEXT_ONLY)] = None
    file_id: Annotated[Any, refused(TEXT_ONLY)] = None
    file_data: Annotated[Any, refused(TEXT_ONLY)] = None
    file_url: Annotated[Any, refused(TEXT_ONLY)] = None
    filename: Annotated[Any, refused(TEXT_ONLY)] = None
    input_audio: Annotated[Any, refused(TEXT_ONLY)] = None


class InputItem(RequestBody):
    """A message, a call, a call's result, or reasoning, which is not shown to the model."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Any = None  # str | list[InputPart]; a reasoning item's is ignored
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: Annotated[str | None, accepted(COMES_BACK)] = None
    status: Annotated[str | None, accepted(COMES_BACK)] = None
    phase: Annotated[Any, accepted(COMES_BACK)] = None
    summary: Annotated[Any, accepted("Earlier reasoning is not shown to the model.")] = None
    encrypted_content: Annotated[Any, accepted("Earlier reasoning is not shown to the model.")] = None
    caller: Annotated[Any, refused("only the model calls tools", {"type": "direct"})] = None
    namespace: Annotated[Any, refused(BUILT_IN)] = None


class FunctionTool(RequestBody):
    type: Annotated[Literal["function"], doc(f"{BUILT_IN}.")]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: Annotated[bool | None, accepted("Forced calls always follow the schema, others need not.")] = None
    allowed_callers: Annotated[Any, refused("only the model calls tools", ["direct"])] = None
    defer_loading: Annotated[Any, refused("all tools are shown to the model", False)] = None
    output_schema: Annotated[Any, refused("results are text")] = None


class FunctionChoice(RequestBody, tag_field="type", tag="function"):
    name: str


class AllowedFunction(RequestBody):
    type: Literal["function"]
    name: str


class AllowedChoice(RequestBody, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str | None, accepted("OpenAI requires it.")] = None
    schema: Annotated[dict[str, Any] | None, doc("The JSON Schema of the answer.")] = None
    description: Annotated[str | None, accepted()] = None
    strict: Annotated[bool | None, accepted("An answer is always held to its schema.")] = None


class TextConfig(RequestBody):
    format: TextFormat | None = None
    verbosity: Annotated[Any, refused("verbosity", "medium")] = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Annotated[bool | None, accepted()] = None


class ResponsesRequest(RequestBody, kw_only=True):
    input: Annotated[str | list[InputItem], doc("A text, or the items of a conversation.")]
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    instructions: Annotated[str | None, doc("A system message before the input.")] = None
    max_output_tokens: Annotated[Positive | None, doc("null: as many as the context has room for.")] = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: Annotated[bool | None, doc("false: one call at most.")] = None
    text: TextConfig | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str] | None, doc("Comes back in the response.")] = None

    stream_options: ResponseStreamOptions | None = None
    cache_salt: Annotated[NotEmpty | None, doc("vLLM's: prefix-cache blocks are shared only within one salt.")] = None
    user: Annotated[str | None, accepted()] = None
    safety_identifier: Annotated[str | None, accepted()] = None
    service_tier: Annotated[str | None, accepted()] = None
    prompt_cache_key: Annotated[str | None, accepted("Prompts are matched by content; see cache_salt.")] = None
    prompt_cache_options: Annotated[Any, accepted()] = None
    prompt_cache_retention: Annotated[str | None, accepted()] = None
    max_tool_calls: Annotated[int | None, accepted("It counts the calls of built-in tools.")] = None

    store: Annotated[Any, refused("nothing is stored; send the whole conversation as input", False)] = None
    previous_response_id: Annotated[Any, refused("nothing is stored; send the whole conversation as input")] = None
    conversation: Annotated[Any, refused("nothing is stored; send the whole conversation as input")] = None
    background: Annotated[Any, refused("nothing is stored; wait for the answer, or stream it", False)] = None
    background_options: Annotated[Any, refused("nothing is stored; wait for the answer, or stream it")] = None
    include: Annotated[Any, refused("there is nothing more to include", [], ["reasoning.encrypted_content"])] = None
    top_logprobs: Annotated[Any, refused("log-probabilities; /v1/chat/completions has them", 0)] = None
    truncation: Annotated[Any, refused("a prompt that is too long is an error", "disabled")] = None
    prompt: Annotated[Any, refused("stored prompts")] = None
    reasoning: Annotated[Any, refused("the effort of a reasoning model", {}, {"effort": "none"})] = None
    context_management: Annotated[Any, refused("a context is never edited here", [])] = None
    moderation: Annotated[Any, refused("moderation")] = None
    image: Annotated[Any, refused("only text is written")] = None
    access_programs: Annotated[Any, refused("access programs")] = None


# ---------------------------------------------------------------------------------------------------------- answers


class OutputText(Struct):
    text: str = ""
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: str = "in_progress"
    content: list[OutputText] = []


class OutputCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokens
    output_tokens_details: ReasoningTokens = ReasoningTokens()


class Incomplete(Struct):
    reason: str


class ResponseObject(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: TextConfig
    tools: list[FunctionTool]
    tool_choice: Any
    error: None = None
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    truncation: str = "disabled"

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
            tools=body.tools or [],
            tool_choice=body.tool_choice or ("auto" if body.tools else "none"),
            **fields,
        )


class ResponseEvent(Struct, kw_only=True):
    """Which of the fields are there depends on the type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: OutputMessage | OutputCall | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    code: str | None | UnsetType = UNSET
    message: str | UnsetType = UNSET
    param: str | None | UnsetType = UNSET
