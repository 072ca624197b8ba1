"""/v1/embeddings, as OpenAI has it: texts or token ids in, one vector each out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.errors import BadRequest
from minivllm.pooling.text import Text
from minivllm.serve import pooling
from minivllm.serve.bodies import taken
from minivllm.serve.completions import as_list
from minivllm.serve.connection import Bytes, BytesAnswer, JSONAnswer
from minivllm.serve.generation import Service, new_id
from minivllm.serve.off_loop import by_size
from minivllm.serve.pooling import NO_CHAT, PoolingBody, PoolingUsage
from minivllm.serve.protocol import TEXT_ONLY, doc, now, refused
from minivllm.serve.vectors import BYTES_FORMATS, DType, Endianness, Wire, metadata, places

if TYPE_CHECKING:
    import numpy as np

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(PoolingBody, kw_only=True):
    input: Annotated[
        str | list[str | int | list[int]],
        doc("A text, texts, token ids, or lists of token ids. Token ids are taken as they are."),
    ]
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
    add_special_tokens: Annotated[Any, refused("texts get the model's special tokens; give token ids", True)] = None
    messages: Annotated[Any, refused(NO_CHAT)] = None
    chat_template: Annotated[Any, refused(NO_CHAT)] = None
    add_generation_prompt: Annotated[Any, refused(NO_CHAT, False)] = None
    continue_final_message: Annotated[Any, refused(NO_CHAT, False)] = None
    media_io_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None

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
    engine, cut = service.engine.texts, body.cut
    engine.check_dimensions(body.dimensions)

    def tokenised() -> list[Text]:
        inputs = as_list(body.input, "input")
        if len(inputs) > MAX_INPUTS:
            raise BadRequest(f"input has {len(inputs)} texts; {MAX_INPUTS} at most", "input")
        return [engine.text(item, cut, "input", prompt_name) for item in inputs]

    return await by_size(pooling.length_of(body.input), tokenised, service.client)


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
        return Bytes(b"".join(parts), ())
    told = {"id": id, "created": now(), "model": service.model, "usage": pooling.usage_of(texts)}
    value = metadata(told | {"data": places(vectors, parts, wire)})
    return Bytes(b"".join(parts), ((b"metadata", value),))
