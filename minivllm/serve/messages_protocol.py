"""Anthropic's Messages API as Structs; which field has an effect is said as in protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.serve.protocol import Positive, RequestBody, accepted, doc, refused

TEXT_ONLY = "this server's models read text only"
CacheControl = Annotated[Any, accepted("Every full block of a prompt is cached.")]


class TextBlock(RequestBody, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, accepted()] = None


class ImageBlock(RequestBody, tag_field="type", tag="image"):
    source: Annotated[Any, refused(TEXT_ONLY)]
    cache_control: CacheControl = None


class DocumentBlock(RequestBody, tag_field="type", tag="document"):
    source: Annotated[Any, refused(TEXT_ONLY)]
    cache_control: CacheControl = None
    citations: Annotated[Any, accepted()] = None
    context: Annotated[Any, accepted()] = None
    title: Annotated[Any, accepted()] = None


class ThinkingBlock(RequestBody, tag_field="type", tag="thinking"):
    thinking: Annotated[str, accepted("Earlier thinking is not shown to the model.")]
    signature: Annotated[str | None, accepted()] = None


class RedactedThinkingBlock(RequestBody, tag_field="type", tag="redacted_thinking"):
    data: Annotated[str, accepted("Earlier thinking is not shown to the model.")]


class ToolUseBlock(RequestBody, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[Any, accepted()] = None


class ToolResultBlock(RequestBody, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: Annotated[bool | None, doc('true: the model reads "Error: " before the content.')] = None
    cache_control: CacheControl = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageTurn(RequestBody):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class CustomTool(RequestBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: Annotated[dict[str, Any], doc("The JSON schema of the input, an object's.")]
    description: str | None = None
    type: Annotated[Literal["custom"] | None, doc("Anthropic's own tools run on its servers.")] = None
    cache_control: CacheControl = None
    strict: Annotated[bool | None, accepted("Forced calls always follow the schema, others need not.")] = None
    eager_input_streaming: Annotated[bool | None, accepted("Input is streamed as it is written.")] = None
    input_examples: Annotated[Any, refused("put examples into the description", [])] = None
    defer_loading: Annotated[Any, refused("all tools are shown to the model", False)] = None
    allowed_callers: Annotated[Any, refused("only the model calls tools", ["direct"])] = None


class AutoChoice(RequestBody, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(RequestBody, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(RequestBody, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(RequestBody, tag_field="type", tag="none"):
    """The model is not told of the tools."""


class JSONOutput(RequestBody):
    type: Literal["json_schema"]
    schema: Annotated[dict[str, Any], doc("The JSON Schema of the answer, which is held to it.")]


class OutputConfig(RequestBody):
    format: JSONOutput | None = None
    effort: Annotated[Any, refused("the effort of a reasoning model")] = None


class CountTokensRequest(RequestBody, kw_only=True):
    messages: list[MessageTurn]
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    thinking: Annotated[Any, refused("the thinking of a reasoning model", {"type": "disabled"})] = None
    speed: Annotated[Any, accepted()] = None
    mcp_servers: Annotated[Any, refused("tools are run by the client", [])] = None
    context_management: Annotated[Any, refused("a context is never edited here")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[Any, accepted()] = None
    service_tier: Annotated[Any, accepted()] = None
    inference_geo: Annotated[Any, accepted()] = None
    container: Annotated[Any, refused("code execution")] = None


# ---------------------------------------------------------------------------------------------------------- answers


class TextAnswer(Struct):
    text: str
    type: Literal["text"] = "text"


class ToolUseAnswer(Struct):
    id: str
    name: str
    input: dict[str, Any] = {}
    type: Literal["tool_use"] = "tool_use"


class MessageUsage(Struct):
    """input_tokens: those that had to be computed."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageAnswer(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Any] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(Struct, kw_only=True):
    """Which of the fields are there depends on the type."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Any = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class InputTokens(Struct):
    input_tokens: int


class MessageErrorDetail(Struct):
    type: str
    message: str


class MessageError(Struct):
    error: MessageErrorDetail
    type: Literal["error"] = "error"
