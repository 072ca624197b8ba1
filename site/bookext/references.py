"""Which fields the references have: OpenAI's and Anthropic's by the types of their Python packages, as they are
installed, and vLLM's by a list of names (site/vllm.json, which site/vllm_names.py makes of its source).

A Struct of ours is paired with the types that a client may send, or expects, in its place: from the body of each
endpoint inwards. So a field that a package has anywhere is looked for in the Struct that would meet it.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from pydantic import BaseModel
from typing_extensions import TypeAliasType, is_typeddict

from minivllm.serve.app import ENDPOINTS

VLLM = Path(__file__).parent.parent / "vllm.json"


class Types(NamedTuple):
    """Of an endpoint in a package, as module:name. "": it has none, or has none that ours could be compared with."""

    takes: str = ""
    answers: str = ""
    streams: str = ""


PACKAGES: dict[str, tuple[Types, ...]] = {
    "/v1/chat/completions": (
        Types(
            "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
            "openai.types.chat:ChatCompletion",
            "openai.types.chat:ChatCompletionChunk",
        ),
    ),
    "/v1/completions": (
        Types(
            "openai.types.completion_create_params:CompletionCreateParamsStreaming",
            "openai.types:Completion",
            "openai.types:Completion",
        ),
    ),
    "/v1/embeddings": (
        Types("openai.types.embedding_create_params:EmbeddingCreateParams", "openai.types:CreateEmbeddingResponse"),
    ),
    "/v1/responses": (
        Types(
            "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
            "openai.types.responses:Response",
        ),
    ),
    "/v1/responses/input_tokens": (
        Types(
            "openai.types.responses.input_token_count_params:InputTokenCountParams",
            "openai.types.responses:InputTokenCountResponse",
        ),
    ),
    "/v1/audio/transcriptions": (
        Types(
            "openai.types.audio.transcription_create_params:TranscriptionCreateParamsStreaming",
            "openai.types.audio:Transcription",
        ),
    ),
    "/v1/audio/translations": (
        Types("openai.types.audio.translation_create_params:TranslationCreateParams", "openai.types.audio:Translation"),
    ),
    "/v1/messages": (
        Types("anthropic.types.message_create_params:MessageCreateParamsStreaming", "anthropic.types:Message"),
        Types("anthropic.types.beta.message_create_params:MessageCreateParamsStreaming"),
    ),
    "/v1/messages/count_tokens": (
        Types(
            "anthropic.types.message_count_tokens_params:MessageCountTokensParams", "anthropic.types:MessageTokensCount"
        ),
        Types("anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams"),
    ),
    "/v1/models/{model:path}": (Types(answers="openai.types:Model"),),
}
# Parameters of Anthropic's client that it sends as headers.
HEADERS = {"betas", "user_profile_id", "workspace_id"}
OWNERS = {"openai": "OpenAI", "anthropic": "Anthropic", "vllm": "vLLM"}

Shape = Any  # a TypedDict, or a pydantic model


class Known(NamedTuple):
    """What the references say of our Structs."""

    fields: dict[type[Struct], dict[str, set[str]]]  # whose each field is
    variants: dict[tuple[type[Struct], str], set[str]]  # in a field's place: objects that no Struct of ours can be


@cache
def requests() -> Known:
    found = Known({}, {})
    for endpoint in ENDPOINTS:
        for types in PACKAGES.get(endpoint.path, ()):
            if endpoint.takes and (shape := load(types.takes)):
                pair(endpoint.takes, shape, found, set())
    for struct in {struct for endpoint in ENDPOINTS if endpoint.takes for struct in inside(endpoint.takes)}:
        for name in vllm_fields(struct):
            found.fields.setdefault(struct, {}).setdefault(name, set()).add(OWNERS["vllm"])
    return found


@cache
def answers() -> Known:
    found = Known({}, {})
    for endpoint in ENDPOINTS:
        for types in PACKAGES.get(endpoint.path, ()):
            for ours, name in ((endpoint.answers, types.answers), (endpoint.streams, types.streams)):
                if ours and (shape := load(name)):
                    pair(ours, shape, found, set())
    return found


def load(name: str) -> Shape | None:
    """None: a package that is older than this type of it."""
    module, _, name = name.partition(":")
    try:
        return getattr(import_module(module), name, None) if name else None
    except ModuleNotFoundError:
        return None


def pair(ours: type[Struct], theirs: Shape, found: Known, seen: set[tuple[type[Struct], Shape]]) -> None:
    """Note the fields of theirs at ours, and go on with the objects inside of both."""
    if (ours, theirs) in seen:
        return
    seen.add((ours, theirs))
    owner = OWNERS[theirs.__module__.partition(".")[0]]
    mine = field_types(ours)
    for name, kind in shape_fields(theirs).items():
        found.fields.setdefault(ours, {}).setdefault(name, set()).add(owner)
        structs = parts(mine.get(name), is_struct)
        for shape in parts(kind, is_shape) if structs else ():
            fitting = [struct for struct in structs if fits(struct, shape)]
            for struct in fitting:
                pair(struct, shape, found, seen)
            if not fitting:
                found.variants.setdefault((ours, name), set()).add(called(shape))


def inside(struct: type[Struct]) -> Iterator[type[Struct]]:
    """A Struct and those in its fields, each once."""
    found, left = {}, [struct]
    while left:
        found[kind := left.pop(0)] = None
        left += [
            inner for field in field_types(kind).values() for inner in parts(field, is_struct) if inner not in found
        ]
    return iter(found)


def field_types(struct: type[Struct]) -> dict[str, Any]:
    config = struct.__struct_config__
    tag = {} if config.tag is None else {config.tag_field: Literal[config.tag]}
    return tag | {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


@cache
def shape_fields(shape: Shape) -> dict[str, Any]:
    if is_typeddict(shape):
        hints = typing.get_type_hints(shape, include_extras=True)
        return {alias(kind) or name: kind for name, kind in hints.items() if name not in HEADERS}
    return {field.alias or name: field.annotation for name, field in shape.model_fields.items()}


def alias(kind: Any) -> str | None:
    """A name that Python does not allow, or that the package avoids, on the wire."""
    metas = [meta for part in parts(kind, lambda k: hasattr(k, "__metadata__")) for meta in part.__metadata__]
    return next((name for meta in metas if (name := getattr(meta, "alias", None))), None)


def parts(kind: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """Those wanted among a type and the types that it is made of, outermost first, each once."""
    if wanted(kind):
        return [kind]
    if isinstance(kind, TypeAliasType):
        return parts(kind.__value__, wanted)
    inner = () if typing.get_origin(kind) is Literal else typing.get_args(kind)
    return list(dict.fromkeys(part for arg in inner for part in parts(arg, wanted)))


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def is_shape(kind: Any) -> bool:
    return is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def fits(ours: type[Struct], theirs: Shape) -> bool:
    """False: what tells kinds of objects apart has no value in common."""
    mine, other = field_types(ours), shape_fields(theirs)
    for name in ("type", "role"):
        a, b = choices(mine.get(name)), choices(other.get(name))
        if a and b and set(a).isdisjoint(b):
            return False
    return True


def choices(kind: Any) -> list[Any]:
    literals = parts(kind, lambda k: typing.get_origin(k) is Literal)
    return list(dict.fromkeys(value for literal in literals for value in typing.get_args(literal)))


def called(shape: Shape) -> str:
    fields = shape_fields(shape)
    named = choices(fields.get("type")) or choices(fields.get("role"))
    return ", ".join(sorted(map(str, named))) or shape.__name__


@cache
def vllm() -> dict[str, Any]:
    """Its version, and {Struct of ours: the names of its fields}."""
    return json.loads(VLLM.read_text())


def vllm_fields(struct: type[Struct]) -> list[str]:
    return vllm()["fields"].get(struct.__name__, "").split()


# ------------------------------------------------------------------------------------ answers' fields that are not sent

ABSENT = {  # why: the names of the fields
    "Only text is read and written.": "audio audio_tokens image image_tokens input_transformations text_tokens",
    "Of a recording its text is told alone.": "languages logprobs",
    "Nothing is searched, moderated or run here.": "annotations container moderation server_tool_use tool_usage",
    "There is one tier, speed and place.": "inference_geo service_tier speed",
    "What a request holds is not said again.": "max_tool_calls metadata phase prompt safety_identifier user",
    "What it asks for is refused or ignored.": "access_programs conversation reasoning top_logprobs",
    "Only the model calls tools, and waits for each.": "async caller namespace",
    "Tokens are not counted by what they are for, beside those of thinking.": "completion_tokens_details "
    "output_tokens_details accepted_prediction_tokens rejected_prediction_tokens",
    "Thinking is sent as it is.": "encrypted_content",
    "Usage says how many tokens were cached, and no more.": "cache_creation cache_write_tokens "
    "cache_write_tokens_details diagnostics prompt_cache_diagnostics prompt_cache_key prompt_cache_options "
    "prompt_cache_retention",
    "The model's refusal is its text.": "refusal stop_details",
    "OpenAI has replaced it by tool_calls.": "function_call",
    "Lengths of chunks are not hidden.": "obfuscation",
    "Not noted.": "shutdown_date",
    "What went wrong is its code and its message.": "misalignment param type",
}
WHY_ABSENT = {name: why for why, names in ABSENT.items() for name in names.split()}


def absent() -> list[tuple[type[Struct], str, str]]:
    """(Struct of an answer, a field that it lacks, why; "" where nobody has said it)"""
    return [
        (struct, name, WHY_ABSENT.get(name, ""))
        for struct, fields in answers().fields.items()
        for name in fields
        if name not in field_types(struct)
    ]
