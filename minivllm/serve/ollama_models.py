"""What Ollama's clients ask about models: which there are, what they are, their vectors.

Ollama's names have a tag, so a name without one is shown as "name:latest".
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import minivllm
from minivllm.errors import BadRequest
from minivllm.pooling.task import EMBED, GENERATE
from minivllm.serve import embeddings, errors, pooling, protocol
from minivllm.serve.bodies import taken
from minivllm.serve.connection import JSONAnswer, reply
from minivllm.serve.generation import Service, new_id
from minivllm.serve.infill import infill_of
from minivllm.serve.off_loop import by_size
from minivllm.serve.ollama import LATEST, known_name, nanoseconds
from minivllm.serve.ollama_protocol import (
    OllamaDetails,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaModel,
    OllamaModelList,
    OllamaRunning,
    OllamaRunningList,
    OllamaShown,
    OllamaShowRequest,
    as_utc,
)

NEVER = 100 * 365 * 24 * 3600.0  # seconds until a model is unloaded: there is no such time
FAMILY = "minivllm"  # Ollama's clients look for "<family>.context_length"


async def api_tags(request: Request) -> Response:
    models = [
        OllamaModel(name=name, model=name, modified_at=as_utc(request.app.state.created), **about(request))
        for name in tagged_names(request.app.state.service)
    ]
    return reply(OllamaModelList(models))


async def api_ps(request: Request) -> Response:
    service, until = request.app.state.service, as_utc(request.app.state.created + NEVER)
    length = service.engine.max_model_len
    models = [
        OllamaRunning(name=name, model=name, expires_at=until, context_length=length, **about(request))
        for name in tagged_names(service)
    ]
    return reply(OllamaRunningList(models))


async def api_version(request: Request) -> Response:
    return reply(protocol.Version(minivllm.__version__))


async def api_show(request: Request) -> Response:
    body, service = await taken(request, OllamaShowRequest), request.app.state.service
    name = known_name(body.model or body.name, service) or service.model
    engine = service.engine
    info = {
        "general.architecture": FAMILY,
        "general.basename": name,
        f"{FAMILY}.context_length": engine.max_model_len,
        f"{FAMILY}.vocab_size": engine.tokenizer.vocab_size,
    }
    shown = OllamaShown(
        details=about(request)["details"],
        model_info=info,
        capabilities=capabilities(service),
        modified_at=as_utc(request.app.state.created),
        template=engine.tokenizer.chat_template or "",
    )
    return reply(shown)


def tagged_names(service: Service) -> list[str]:
    return [name if ":" in name else name + LATEST for name in service.served]


def about(request: Request) -> dict[str, Any]:
    """digest: of what answers depend on, since no file has one here."""
    service = request.app.state.service
    engine = service.engine
    chosen = {decision.field: str(decision.value) for decision in engine.decisions}
    packed = chosen.get("model.quantization", "none")
    details = OllamaDetails(
        format="gguf" if engine.config.model.path.endswith(".gguf") else "safetensors",
        quantization_level=packed if packed != "none" else chosen.get("model.dtype", ""),
    )
    return {"digest": hashlib.sha256(service.fingerprint.encode()).hexdigest(), "details": details}


def capabilities(service: Service) -> list[str]:
    engine = service.engine
    if engine.task != GENERATE:
        return ["embedding"] if engine.task == EMBED else []
    template = engine.tokenizer.chat_template or ""
    able = {
        "completion": True,
        "tools": service.tool_parser is not None,
        "insert": can_fill(service),
        "thinking": "enable_thinking" in template or "reasoning_effort" in template,
    }
    return [name for name, it_is in able.items() if it_is]


def can_fill(service: Service) -> bool:
    try:
        infill_of(service.engine.tokenizer, "suffix")
    except BadRequest:
        return False
    return True


# -------------------------------------------------------------------------------------------------------------- vectors


async def api_embed(request: Request) -> ASGIApp:
    body, service = await taken(request, OllamaEmbedRequest), pooling.service_for(request)
    known_name(body.model, service)
    if not body.input:
        return reply(OllamaEmbeddings(model=body.model or service.model, embeddings=[]))
    asks = as_embedding(body.input, -1 if body.truncate is not False else None, body.dimensions or None)
    texts = await embeddings.texts_of(asks, service)

    id = new_id("embd")

    async def answer() -> OllamaEmbeddings:
        import numpy as np  # a server that generates never needs it here

        begin = time.monotonic()
        made = await embeddings.answer(asks, service, texts, id)
        found = [item.embedding for item in made.data]
        vectors = await by_size(
            sum(map(len, found)),
            lambda: [pooling.at_unit_length(np.array(vector)).tolist() for vector in found],
            service.client,
        )
        seconds, num_tokens = time.monotonic() - begin, made.usage.prompt_tokens
        return OllamaEmbeddings(
            model=body.model or service.model,
            embeddings=vectors,
            total_duration=nanoseconds(seconds),
            prompt_eval_count=num_tokens,
        )

    return JSONAnswer(answer(), id)


async def api_embeddings(request: Request) -> ASGIApp:
    body, service = await taken(request, OllamaEmbeddingRequest), pooling.service_for(request)
    known_name(body.model, service)
    if not body.prompt:
        return reply(OllamaEmbedding([]))
    asks = as_embedding(body.prompt, -1, None)
    with errors.renaming({"input": "prompt"}):
        texts = await embeddings.texts_of(asks, service)

    id = new_id("embd")

    async def answer() -> OllamaEmbedding:
        return OllamaEmbedding((await embeddings.answer(asks, service, texts, id)).data[0].embedding)

    return JSONAnswer(answer(), id)


def as_embedding(texts: str | list[str], limit: int | None, dimensions: int | None) -> embeddings.EmbeddingRequest:
    return embeddings.EmbeddingRequest(input=texts, truncate_prompt_tokens=limit, dimensions=dimensions)


def probe() -> Route:
    """Ollama's clients ask HEAD / whether there is a server; where there is no page, there is nothing else at /."""

    async def root(request: Request) -> Response:
        if request.method != "HEAD":
            raise HTTPException(404)
        return Response()

    return Route("/", root, methods=["GET"])
