"""/pooling, vLLM's: what a model makes of texts, whatever it is for. Here that is a vector each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.serve import embeddings, pooling
from minivllm.serve.bodies import taken
from minivllm.serve.connection import BytesAnswer, JSONAnswer
from minivllm.serve.embeddings import EmbeddingRequest
from minivllm.serve.generation import Service, new_id
from minivllm.serve.pooling import PoolingUsage
from minivllm.serve.protocol import now, refused
from minivllm.serve.vectors import BYTES_FORMATS


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: Annotated[Any, refused("this model embeds: one vector a text", "embed")] = None
    messages: Annotated[Any, refused("send the text that a template makes of them: see /apply-template")] = None
    add_special_tokens: Annotated[Any, refused("token ids are taken as they are; texts get special tokens", True)] = (
        None
    )


class PoolingData(Struct):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int = msgspec.field(default_factory=now)
    model: str
    data: list[PoolingData]
    usage: PoolingUsage


async def pooling_(request: Request) -> ASGIApp:
    body, service = await taken(request, PoolingRequest), pooling.service_for(request)
    service.check_model(body.model)
    texts = await embeddings.texts_of(body, service)
    id = new_id("pool")
    if body.encoding_format in BYTES_FORMATS:
        return BytesAnswer(embeddings.bytes_answer(body, service, texts, id), id)
    return JSONAnswer(answer(body, service, texts, id), id)


async def answer(body: PoolingRequest, service: Service, texts: list[Any], id: str) -> PoolingList:
    made = await embeddings.answer(body, service, texts, id)
    data = [PoolingData(item.index, item.embedding) for item in made.data]
    return PoolingList(id=id, model=made.model, data=data, usage=made.usage)
