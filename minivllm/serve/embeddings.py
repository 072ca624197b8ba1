"""/v1/embeddings, as OpenAI has it: texts or token ids in, one vector each out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.pooling.text import Text
from minivllm.serve import pooling
from minivllm.serve.bodies import taken
from minivllm.serve.connection import Bytes, BytesAnswer, JSONAnswer
from minivllm.serve.generation import Service, new_id
from minivllm.serve.off_loop import by_size
from minivllm.serve.pooling import PoolingUsage, TextsBody
from minivllm.serve.protocol import doc, now
from minivllm.serve.vectors import BYTES_FORMATS, DType, Endianness, Wire, metadata, places

if TYPE_CHECKING:
    import numpy as np


class EmbeddingRequest(TextsBody, kw_only=True):
    encoding_format: Annotated[
        Literal["float", "base64", "bytes", "bytes_only"] | None,
        doc(
            "null: float. vLLM's: bytes, all vectors back to back, and a header `metadata` says where each lies; "
            "bytes_only, without that header."
        ),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("Only so many numbers, at unit length again: for models trained for it (Matryoshka)."),
    ] = None
    embed_dtype: Annotated[DType | None, doc("vLLM's: the numbers of base64 and bytes; null: float32.")] = None
    endianness: Annotated[Endianness | None, doc("vLLM's: of those numbers; null: little.")] = None

    @property
    def wire(self) -> Wire:
        return Wire(self.embed_dtype or "float32", self.endianness or "little")


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
    body, service = await taken(request, EmbeddingRequest), pooling.service_for(request)
    service.check_model(body.model)
    texts = await texts_of(body, service)
    id = new_id("embd")
    if body.encoding_format in BYTES_FORMATS:
        return BytesAnswer(bytes_answer(body, service, texts, id), id)
    return JSONAnswer(answer(body, service, texts, id), id)


async def texts_of(body: EmbeddingRequest, service: Service, prompt_name: str | None = None) -> list[Text]:
    """prompt_name: of the model's prompts, the one to put before each. Raises BadRequest, also for vectors of a length
    that there is none of."""
    service.engine.texts.check_dimensions(body.dimensions)
    return await pooling.texts_of(body, service, prompt_name)


async def answer(body: EmbeddingRequest, service: Service, texts: list[Text], id: str) -> EmbeddingList:
    vectors = await pooling.run(service, texts, id, body.asked(body.dimensions))
    write = body.wire.base64_of if body.encoding_format == "base64" else as_list_of_numbers

    def made() -> list[Embedding]:
        return [Embedding(i, write(vector)) for i, vector in enumerate(vectors)]

    data = await by_size(sum(map(len, vectors)), made, service.client)
    return EmbeddingList(data, service.model, pooling.usage_of(texts))


def as_list_of_numbers(vector: np.ndarray) -> list[float]:
    return vector.tolist()


async def bytes_answer(body: EmbeddingRequest, service: Service, texts: list[Text], id: str) -> Bytes:
    vectors = await pooling.run(service, texts, id, body.asked(body.dimensions))
    wire = body.wire
    parts: Sequence[bytes] = await by_size(
        sum(map(len, vectors)), lambda: [wire.bytes_of(vector) for vector in vectors], service.client
    )
    if body.encoding_format == "bytes_only":
        return Bytes(b"".join(parts))
    told = {"id": id, "created": now(), "model": service.model, "usage": pooling.usage_of(texts)}
    value = metadata(told | {"data": places(vectors, parts, wire)})
    return Bytes(b"".join(parts), ((b"metadata", value),))
