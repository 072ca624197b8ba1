"""/v1/embeddings, as OpenAI has it: texts or token ids in, one vector each out."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.errors import BadRequest
from minivllm.pooling.text import Text
from minivllm.serve import pooling, protocol
from minivllm.serve.completions import as_list
from minivllm.serve.connection import JSONAnswer, read_body
from minivllm.serve.generation import Service, new_id
from minivllm.serve.pooling import PoolingBody, PoolingUsage
from minivllm.serve.protocol import doc

if TYPE_CHECKING:
    import numpy as np

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(PoolingBody, kw_only=True):
    input: Annotated[
        str | list[str | int | list[int]],
        doc("A text, texts, token ids, or lists of token ids. Token ids are taken as they are."),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, doc("base64: of float32 numbers, little-endian. null: float.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("Only so many numbers, at unit length again: for models trained for it (Matryoshka)."),
    ] = None


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: PoolingUsage
    object: Literal["list"] = "list"


async def embeddings(request: Request) -> ASGIApp:
    body, service = protocol.parse(await read_body(request), EmbeddingRequest), request.app.state.service
    service.check_model(body.model)
    service.engine.engine.check_dimensions(body.dimensions)
    texts = await texts_of(body, service)
    return JSONAnswer(answer(body, service, texts), new_id("embd"))


async def texts_of(body: EmbeddingRequest, service: Service) -> list[Text]:
    inputs = as_list(body.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(f"input has {len(inputs)} texts; {MAX_INPUTS} at most", "input")
    engine, limit = service.engine.engine, body.truncate_prompt_tokens
    return await pooling.in_thread_if_long(
        sum(map(len, inputs)), lambda: [engine.text(item, limit, "input") for item in inputs]
    )


async def answer(body: EmbeddingRequest, service: Service, texts: list[Text]) -> EmbeddingList:
    vectors = await pooling.run(service, texts)
    from minivllm.pooling.pool import cut  # with torch, which a server whose engine is a process of its own never needs

    normalized = service.engine.engine.normalized
    written = [write(cut(vector, body.dimensions, normalized), body.encoding_format) for vector in vectors]
    data = [Embedding(i, vector) for i, vector in enumerate(written)]
    return EmbeddingList(data, service.model, pooling.usage_of(texts))


def write(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
