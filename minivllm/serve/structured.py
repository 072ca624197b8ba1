"""The ways in which a request asks for structured output, OpenAI's and vLLM's two, as one StructuredParams.

response_format     {"type": "text" | "json_object"}, {"type": "json_schema", "json_schema": {"name", "schema"}}
structured_outputs  {"json" | "regex" | "choice" | "grammar" | "json_object": ...}        vLLM's
guided_json, guided_regex, guided_choice, guided_grammar                                  vLLM's older names
json_schema, grammar                                                                      llama.cpp's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from minivllm.errors import BadRequest
from minivllm.serve.fields import RequestBody, accepted, differs, doc, refused
from minivllm.structured.params import KINDS, StructuredParams

if TYPE_CHECKING:
    from minivllm.request import SamplingParams


ALWAYS_HELD = "Held to its schema whatever this says."
# Fields of a request -> what of structured_outputs they are.
OTHER_NAMES = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
OTHER_NAMES |= {"json_schema": "json", "grammar": "grammar"}


class JSONSchema(RequestBody):
    name: Annotated[str | None, accepted("OpenAI requires it.")] = None
    schema: Annotated[Any, doc("The JSON Schema of the answer.")] = None
    description: Annotated[str | None, accepted()] = None
    strict: Annotated[bool | None, differs(ALWAYS_HELD)] = None


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    schema: Annotated[Any, doc("llama.cpp's: beside json_object, the JSON Schema of the answer.")] = None


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


def structured_params(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None, others: Mapping[str, Any]
) -> StructuredParams | None:
    """others: of OTHER_NAMES, by field; None: not asked for. Raises BadRequest, naming the field, for one that is
    incomplete, or for two of them."""
    found = [_response_format(response_format), _structured_outputs(structured_outputs)]
    for field, value in others.items():
        if value is not None:
            found.append(StructuredParams(**{OTHER_NAMES[field]: value}, field=field))
    found = [params for params in found if params is not None]
    if len(found) > 1:
        names = " and ".join(params.field.partition(".")[0] for params in found[:2])
        raise BadRequest(f"{names} both say what the output must look like: give one", found[1].field.partition(".")[0])
    return found[0] if found else None


def is_of_raw_text(params: StructuredParams) -> bool:
    """Whether all that the model writes behind its thinking is held to it, as vLLM's own fields say, and no call may
    come in its place, as beside response_format."""
    return params.field.startswith(("structured_outputs", "guided_"))


def called(params: SamplingParams, field: str) -> SamplingParams:
    """For a request that was translated into another: the engine, which compiles its grammar once it runs, complains of
    the field that the client has sent."""
    if params.structured is None:
        return params
    return params.replace(structured=msgspec.structs.replace(params.structured, field=field))


def renamed(params: SamplingParams, names: Mapping[str, str]) -> SamplingParams:
    """Likewise, where the names of all fields are told: those here, and what they are called there."""
    return params if params.structured is None else called(params, in_terms_of(names, params.structured.field))


def in_terms_of(names: Mapping[str, str], text: str) -> str:
    for there, here in names.items():
        text = text.replace(there, here)
    return text


def _response_format(asked: ResponseFormat | None) -> StructuredParams | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise BadRequest(f'response_format.json_schema does not go with type "{asked.type}"', "response_format")
        return _json_object(asked)
    if asked.schema is not None:
        raise BadRequest('response_format.schema goes with type "json_object"', "response_format.schema")
    if asked.json_schema is None or asked.json_schema.schema is None:
        where = "response_format.json_schema" + ("" if asked.json_schema is None else ".schema")
        raise BadRequest(f'{where} is missing, and type is "json_schema"', where)
    return StructuredParams(json=asked.json_schema.schema, field="response_format.json_schema.schema")


def _json_object(asked: ResponseFormat) -> StructuredParams | None:
    """Any object, or those of a schema; or text."""
    if asked.schema is not None:
        if asked.type == "text":
            raise BadRequest('response_format.schema goes with type "json_object"', "response_format.schema")
        return StructuredParams(json=asked.schema, field="response_format.schema")
    return StructuredParams(json_object=True, field="response_format") if asked.type == "json_object" else None


def _structured_outputs(asked: StructuredOutputs | None) -> StructuredParams | None:
    if asked is None:
        return None
    given = {kind: value for kind in KINDS if (value := getattr(asked, kind)) is not None}
    free = asked.disable_any_whitespace
    return StructuredParams(**given, disable_any_whitespace=bool(free), field="structured_outputs")
