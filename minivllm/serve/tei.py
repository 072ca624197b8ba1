"""The endpoints of TEI, Hugging Face's text-embeddings-inference: /embed, /similarity and /info. Its /rerank is in
rerank.py.

An answer is a bare list, in the order of the request.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import minivllm
from minivllm.engine.pooling import paired
from minivllm.pooling.task import CLASSIFY, EMBED
from minivllm.pooling.text import Text
from minivllm.request import PoolingParams
from minivllm.serve import embeddings, errors, pooling, rerank
from minivllm.serve.bodies import taken
from minivllm.serve.connection import JSONAnswer, reply
from minivllm.serve.generation import Service, new_id
from minivllm.serve.off_loop import by_size
from minivllm.serve.pooling import TEI_NAMES, PoolingBody, TruncationDirection
from minivllm.serve.protocol import Positive, RequestBody, doc

Truncate = Annotated[bool | None, doc("Cut texts that the model cannot take whole; null: a 400.")]
PromptName = Annotated[str | None, doc("Which of the model's prompts to put before each text; null: its default.")]


class TruncateAt(RequestBody, kw_only=True):
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None


class TextsToEmbed(TruncateAt, kw_only=True):
    inputs: Annotated[str | list[str | int | list[int]], doc("A text, texts, token ids, or lists of token ids.")]
    normalize: Annotated[bool | None, doc("At unit length; null: true.")] = None
    dimensions: Annotated[Positive | None, doc("Only so many numbers.")] = None
    prompt_name: PromptName = None


class SimilarityInputs(RequestBody):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(TruncateAt, kw_only=True):
    prompt_name: PromptName = None


class SimilarityRequest(RequestBody):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class ModelInfo(Struct, kw_only=True):
    model_id: str
    model_sha: None = None
    model_dtype: str
    model_type: dict[str, Any]
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    max_concurrent_requests: int | None
    auto_truncate: bool = False
    version: str


async def embed(request: Request) -> ASGIApp:
    body, service = await taken(request, TextsToEmbed), pooling.service_for(request)
    asks = embeddings.EmbeddingRequest(input=body.inputs, dimensions=body.dimensions, **cut_of(body))
    with errors.renaming({**TEI_NAMES, "input": "inputs"}):
        texts = await embeddings.texts_of(asks, service, body.prompt_name)
    return JSONAnswer(vectors(service, texts, body, id := new_id("embd")), id)


def cut_of(body: TruncateAt) -> dict[str, Any]:
    """As fields of PoolingBody."""
    limit = -1 if body.truncate else None
    return {"truncate_prompt_tokens": limit, "truncation_side": pooling.side_of(body.truncation_direction)}


async def vectors(service: Service, texts: list[Text], body: TextsToEmbed, id: str) -> list[list[float]]:
    asked = PoolingParams(dimensions=body.dimensions, use_activation=body.normalize is not False)
    vectors = await pooling.run(service, texts, id, asked)
    return await by_size(sum(map(len, vectors)), lambda: [vector.tolist() for vector in vectors], service.client)


async def similarity(request: Request) -> ASGIApp:
    body, service = await taken(request, SimilarityRequest), pooling.service_for(request)
    asks = PoolingBody(**cut_of(body.parameters or SimilarityParameters()))
    with errors.renaming({**TEI_NAMES, "query": "inputs.source_sentence", "documents": "inputs.sentences"}):
        pairs = paired(body.inputs.source_sentence, body.inputs.sentences)
        name = body.parameters.prompt_name if body.parameters else None
        scoring = await rerank.scoring_of(asks, pairs, service, name)
    return JSONAnswer(rerank.scores_of(asks, scoring, service, id := new_id("score")), id)


async def info(request: Request) -> Response:
    service = request.app.state.service
    engine, limits = service.engine, service.engine.config.scheduler
    chosen = {decision.field: str(decision.value) for decision in engine.decisions}
    kind = {"reranker": {}}
    if engine.task == EMBED:
        kind = {"embedding": {"pooling": chosen.get("model.pooling", "")}}
    elif engine.task == CLASSIFY:
        labels = {str(i): label for i, label in enumerate(engine.texts.labels)}
        kind = {"classifier": {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}}
    about = ModelInfo(
        model_id=service.model,
        model_dtype=chosen.get("model.dtype", ""),
        model_type=kind,
        max_input_length=engine.max_model_len,
        max_batch_tokens=limits.max_num_batched_tokens,
        max_batch_requests=limits.max_num_seqs,
        max_client_batch_size=pooling.MAX_INPUTS,
        max_concurrent_requests=service.max_waiting,
        version=minivllm.__version__,
    )
    return reply(about)
