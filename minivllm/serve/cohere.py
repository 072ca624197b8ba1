"""/v2/embed, Cohere's: texts in, and their vectors out in each of the forms that are asked for. Its rerank is in
rerank.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.errors import BadRequest
from minivllm.pooling.text import Prompts, Text
from minivllm.request import PoolingParams
from minivllm.serve import embeddings, errors, pooling
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.connection import JSONAnswer
from minivllm.serve.generation import Service, new_id
from minivllm.serve.off_loop import by_size
from minivllm.serve.protocol import MAX_ITEMS, TEXT_ONLY, Positive, RequestBody, doc, hint, refused
from minivllm.serve.vectors import Wire

if TYPE_CHECKING:
    import numpy as np

# Cohere's, and what sentence-transformers' models call the same.
INPUT_TYPES = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "classification": (),
    "clustering": (),
}
NAMES = {  # of fields of EmbeddingRequest
    "input": "texts",
    "truncate_prompt_tokens=-1": "truncate=END",
    "truncate_prompt_tokens": "max_tokens",
    "dimensions": "output_dimension",
}


class EmbedPart(RequestBody):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Annotated[Any, refused(TEXT_ONLY)] = None


class EmbedInput(RequestBody):
    content: Annotated[list[EmbedPart], Meta(max_length=MAX_ITEMS)]


class CohereEmbedRequest(RequestBody, kw_only=True):
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    texts: list[str] | None = None
    inputs: Annotated[list[EmbedInput] | None, doc("Texts in parts; give this or texts.")] = None
    images: Annotated[Any, refused(TEXT_ONLY, [])] = None
    input_type: Annotated[
        str | None,
        doc(
            "What texts are for: the model's prompt of that name is put before each. Cohere's own names are taken by a "
            "model without such a prompt, too; null: the model's default."
        ),
    ] = None
    embedding_types: Annotated[
        list[Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]] | None, doc('null: ["float"].')
    ] = None
    output_dimension: Annotated[Positive | None, doc("Only so many numbers, at unit length again.")] = None
    max_tokens: Annotated[Positive | None, doc("Cut longer texts; null: those that the model cannot take.")] = None
    truncate: Annotated[
        Literal["NONE", "END", "START"] | None, doc("Where a text is cut off; NONE: a 400. null: END.")
    ] = None
    priority: Annotated[Any, hint("texts run in the order in which they come", 0)] = None


class BilledUnits(Struct):
    input_tokens: int
    image_tokens: int = 0


class CohereMeta(Struct):
    billed_units: BilledUnits
    api_version: dict[str, str]


class CohereEmbeddings(Struct, kw_only=True):
    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: CohereMeta


async def v2_embed(request: Request) -> ASGIApp:
    body, service = await taken(request, CohereEmbedRequest), pooling.service_for(request)
    service.check_model(body.model)
    given = await worked_out(request, lambda: texts_given(body))
    for kind in body.embedding_types or ():
        if kind not in WRITERS:
            raise BadRequest(
                f"embedding_types: {kind} needs ranges that only a calibrated model has", "embedding_types"
            )
    limit = None if body.truncate == "NONE" else body.max_tokens or -1
    side = "left" if body.truncate == "START" else "right"
    asks = embeddings.EmbeddingRequest(
        input=given, truncate_prompt_tokens=limit, truncation_side=side, dimensions=body.output_dimension
    )
    prompt_name = prompt_for(body.input_type, service.engine.texts.prompts)
    with errors.renaming(NAMES):
        texts = await embeddings.texts_of(asks, service, prompt_name)
    return JSONAnswer(answer(body, service, given, texts, id := new_id("embd")), id)


def texts_given(body: CohereEmbedRequest) -> list[str]:
    """Raises BadRequest."""
    if (body.texts is None) == (body.inputs is None):
        raise BadRequest("give texts or inputs, and not both", "texts")
    if body.texts is not None:
        return body.texts
    for i, item in enumerate(body.inputs):
        if any(part.type != "text" or part.text is None for part in item.content):
            raise BadRequest(f'inputs[{i}].content: only parts of type "text", with a text', f"inputs[{i}].content")
    return ["\n".join(part.text for part in item.content) for item in body.inputs]


def prompt_for(input_type: str | None, prompts: Prompts) -> str | None:
    """The name of the prompt that a model has for it. Raises BadRequest."""
    if input_type is None:
        return None
    names = (input_type, *INPUT_TYPES.get(input_type, ()))
    if (
        name := next((name for name in names if name in prompts.by_name), None)
    ) is None and input_type not in INPUT_TYPES:
        known = ", ".join(dict.fromkeys((*prompts.by_name, *INPUT_TYPES)))
        raise BadRequest(f'Unsupported input_type "{input_type}". Supported: {known}', "input_type")
    return name


async def answer(
    body: CohereEmbedRequest, service: Service, given: list[str], texts: list[Text], id: str
) -> CohereEmbeddings:
    found = await pooling.run(service, texts, id, PoolingParams(dimensions=body.output_dimension))
    kinds = dict.fromkeys(body.embedding_types or ["float"])

    def made() -> dict[str, list[Any]]:
        return {kind: [WRITERS[kind](vector) for vector in found] for kind in kinds}

    written = await by_size(sum(map(len, found)), made, service.client)
    meta = CohereMeta(BilledUnits(pooling.usage_of(texts).prompt_tokens), {"version": "2"})
    return CohereEmbeddings(id=id, embeddings=written, texts=given, meta=meta)


def signs(vector: np.ndarray) -> np.ndarray:
    """A bit each, eight in a byte, the first one highest."""
    import numpy as np

    return np.packbits(vector >= 0)


WRITERS: dict[str, Callable[[np.ndarray], Any]] = {
    "float": lambda vector: vector.tolist(),
    "base64": Wire().base64_of,
    "ubinary": lambda vector: signs(vector).tolist(),
    "binary": lambda vector: (signs(vector).astype("int16") - 128).tolist(),
}
