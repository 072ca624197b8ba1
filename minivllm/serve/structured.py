"""The ways in which a request asks for structured output, OpenAI's and vLLM's two, as one StructuredParams.

response_format     {"type": "text" | "json_object"}, {"type": "json_schema", "json_schema": {"name", "schema"}}
structured_outputs  {"json" | "regex" | "choice" | "grammar" | "json_object": ...}        vLLM's
guided_json, guided_regex, guided_choice, guided_grammar                                  vLLM's older names
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.errors import BadRequest
from minivllm.structured.params import KINDS, StructuredParams

if TYPE_CHECKING:
    from minivllm.serve.protocol import ResponseFormat, Sampling, StructuredOutputs


def structured_params(body: Sampling) -> StructuredParams | None:
    """Raises BadRequest, naming the field, for one that is incomplete, or for two of them."""
    found = [_response_format(body.response_format), _structured_outputs(body.structured_outputs)]
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found.append(StructuredParams(**{kind: value}, field=f"guided_{kind}"))
    found = [params for params in found if params is not None]
    if len(found) > 1:
        names = " and ".join(params.field.partition(".")[0] for params in found[:2])
        raise BadRequest(f"{names} both say what the output must look like: give one", found[1].field.partition(".")[0])
    return found[0] if found else None


def _response_format(asked: ResponseFormat | None) -> StructuredParams | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise BadRequest(f'response_format.json_schema does not go with type "{asked.type}"', "response_format")
        return StructuredParams(json_object=True, field="response_format") if asked.type == "json_object" else None
    if asked.json_schema is None or asked.json_schema.schema is None:
        where = "response_format.json_schema" + ("" if asked.json_schema is None else ".schema")
        raise BadRequest(f'{where} is missing, and type is "json_schema"', where)
    return StructuredParams(json=asked.json_schema.schema, field="response_format.json_schema.schema")


def _structured_outputs(asked: StructuredOutputs | None) -> StructuredParams | None:
    if asked is None:
        return None
    given = {kind: value for kind in KINDS if (value := getattr(asked, kind)) is not None}
    free = asked.disable_any_whitespace
    return StructuredParams(**given, disable_any_whitespace=bool(free), field="structured_outputs")
