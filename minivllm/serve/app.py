"""The Starlette application. `ENDPOINTS` is the table of all that can be asked; the OpenAPI document is made of it.

A model name that is not served is a 404, every error has OpenAI's shape, and a body over the limit is not read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import minivllm
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.async_pooler import AsyncPooler
from minivllm.engine.metrics import Metrics
from minivllm.serve import (
    chat,
    completions,
    debug,
    embeddings,
    errors,
    live,
    lora,
    messages,
    openapi,
    page,
    pooling,
    protocol,
    responses,
    tokenize,
)
from minivllm.serve import messages_protocol as anthropic
from minivllm.serve import rerank as ranking
from minivllm.serve import responses_protocol as newer
from minivllm.serve.access import CLIENT_TIMEOUT, MAX_BODY_BYTES
from minivllm.serve.connection import EventStream, JSONAnswer, read_body
from minivllm.serve.generation import Service, answer, attach, events
from minivllm.serve.guard import Guard, Keys
from minivllm.serve.rate_limit import RateLimit, RateLimiter
from minivllm.serve.request_log import RequestLog
from minivllm.serve.telemetry import NoTracing, Tracing
from minivllm.serve.tools.parsers import HermesParser, ToolParser


async def chat_completions(request: Request) -> ASGIApp:
    return await generate(request, protocol.ChatRequest, chat.prepare)


async def completions_(request: Request) -> ASGIApp:
    return await generate(request, protocol.CompletionRequest, completions.prepare)


async def generate(request: Request, kind: type[protocol.Sampling], prepare: Callable[..., Awaitable]) -> ASGIApp:
    body = protocol.parse(await read_body(request), kind)
    request.app.state.service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise errors.BadRequest("stream_options needs stream=true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise errors.BadRequest("prompt_logprobs does not go with stream=true", "prompt_logprobs")
    job, shape = await prepare(body, request.app.state.service)
    attach(job, request)
    return EventStream(events(job, shape), job.id) if body.stream else JSONAnswer(answer(job, shape), job.id)


async def list_models(request: Request) -> Response:
    service = request.app.state.service
    cards = [model_card(request, name) for name in service.names]
    return reply(protocol.ModelList(cards + [lora.adapter_card(request, a) for a in service.engine.list_loras()]))


async def get_model(request: Request) -> Response:
    name = request.path_params["model"]
    request.app.state.service.check_model(name)
    return reply(model_card(request, name))


def model_card(request: Request, name: str) -> protocol.ModelCard:
    state = request.app.state
    engine = state.service.engine
    for adapter in engine.list_loras():
        if adapter.name == name:
            return lora.adapter_card(request, adapter)
    root = engine.config.model.path
    return protocol.ModelCard(id=name, created=state.created, root=root, max_model_len=engine.max_model_len)


async def health(request: Request) -> Response:
    engine = request.app.state.service.engine
    working = "degraded" if engine.dead_replicas else "ok"
    status = "dead" if not engine.is_running else "stalled" if engine.stalled else working
    return reply(protocol.Health(status), 200 if status == working else 503)


async def version(request: Request) -> Response:
    return reply(protocol.Version(minivllm.__version__))


async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def document(request: Request) -> Response:
    return reply(openapi.document(request.app.state.endpoints))


def reply(data: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


class Endpoint(NamedTuple):
    method: str
    path: str
    handler: Callable[[Request], Awaitable]
    what: str
    answers: type | None = None  # None: plain text or free JSON
    takes: type | None = None
    streams: type | None = None  # the type of each event, when the request asks for a stream
    tasks: tuple[str, ...] = ()  # of the engine (model.task) that it needs; (): any


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        protocol.ChatCompletion,
        protocol.ChatRequest,
        protocol.ChatChunk,
        ("generate",),
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions_,
        "Continue a text",
        protocol.Completion,
        protocol.CompletionRequest,
        protocol.Completion,
        ("generate",),
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses.responses,
        "Answer a text or conversation: OpenAI's newer API",
        newer.ResponseObject,
        newer.ResponsesRequest,
        newer.ResponseEvent,
        ("generate",),
    ),
    Endpoint(
        "POST",
        "/v1/messages",
        messages.messages,
        "Answer a conversation: Anthropic's API",
        anthropic.MessageAnswer,
        anthropic.MessagesRequest,
        anthropic.MessageEvent,
        ("generate",),
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        "How long the prompt of such a conversation is",
        anthropic.InputTokens,
        anthropic.CountTokensRequest,
        tasks=("generate",),
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.embeddings,
        "The vectors of texts",
        embeddings.EmbeddingList,
        embeddings.EmbeddingRequest,
        tasks=("embed",),
    ),
    *(
        Endpoint("POST", path, handler, what, answers, takes, tasks=pooling.POOLS)
        for path, handler, what, answers, takes in (
            ("/score", ranking.score, "How like two texts are: vLLM's", ranking.ScoreList, ranking.ScoreRequest),
            ("/v1/score", ranking.v1_score, "The same as /score", ranking.ScoreList, ranking.ScoreRequest),
            ("/rerank", ranking.rerank, "Order documents by a query", ranking.RerankList, ranking.RerankRequest),
            ("/v1/rerank", ranking.v1_rerank, "The same as /rerank", ranking.RerankList, ranking.RerankRequest),
        )
    ),
    Endpoint("GET", "/v1/models", list_models, "The names that `model` may have", protocol.ModelList),
    Endpoint("GET", "/v1/models/{model:path}", get_model, "One model", protocol.ModelCard),
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        lora.load_lora_adapter,
        "Load a LoRA adapter, if the server has a --lora-dir",
        protocol.ModelCard,
        protocol.LoadAdapter,
        tasks=("generate",),
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        lora.unload_lora_adapter,
        "Forget a LoRA adapter; requests that live go on",
        protocol.ModelDeleted,
        protocol.UnloadAdapter,
        tasks=("generate",),
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        "The tokens of a text or conversation",
        tokenize.Tokens,
        tokenize.Tokenize,
    ),
    Endpoint("POST", "/detokenize", tokenize.detokenize, "The text of tokens", tokenize.Text, tokenize.Detokenize),
    Endpoint("GET", "/health", health, "200 while the engine or a replica runs, 503 if a step hangs", protocol.Health),
    Endpoint("GET", "/version", version, "The server's version", protocol.Version),
    Endpoint("GET", "/metrics", metrics, "Prometheus metrics"),
    Endpoint("GET", "/openapi.json", document, "This document"),
)

PAGE_ENDPOINTS = (
    Endpoint(
        "GET",
        "/debug/live",
        live.live,
        "The engine as it runs: an event of each replica about four times a second, while there is news; ?replica=1",
        streams=live.LiveEvent,
        tasks=("generate",),
    ),
)
DEBUG_ENDPOINTS = (
    Endpoint("GET", "/debug/trace", debug.trace, "The last steps, as a Chrome trace: ?steps=100"),
    Endpoint(
        "GET",
        "/debug/process",
        debug.process,
        "What the server's process holds: memory, files, tasks, requests",
        debug.ProcessState,
        tasks=("generate",),
    ),
)


def create_app(
    engine: AsyncLLM | AsyncPooler,
    metrics: Metrics,
    model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    tool_parser: type[ToolParser] | None = HermesParser,
    lora_dirs: Sequence[Path] = (),
    cors_origins: Sequence[str] = (),
    max_waiting: int | None = None,
    debug_endpoints: bool = False,
    rate_limit: RateLimit | None = None,
    isolate_keys: bool = True,
    client_timeout: float = CLIENT_TIMEOUT,
    with_page: bool = True,
    secret: bytes | None = None,
    tracing: Tracing | NoTracing | None = None,
    place: live.Place = live.ALONE,
) -> Starlette:
    """`metrics` watches `engine` from now on. The app closes the engine when it shuts down.

    lora_dirs: clients may load LoRA adapters from below these folders; none: they may not load or unload any.
    cors_origins: whose pages may use the server from a browser. max_waiting: see Service.admit; None: no limit.
    rate_limit: of each API key, or of each address. isolate_keys: no key finds another's prompts cached; secret: of all
    servers of one engine, which keeps keys apart in its cache (guard.Keys).
    client_timeout: seconds that a client may take to send a request, or leave an answer unread (serve/patience.py).
    debug_endpoints: with those below /debug, which show what the engine does for whom. with_page: the page at /, and
    /debug/live, where it reads what the engine does. tracing: where a span for each request goes; None: nowhere.
    place: which of several servers of the engine it is.
    """
    endpoints = ENDPOINTS + PAGE_ENDPOINTS * with_page + DEBUG_ENDPOINTS * debug_endpoints
    tracing = tracing or NoTracing()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.closing = asyncio.get_running_loop().create_future()
        yield
        await engine.shutdown()
        await asyncio.to_thread(tracing.close)

    routes = [Route(e.path, pooling.served_by(engine.task, e), methods=[e.method]) for e in endpoints]
    app = Starlette(
        routes=routes + page.routes() * with_page,
        exception_handlers=errors.HANDLERS,
        lifespan=lifespan,
    )
    paths = {route.endpoint: route.path for route in app.routes}
    app.state.keys = keys = Keys(api_keys, isolate_keys, secret)
    app.state.limiter = limiter = RateLimiter(rate_limit) if rate_limit else None
    app.add_middleware(Guard, keys=keys, metrics=metrics, paths=paths, limiter=limiter)
    if cors_origins:  # around the guard: a browser's preflight has no key, and may read a 401
        headers = ["x-request-id", "retry-after"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=headers,
        )
    app.add_middleware(RequestLog)
    metrics.stats = engine.stats
    engine.watchers.append(metrics)
    if isinstance(tracing, Tracing):
        engine.watchers.append(tracing)
    app.state.service = Service(engine, metrics, list(model_names), tool_parser, max_waiting, tracing)
    app.state.lora_dirs = [folder.resolve() for folder in lora_dirs]
    app.state.max_body_bytes = max_body_bytes
    app.state.client_timeout = client_timeout
    app.state.endpoints = endpoints
    app.state.switched_off = () if debug_endpoints else tuple(e.path for e in DEBUG_ENDPOINTS)
    app.state.place = place
    app.state.viewers = set()  # of /debug/live
    app.state.created = int(time.time())
    return app
