"""/classify, vLLM's, and /predict, TEI's (Hugging Face's text-embeddings-inference): which class a text is of, or of a
pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.errors import BadRequest
from minivllm.pooling.text import Text
from minivllm.request import PoolingParams
from minivllm.serve import errors, pooling
from minivllm.serve.bodies import taken
from minivllm.serve.connection import JSONAnswer
from minivllm.serve.generation import Service, new_id
from minivllm.serve.off_loop import by_size
from minivllm.serve.pooling import TEI_NAMES, PoolingUsage, TextsBody
from minivllm.serve.protocol import doc, now
from minivllm.serve.tei import TruncateAt, cut_of

if TYPE_CHECKING:
    import numpy as np


class ClassificationRequest(TextsBody, kw_only=True):
    """vLLM's."""


class Classification(Struct):
    index: int
    label: str
    probs: Annotated[list[float], doc("Of each class, by its number; logits for use_activation=false.")]
    num_classes: int


class ClassificationList(Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int = msgspec.field(default_factory=now)
    model: str
    data: list[Classification]
    usage: PoolingUsage


class PredictRequest(TruncateAt, kw_only=True):
    inputs: Annotated[
        str | list[str | list[str]],
        doc("A text; [a text] or [a text, another], as one pair; or a list of such lists, for an answer each."),
    ]
    raw_scores: Annotated[bool | None, doc("Logits, before a softmax or sigmoid; null: false.")] = None


class Prediction(Struct):
    score: float
    label: str


async def classify(request: Request) -> ASGIApp:
    body, service = await taken(request, ClassificationRequest), pooling.service_for(request)
    service.check_model(body.model)
    texts = await pooling.texts_of(body, service)
    return JSONAnswer(answer(body, service, texts, id := new_id("classify")), id)


async def answer(body: ClassificationRequest, service: Service, texts: list[Text], id: str) -> ClassificationList:
    found, label_of = await pooling.run(service, texts, id, body.asked()), service.engine.texts.label_of

    def made() -> list[Classification]:
        return [Classification(i, label_of(probs), probs.tolist(), len(probs)) for i, probs in enumerate(found)]

    data = await by_size(sum(map(len, found)), made, service.client)
    return ClassificationList(id=id, model=service.model, data=data, usage=pooling.usage_of(texts))


async def predict(request: Request) -> ASGIApp:
    body, service = await taken(request, PredictRequest), pooling.service_for(request)
    inputs, is_batch = inputs_of(body.inputs)
    pooling.check_number(inputs, "inputs")
    engine, cut = service.engine.texts, pooling.PoolingBody(**cut_of(body)).cut

    def tokenised() -> list[Text]:
        return [engine.text(*own, cut, "inputs") if len(own) == 1 else engine.pair(*own, cut) for own in inputs]

    with errors.renaming({**TEI_NAMES, "query": "inputs", "documents": "inputs"}):
        texts = await by_size(sum(map(pooling.length_of, inputs)), tokenised, service.client)
    return JSONAnswer(predictions(body, service, texts, is_batch, id := new_id("predict")), id)


def inputs_of(given: str | list[str | list[str]]) -> tuple[list[list[str]], bool]:
    """Texts and pairs, and whether they were a list of them. Raises BadRequest."""
    if isinstance(given, str):
        return [[given]], False
    is_batch = not all(isinstance(each, str) for each in given)
    inputs = given if is_batch else [given]
    if not given or not all(isinstance(own, list) and len(own) in (1, 2) for own in inputs):
        raise BadRequest("inputs is a text, [a text], [a text, another], or a list of such lists", "inputs")
    return inputs, is_batch


async def predictions(
    body: PredictRequest, service: Service, texts: list[Text], is_batch: bool, id: str
) -> list[Prediction] | list[list[Prediction]]:
    """Likeliest first."""
    found = await pooling.run(service, texts, id, PoolingParams(use_activation=False if body.raw_scores else None))
    labels = service.engine.texts.labels
    made = await by_size(sum(map(len, found)), lambda: [ranked(probs, labels) for probs in found], service.client)
    return made if is_batch else made[0]


def ranked(probs: np.ndarray, labels: Sequence[str]) -> list[Prediction]:
    made = [Prediction(score, label) for score, label in zip(probs.tolist(), labels, strict=True)]
    return sorted(made, key=lambda each: -each.score)
