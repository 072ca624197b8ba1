"""/score in vLLM's shape and /rerank in Jina's and Cohere's: how well each document answers a query.

By the cosine of two vectors where the model embeds, by its head where it is a cross-encoder.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.engine.pooling import Scoring, paired
from minivllm.errors import BadRequest
from minivllm.serve import errors, pooling, protocol
from minivllm.serve.connection import JSONAnswer, read_body
from minivllm.serve.generation import Service, new_id
from minivllm.serve.pooling import PoolingBody, PoolingUsage
from minivllm.serve.protocol import NotNegative, RequestBody, doc, now

MAX_DOCUMENTS = 2048


class ScoreRequest(PoolingBody, kw_only=True):
    text_1: Annotated[str | list[str], doc("The query, or one for each document.")]
    text_2: Annotated[str | list[str], doc("The documents.")]


class Score(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int = msgspec.field(default_factory=now)
    model: str
    data: list[Score]
    usage: PoolingUsage


class Document(RequestBody):
    text: str


class RerankRequest(PoolingBody, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], doc('Texts, or objects {"text": ...}.')]
    top_n: Annotated[NotNegative | None, doc("Only the best of them; null or 0: all.")] = None
    return_documents: Annotated[bool | None, doc("Repeat each document's text; null: true.")] = None


class Ranked(Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankList(Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: Annotated[list[Ranked], doc("Best first; equal ones in the order of the request.")]


async def score(request: Request) -> ASGIApp:
    body, service = protocol.parse(await read_body(request), ScoreRequest), request.app.state.service
    service.check_model(body.model)
    with errors.renaming({"query": "text_1", "documents": "text_2"}):
        scoring = await scoring_of(body, paired(body.text_1, body.text_2), service)
    return JSONAnswer(score_answer(scoring, service, id := new_id("score")), id)


async def rerank(request: Request) -> ASGIApp:
    body, service = protocol.parse(await read_body(request), RerankRequest), request.app.state.service
    service.check_model(body.model)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    scoring = await scoring_of(body, paired(body.query, documents), service)
    return JSONAnswer(rerank_answer(body, documents, scoring, service, id := new_id("rerank")), id)


# The same endpoints under OpenAI's prefix: a handler each, since each has a path and an operation id of its own.


async def v1_score(request: Request) -> ASGIApp:
    return await score(request)


async def v1_rerank(request: Request) -> ASGIApp:
    return await rerank(request)


async def scoring_of(body: PoolingBody, pairs: list[tuple[str, str]], service: Service) -> Scoring:
    if len(pairs) > MAX_DOCUMENTS:
        raise BadRequest(f"{len(pairs)} documents; {MAX_DOCUMENTS} at most", "documents")
    engine, size = service.engine.engine, sum(len(a) + len(b) for a, b in pairs)
    return await pooling.in_thread_if_long(size, lambda: engine.scoring(pairs, body.truncate_prompt_tokens))


async def score_answer(scoring: Scoring, service: Service, id: str) -> ScoreList:
    scores = scoring.scores(await pooling.run(service, scoring.texts))
    data = [Score(i, value) for i, value in enumerate(scores)]
    return ScoreList(id=id, model=service.model, data=data, usage=pooling.usage_of(scoring.texts))


async def rerank_answer(
    body: RerankRequest, documents: list[str], scoring: Scoring, service: Service, id: str
) -> RerankList:
    scores = scoring.scores(await pooling.run(service, scoring.texts))
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = body.return_documents is not False
    results = [Ranked(i, scores[i], Document(documents[i]) if shown else UNSET) for i in best]
    return RerankList(id, service.model, pooling.usage_of(scoring.texts), results)
