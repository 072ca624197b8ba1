"""Anthropic's Messages API as Structs; which field has an effect is said as in protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.serve.protocol import (
    ALL_CACHED,
    ALL_SHOWN,
    ECHO,
    MAX_ITEMS,
    MAX_TOOLS,
    NO_EFFORT,
    TEXT_ONLY,
    CacheSalt,
    Extensions,
    Positive,
    RequestBody,
    accepted,
    differs,
    doc,
    hint,
    refused,
)

NOBODY_PAYS = "nobody is billed here"
OF_TOOLSETS = "It comes with calls of Anthropic's own tools."
CacheControl = Annotated[Any, hint(ALL_CACHED)]


class TextBlock(RequestBody, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, hint(ECHO, [])] = None


class ImageBlock(RequestBody, tag_field="type", tag="image"):
    source: Annotated[dict[str, Any], refused(TEXT_ONLY)]
    cache_control: CacheControl = None
    transformations: Annotated[Any, refused(TEXT_ONLY, {})] = None


class DocumentBlock(RequestBody, tag_field="type", tag="document"):
    source: Annotated[dict[str, Any], refused(TEXT_ONLY)]
    cache_control: CacheControl = None
    citations: Annotated[Any, accepted()] = None
    context: Annotated[Any, accepted()] = None
    title: Annotated[Any, accepted()] = None


class ThinkingBlock(RequestBody, tag_field="type", tag="thinking"):
    thinking: Annotated[str, doc("Handed to the chat template, which decides whether the model reads it.")]
    signature: Annotated[str | None, accepted("Nobody checks it.")] = None


class RedactedThinkingBlock(RequestBody, tag_field="type", tag="redacted_thinking"):
    data: Annotated[str, accepted("What cannot be read is not shown to the model.")]


class ToolUseBlock(RequestBody, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[Any, accepted()] = None
    toolset_name: Annotated[str | None, accepted(OF_TOOLSETS)] = None


class ToolResultBlock(RequestBody, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[TextBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_ITEMS)] | None = None
    is_error: Annotated[bool | None, differs('true: the model reads "Error: " before the content.')] = None
    cache_control: CacheControl = None
    toolset_name: Annotated[str | None, accepted(OF_TOOLSETS)] = None


Block = TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageTurn(RequestBody):
    role: Annotated[
        Literal["user", "assistant", "system"],
        differs("system: texts, at their place in the conversation, where the chat template takes them."),
    ]
    content: str | Annotated[list[Block], Meta(max_length=MAX_ITEMS)]
    clear_at: Annotated[
        Literal["next_user_message", "never"] | None,
        doc("Of a system message; next_user_message: the model sees it until a later message of the user."),
    ] = None
    output_config: Annotated[Any, hint("a message does not change how the next is written", {})] = None


class CustomTool(RequestBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: Annotated[dict[str, Any], doc("The JSON schema of the input, an object's.")]
    description: str | None = None
    type: Annotated[Literal["custom"] | None, doc("Anthropic's own tools run on its servers.")] = None
    cache_control: CacheControl = None
    strict: Annotated[bool | None, differs("Forced calls always follow the schema, others need not.")] = None
    eager_input_streaming: Annotated[bool | None, accepted("Input is streamed as it is written.")] = None
    input_examples: Annotated[Any, refused("put examples into the description", [])] = None
    defer_loading: Annotated[Any, refused(ALL_SHOWN, False)] = None
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
    effort: Annotated[
        str | None, doc("Handed to a chat template that reads it, as reasoning_effort; else named as ignored.")
    ] = None
    task_budget: Annotated[Any, hint(NO_EFFORT)] = None


Display = Annotated[Literal["summarized", "omitted"] | None, doc("omitted: no thinking block comes.")]


class EnabledThinking(RequestBody, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[Positive | None, doc("After so many tokens the end of the thinking is forced.")] = None
    display: Display = None
    block_binding: Annotated[Any, hint("thinking that is sent back is not checked", {})] = None


class AdaptiveThinking(RequestBody, tag_field="type", tag="adaptive"):
    display: Display = None
    block_binding: Annotated[Any, hint("thinking that is sent back is not checked", {})] = None


class ThinkingBetweenTools(RequestBody, tag_field="type", tag="between_tools"):
    """Named as ignored: a model of its own kind thinks so."""


class DisabledThinking(RequestBody, tag_field="type", tag="disabled"):
    """The chat template is told, if it has a switch, and no thinking block comes."""


class CountTokensRequest(Extensions, kw_only=True):
    messages: Annotated[list[MessageTurn], Meta(max_length=MAX_ITEMS)]
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_ITEMS)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoneChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    thinking: Annotated[
        EnabledThinking | AdaptiveThinking | ThinkingBetweenTools | DisabledThinking | None,
        doc("null: as the model does. Named as ignored where a model does not think, or cannot be kept from it."),
    ] = None
    speed: Annotated[Any, hint("there is one speed", "standard")] = None
    mcp_servers: Annotated[Any, refused("tools are run by the client", [])] = None
    context_management: Annotated[Any, hint("a context is never edited here")] = None
    compaction: Annotated[Any, accepted("A count is of the messages as they are.")] = None
    billing_policy: Annotated[Any, hint(NOBODY_PAYS)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("vLLM's: variables for the chat template.")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[Positive, differs("More than fit beside the prompt are as many as fit.")]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[Any, hint("nobody asks here who a user is", {})] = None
    service_tier: Annotated[Any, hint("there is one tier", "auto", "standard_only")] = None
    inference_geo: Annotated[Any, hint("it is computed where the server is")] = None
    container: Annotated[Any, refused("code execution")] = None
    compaction: Annotated[Any, refused("a conversation is never summarised here")] = None
    thread: Annotated[Any, refused("nothing is stored; send all messages of the conversation")] = None
    fallbacks: Annotated[Any, hint("no request is declined here")] = None
    fallback_credit_token: Annotated[Any, hint(NOBODY_PAYS)] = None
    diagnostics: Annotated[Any, hint("an answer does not say why a prompt was not cached")] = None
    cache_salt: Annotated[CacheSalt | None, doc("vLLM's: prefix-cache blocks are shared only within one salt.")] = None
    kv_transfer_params: Annotated[Any, refused("K and V of another server", {})] = None


# ---------------------------------------------------------------------------------------------------------- answers


class TextAnswer(Struct):
    text: str
    type: Literal["text"] = "text"


class ThinkingAnswer(Struct):
    thinking: str
    signature: str = ""
    type: Literal["thinking"] = "thinking"


class ToolUseAnswer(Struct):
    id: str
    name: str
    input: dict[str, Any] = {}
    type: Literal["tool_use"] = "tool_use"


class OutputDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """input_tokens: those that had to be computed."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputDetails | UnsetType = UNSET  # of models whose thinking can be read


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
