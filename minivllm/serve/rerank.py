"""/score in vLLM's shapes and /rerank in Jina's and Cohere's, or, for a request with `texts`, in that of TEI (Hugging
Face's text-embeddings-inference): how well each document answers a query.

By the cosine of two vectors where the model embeds, by its head where it is a cross-encoder.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.engine.pooling import Scoring, paired
from minivllm.errors import BadRequest
from minivllm.serve import errors, pooling
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.connection import JSONAnswer
from minivllm.serve.generation import Service, new_id
from minivllm.serve.off_loop import by_size
from minivllm.serve.pooling import TEI_NAMES, PoolingBody, PoolingUsage, TruncationDirection, side_of
from minivllm.serve.protocol import NotNegative, RequestBody, doc, hint, now, refused

AnyTexts = TypeVar("AnyTexts", str, list[str], str | list[str])
FORMS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PairsBody(PoolingBody, kw_only=True):
    max_tokens_per_query: Annotated[
        NotNegative | None, doc("vLLM's: leave out the end of queries of more tokens; null or 0: none.")
    ] = None
    max_tokens_per_doc: Annotated[
        NotNegative | None, doc("Cohere's and vLLM's: the same of documents; null or 0: none.")
    ] = None
    instruction: Annotated[Any, refused("put it into the query")] = None


class ScoreRequest(PairsBody, kw_only=True):
    text_1: Annotated[str | list[str] | None, doc("The query, or one for each document.")] = None
    text_2: Annotated[str | list[str] | None, doc("The documents.")] = None
    queries: Annotated[str | list[str] | None, doc("A newer name of text_1.")] = None
    documents: Annotated[str | list[str] | None, doc("A newer name of text_2.")] = None
    items: Annotated[str | list[str] | None, doc("Another name of documents.")] = None
    data_1: Annotated[str | list[str] | None, doc("Another name of text_1.")] = None
    data_2: Annotated[str | list[str] | None, doc("Another name of text_2.")] = None


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


class RerankRequest(PairsBody, kw_only=True):
    query: str
    documents: Annotated[list[str | Document] | None, doc('Texts, or objects {"text": ...}.')] = None
    texts: Annotated[list[str] | None, doc("TEI's name of documents; the answer is a list then.")] = None
    top_n: Annotated[NotNegative | None, doc("Only the best of them; null or 0: all.")] = None
    return_documents: Annotated[bool | None, doc("Repeat each document's text; null: true.")] = None
    max_chunks_per_doc: Annotated[Any, hint("documents are read whole", 1)] = None
    rank_fields: Annotated[Any, refused("a document is its text", ["text"])] = None
    relevant_spans: Annotated[Any, refused("spans of a document")] = None
    return_text: Annotated[bool | None, doc("TEI's name of return_documents; null: false.")] = None
    truncate: Annotated[bool | None, doc("TEI's: cut texts that the model cannot take whole; null: a 400.")] = None
    truncation_direction: TruncationDirection = None
    raw_scores: Annotated[bool | None, doc("TEI's: scores before the head's sigmoid; null: false.")] = None


class TextRank(Struct):
    """TEI's."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Ranked(Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankList(Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: Annotated[list[Ranked], doc("Best first; equal ones in the order of the request.")]


Reranked = RerankList | list[TextRank]  # the latter for TEI's texts


async def score(request: Request) -> ASGIApp:
    body, service = await taken(request, ScoreRequest), pooling.service_for(request)
    service.check_model(body.model)
    first, second = sides(body)
    limits = body.max_tokens_per_query, body.max_tokens_per_doc

    def pairs() -> list[tuple[str, str]]:
        given = zip((getattr(body, first), getattr(body, second)), limits, strict=True)
        return paired(*(beginnings(texts, most, service) for texts, most in given))

    with errors.renaming({"query": first, "documents": second}):
        scoring = await scoring_of(body, await worked_out(request, pairs), service)
    return JSONAnswer(score_answer(body, scoring, service, id := new_id("score")), id)


async def rerank(request: Request) -> ASGIApp:
    body, service = await taken(request, RerankRequest), pooling.service_for(request)
    service.check_model(body.model)
    documents, id = await worked_out(request, lambda: documents_of(body, service)), new_id("rerank")
    query = await worked_out(request, lambda: beginnings(body.query, body.max_tokens_per_query, service))
    if body.truncation_direction is not None:
        body.truncation_side = side_of(body.truncation_direction)
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    if body.raw_scores:
        body.use_activation = False
    with errors.renaming({} if body.texts is None else {**TEI_NAMES, "documents": "texts"}):
        scoring = await scoring_of(body, paired(query, documents), service)
    if body.texts is not None:
        return JSONAnswer(rank_answer(body, documents, scoring, service, id), id)
    return JSONAnswer(rerank_answer(body, documents, scoring, service, id), id)


def sides(body: ScoreRequest) -> tuple[str, str]:
    """The names of the two fields that a request has. Raises BadRequest."""
    given = {name for name in ScoreRequest.__struct_fields__ if getattr(body, name) is not None}
    for first, second in FORMS:
        if {first, second} <= given:
            return first, second
    missing = "text_2" if "text_1" in given or not given & {"text_2", "data_2", "documents", "items"} else "text_1"
    raise BadRequest(f"{missing} is missing: give text_1 and text_2, or queries and documents", missing)


def documents_of(body: RerankRequest, service: Service) -> list[str]:
    """Raises BadRequest."""
    if (body.documents is None) == (body.texts is None):
        raise BadRequest("give documents, or TEI's texts, and not both", "documents")
    given = body.texts if body.documents is None else body.documents
    pooling.check_number(given, "documents" if body.texts is None else "texts")
    texts = [document if isinstance(document, str) else document.text for document in given]
    return beginnings(texts, body.max_tokens_per_doc, service)


def beginnings(texts: AnyTexts, most: int | None, service: Service) -> AnyTexts:
    """Of each the first `most` tokens; None and 0: all."""
    if not most:
        return texts
    beginning = service.engine.tokenizer.beginning
    return beginning(texts, most) if isinstance(texts, str) else [beginning(text, most) for text in texts]


# The same endpoints under OpenAI's prefix: a handler each, since each has a path and an operation id of its own.


async def v1_score(request: Request) -> ASGIApp:
    return await score(request)


async def v1_rerank(request: Request) -> ASGIApp:
    return await rerank(request)


async def v2_rerank(request: Request) -> ASGIApp:
    return await rerank(request)


async def reranking(request: Request) -> ASGIApp:
    return await rerank(request)


async def v1_reranking(request: Request) -> ASGIApp:
    return await rerank(request)


async def scoring_of(
    body: PoolingBody, pairs: list[tuple[str, str]], service: Service, prompt_name: str | None = None
) -> Scoring:
    pooling.check_number(pairs, "documents")
    engine = service.engine.texts
    size = sum(pooling.length_of(pair) for pair in pairs)
    return await by_size(size, lambda: engine.scoring(pairs, body.cut, prompt_name), service.client)


async def scores_of(body: PoolingBody, scoring: Scoring, service: Service, id: str) -> list[float]:
    vectors = await pooling.run(service, scoring.texts, id, body.asked())
    return await by_size(pooling.PER_TEXT * len(scoring.documents), lambda: scoring.scores(vectors), service.client)


def best_first(scores: list[float], top_n: int | None) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: -scores[i])[: top_n or None]


async def rank_answer(
    body: RerankRequest, documents: list[str], scoring: Scoring, service: Service, id: str
) -> list[TextRank]:
    scores = await scores_of(body, scoring, service, id)
    shown = body.return_text or body.return_documents
    return [TextRank(i, scores[i], documents[i] if shown else UNSET) for i in best_first(scores, body.top_n)]


async def score_answer(body: ScoreRequest, scoring: Scoring, service: Service, id: str) -> ScoreList:
    scores = await scores_of(body, scoring, service, id)
    data = [Score(i, value) for i, value in enumerate(scores)]
    return ScoreList(id=id, model=service.model, data=data, usage=pooling.usage_of(scoring.texts))


async def rerank_answer(
    body: RerankRequest, documents: list[str], scoring: Scoring, service: Service, id: str
) -> RerankList:
    scores = await scores_of(body, scoring, service, id)
    best = best_first(scores, body.top_n)
    shown = body.return_documents is not False
    results = [Ranked(i, scores[i], Document(documents[i]) if shown else UNSET) for i in best]
    return RerankList(id, service.model, pooling.usage_of(scoring.texts), results)
