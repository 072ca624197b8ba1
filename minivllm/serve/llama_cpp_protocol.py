"""llama.cpp's server's own API as Structs (its tools/server/README.md); which field has an effect is said as in
protocol.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minivllm.request import MAX_LOGPROBS
from minivllm.serve.protocol import (
    ALL_CACHED,
    MAX_ITEMS,
    MAX_TOOLS,
    AllowedTools,
    AnyTool,
    Int32,
    Message,
    NamedTool,
    RequestBody,
    accepted,
    doc,
    hint,
    refused,
)

AT_START = "the server decides it at its start"
NO_SLOTS = "requests have no slots"
NO_SHIFT = "an answer ends where the context does"
Drafts = Annotated[Any, hint("the server decides at its start how it drafts")]


class LlamaCompletionRequest(RequestBody, kw_only=True):
    prompt: Annotated[
        str | list[Any] | dict[str, Any] | None,
        doc("A text, or tokens and texts mixed; a list of such is as many prompts."),
    ] = None
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    stream: bool | None = None
    n_predict: Annotated[Int32 | None, doc("Below 0 and null: as many as the context has room for. 0: only read.")] = (
        None
    )
    max_tokens: Annotated[Int32 | None, doc("OpenAI's name of n_predict.")] = None
    n_cmpl: Annotated[Annotated[int, Meta(ge=1)] | None, doc("So many answers to each prompt.")] = None
    n: Annotated[Annotated[int, Meta(ge=1)] | None, doc("OpenAI's name of n_cmpl.")] = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None

    temperature: Annotated[float | None, doc("null: 0.8, as llama.cpp has it. Below 0 is greedy too.")] = None
    top_k: Annotated[Int32 | None, doc("null: 40. 0 and below: the whole vocabulary.")] = None
    top_p: Annotated[float | None, doc("null: 0.95.")] = None
    min_p: Annotated[float | None, doc("null: 0.05.")] = None
    seed: Annotated[int | None, doc("-1: none.")] = None
    repeat_penalty: Annotated[float | None, doc("null: 1.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[
        Int32 | None, hint("penalties count the whole prompt and answer; 0 switches them off", 0, -1)
    ] = None
    samplers: Annotated[
        str | list[str] | None, hint("of those that it lacks none is used, but the order is the server's own")
    ] = None
    logit_bias: Annotated[
        Annotated[list[tuple[int | str, float | bool]], Meta(max_length=MAX_ITEMS)]
        | Annotated[dict[str, float | bool], Meta(max_length=MAX_ITEMS)]
        | None,
        doc("Pairs of a token, or a text's tokens, and what its logit gets; false: never."),
    ] = None
    grammar: Annotated[str | None, doc("GBNF.")] = None
    json_schema: Annotated[Any, doc("The JSON Schema of the answer, which is held to it.")] = None
    grammar_lazy: Annotated[Any, refused("grammars that begin later", False)] = None
    grammar_triggers: Annotated[Any, refused("grammars that begin later", [])] = None
    preserved_tokens: Annotated[Any, refused("grammars that begin later", [])] = None
    dynatemp_range: Annotated[float | None, refused("dynamic temperature", 0)] = None
    dynatemp_exponent: Annotated[float | None, accepted("Of dynatemp_range.")] = None
    typical_p: Annotated[float | None, refused("typical sampling", 1)] = None
    top_n_sigma: Annotated[float | None, refused("top-n-sigma sampling", 0, -1)] = None
    xtc_probability: Annotated[float | None, refused("XTC sampling", 0)] = None
    xtc_threshold: Annotated[float | None, accepted("Of xtc_probability.")] = None
    dry_multiplier: Annotated[float | None, refused("DRY sampling", 0)] = None
    dry_base: Annotated[float | None, accepted("Of dry_multiplier.")] = None
    dry_allowed_length: Annotated[int | None, accepted("Of dry_multiplier.")] = None
    dry_penalty_last_n: Annotated[int | None, accepted("Of dry_multiplier.")] = None
    dry_sequence_breakers: Annotated[list[str] | None, accepted("Of dry_multiplier.")] = None
    mirostat: Annotated[int | None, refused("Mirostat sampling", 0)] = None
    mirostat_tau: Annotated[float | None, accepted("Of mirostat.")] = None
    mirostat_eta: Annotated[float | None, accepted("Of mirostat.")] = None
    adaptive_target: Annotated[float | None, refused("adaptive-p sampling", -1)] = None
    adaptive_decay: Annotated[float | None, accepted("Of adaptive_target.")] = None
    min_keep: Annotated[int | None, refused("samplers that keep so many tokens", 0)] = None

    n_probs: Annotated[Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None, doc("Of so many likely tokens.")] = None
    post_sampling_probs: Annotated[Any, refused("probabilities are the model's, before sampling", False)] = None
    return_tokens: Annotated[bool | None, doc("Add the tokens of a whole answer; a stream has them anyway.")] = None
    timings_per_token: Annotated[bool | None, hint("timings come at the end", False)] = None
    return_progress: Annotated[bool | None, hint("a prompt's progress is not told", False)] = None
    response_fields: Annotated[list[str] | None, doc("Only these fields; generation_settings/seed is one inside.")] = (
        None
    )
    sse_ping_interval: Annotated[Any, hint("streams have no pings", -1)] = None

    t_max_predict_ms: Annotated[Any, hint("an answer has a limit of tokens, none of time", 0)] = None
    t_max_prompt_ms: Annotated[Any, hint("an answer has a limit of tokens, none of time", 0)] = None
    n_indent: Annotated[Any, hint("an answer may be indented as the model likes", 0)] = None
    cache_prompt: Annotated[bool | None, hint(ALL_CACHED, True)] = None
    n_cache_reuse: Annotated[Any, hint(ALL_CACHED, 0)] = None
    n_keep: Annotated[Any, hint(NO_SHIFT, 0)] = None
    n_discard: Annotated[Any, hint(NO_SHIFT, 0)] = None
    id_slot: Annotated[Any, hint(NO_SLOTS, -1)] = None
    lora: Annotated[Any, refused("a request names its adapter as its model", [])] = None
    backend_sampling: Annotated[Any, hint(AT_START, False)] = None
    speculative_n_max: Drafts = msgspec.field(default=None, name="speculative.n_max")
    speculative_n_min: Drafts = msgspec.field(default=None, name="speculative.n_min")
    speculative_p_min: Drafts = msgspec.field(default=None, name="speculative.p_min")
    speculative_type: Drafts = msgspec.field(default=None, name="speculative.type")


class ExtraFile(RequestBody):
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaCompletionRequest, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_ITEMS)] | None = None


class TemplateRequest(RequestBody, kw_only=True):
    """The fields of a chat that its template sees."""

    messages: Annotated[list[Message], Meta(max_length=MAX_ITEMS)]
    model: str | None = None
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[Any, refused("templates are the model's or the server's (--chat-template)")] = None


# ---------------------------------------------------------------------------------------------------------- answers


class LlamaProb(Struct):
    id: int
    token: str
    logprob: float
    bytes: list[int]


class LlamaProbs(Struct):
    id: int
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LlamaProb]


class LlamaTimings(Struct, kw_only=True):
    """cache_n: tokens of the prompt that were found; prompt_n: those that were computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaChunk(Struct, kw_only=True):
    """An event of a stream; the last has all of LlamaAnswer."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1  # there are none
    stop: bool = False
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[LlamaProbs] | UnsetType = UNSET


class LlamaAnswer(LlamaChunk, kw_only=True):
    stop: bool = True
    model: str
    prompt: str
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: bool
    stop_type: str  # eos | word | limit
    stopping_word: str
    tokens_cached: int
    timings: LlamaTimings


class Templated(Struct):
    prompt: str


class LlamaSlot(Struct):
    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool


class LlamaProps(Struct, kw_only=True):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    chat_template_caps: dict[str, bool]
    modalities: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False
