"""Ollama's API as Structs (its api/types.go); which field has an effect is said as in protocol.py."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.serve.protocol import (
    MAX_ITEMS,
    MAX_TOOLS,
    TEXT_ONLY,
    AnyTool,
    Int32,
    RequestBody,
    TokenLogprob,
    accepted,
    doc,
    hint,
    refused,
)

LOADED = "the server's one model stays loaded"
AT_START = "the server decides it at its start"
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


class OllamaOptions(RequestBody, kw_only=True):
    temperature: Annotated[float | None, doc("null: 0.8, as Ollama has it.")] = None
    top_k: Annotated[Int32 | None, doc("null: 40. 0: the whole vocabulary.")] = None
    top_p: Annotated[float | None, doc("null: 0.9.")] = None
    min_p: float | None = None
    seed: Annotated[int | None, doc("Below 0: none.")] = None
    stop: str | list[str] | None = None
    num_predict: Annotated[Int32 | None, doc("0 and below: as many as the context has room for.")] = None
    repeat_penalty: Annotated[float | None, doc("null: 1.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[
        Int32 | None, hint("penalties count the whole prompt and answer; 0 switches them off", 0, -1)
    ] = None
    typical_p: Annotated[float | None, refused("typical sampling", 0, 1)] = None
    num_keep: Annotated[int | None, hint("an answer ends where the context does")] = None
    num_ctx: Annotated[int | None, hint(AT_START)] = None
    num_batch: Annotated[int | None, hint(AT_START)] = None
    num_gpu: Annotated[int | None, hint(AT_START)] = None
    main_gpu: Annotated[int | None, hint(AT_START)] = None
    use_mmap: Annotated[bool | None, hint(AT_START)] = None
    num_thread: Annotated[int | None, hint(AT_START)] = None
    draft_num_predict: Annotated[int | None, hint(AT_START)] = None


class OllamaRequest(RequestBody, kw_only=True):
    """What all requests for text share."""

    model: Annotated[str | None, doc('A name that GET /api/tags lists, also without ":latest"; null: the model.')] = (
        None
    )
    stream: Annotated[bool | None, doc("One JSON object a line; null: true.")] = None
    format: Annotated[Any, doc('"json", or a JSON Schema: the answer is held to it.')] = None
    options: OllamaOptions | None = None
    think: Annotated[
        bool | str | None,
        doc("The chat template's enable_thinking; a level is its reasoning_effort too. null: as the template has it."),
    ] = None
    logprobs: Annotated[bool | None, doc("Add the tokens' log-probabilities.")] = None
    top_logprobs: Annotated[TopLogprobs | None, doc("Of so many likely tokens too; needs logprobs.")] = None
    keep_alive: Annotated[Any, hint(LOADED)] = None
    truncate: Annotated[bool | None, hint("a prompt that does not fit is a 400", False)] = None
    shift: Annotated[bool | None, hint("an answer ends where the context does", False)] = None
    debug_render_only: Annotated[bool | None, refused("/apply-template shows what a template makes", False)] = (
        msgspec.field(default=None, name="_debug_render_only")
    )


class OllamaFunctionCall(RequestBody):
    name: str
    arguments: dict[str, Any] = {}
    index: Annotated[int | None, accepted("Calls are in order.")] = None


class OllamaToolCall(RequestBody):
    function: OllamaFunctionCall
    id: Annotated[str | None, doc("null: the results' order, or their tool_name, says whose they are.")] = None
    type: Annotated[str | None, accepted()] = None


class OllamaMessage(RequestBody):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: Annotated[str | None, doc("The assistant's; handed to the chat template.")] = None
    images: Annotated[Any, refused(TEXT_ONLY, [])] = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_ITEMS)] | None = None
    tool_name: Annotated[str | None, doc('Of the call that this message of role "tool" answers.')] = None
    tool_call_id: Annotated[str | None, doc("The call's id, if it has one.")] = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[
        Annotated[list[OllamaMessage], Meta(max_length=MAX_ITEMS)] | None, doc("None: the model is only loaded.")
    ] = None
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: Annotated[str | None, doc("A user's message, unless raw; none: the model is only loaded.")] = None
    system: str | None = None
    raw: Annotated[bool | None, doc("The prompt is the whole prompt: no chat template.")] = None
    suffix: Annotated[str | None, doc("What comes after the answer: for models with tokens for the middle.")] = None
    context: Annotated[list[int] | None, doc("An earlier answer's: this prompt goes on behind it.")] = None
    template: Annotated[Any, refused("Ollama's templates are Go's; the model has one of its own", "")] = None
    images: Annotated[Any, refused(TEXT_ONLY, [])] = None


class OllamaShowRequest(RequestBody, kw_only=True):
    model: str | None = None
    name: Annotated[str | None, doc("The older name of model.")] = None
    verbose: Annotated[bool | None, hint("there is no more to show", False)] = None
    system: Annotated[Any, refused("nothing is changed here", "")] = None
    template: Annotated[Any, refused("nothing is changed here", "")] = None
    options: Annotated[Any, refused("nothing is changed here", {})] = None


class OllamaEmbedRequest(RequestBody, kw_only=True):
    input: Annotated[str | list[str] | None, doc("A text, or texts; none: the model is only loaded.")] = None
    model: str | None = None
    truncate: Annotated[bool | None, doc("Cut texts that the model cannot take whole; null: true.")] = None
    dimensions: Annotated[Annotated[int, Meta(ge=0)] | None, doc("0: all.")] = None
    keep_alive: Annotated[Any, hint(LOADED)] = None
    options: Annotated[Any, hint(AT_START, {})] = None


class OllamaEmbeddingRequest(RequestBody, kw_only=True):
    prompt: Annotated[str | None, doc("None: the model is only loaded.")] = None
    model: str | None = None
    keep_alive: Annotated[Any, hint(LOADED)] = None
    options: Annotated[Any, hint(AT_START, {})] = None


# ---------------------------------------------------------------------------------------------------------- answers


def utc_now() -> str:
    return as_utc(datetime.now(UTC).timestamp())


def as_utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaCalledFunction(Struct):
    name: str
    arguments: dict[str, Any]
    index: int = 0


class OllamaCall(Struct):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(Struct):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """A whole answer, or a line of a stream, whose last one alone has a reason and figures. Durations: nanoseconds."""

    model: str
    created_at: str = msgspec.field(default_factory=utc_now)
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class OllamaDetails(Struct):
    format: str
    parent_model: str = ""
    family: str = "minivllm"
    families: tuple[str, ...] = ("minivllm",)
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails


class OllamaModelList(Struct):
    models: list[OllamaModel]


class OllamaRunning(Struct, kw_only=True):
    name: str
    model: str
    size: int = 0
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int = 0
    context_length: int


class OllamaRunningList(Struct):
    models: list[OllamaRunning]


class OllamaShown(Struct, kw_only=True):
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    license: str = ""


class OllamaEmbeddings(Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbedding(Struct):
    embedding: list[float]


class OllamaError(Struct):
    error: str
