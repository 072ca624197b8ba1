"""The Starlette application. `ENDPOINTS` is the table of all that can be asked; the OpenAPI document is made of it.

A model name that is not served is a 404, every error has OpenAI's shape, and a body over the limit is not read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import minivllm
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.serve import (
    anthropic_models,
    chat,
    cohere,
    completions,
    debug,
    embeddings,
    errors,
    invocations,
    live,
    llama_cpp,
    lora,
    messages,
    ollama,
    ollama_models,
    openapi,
    page,
    pooling,
    protocol,
    refusals,
    responses_stored,
    tei,
    tokenize,
    transcriptions,
    vllm_pooling,
)
from minivllm.serve import classify as classification
from minivllm.serve import llama_cpp_protocol as llamas
from minivllm.serve import messages_protocol as anthropic
from minivllm.serve import ollama_protocol as ollamas
from minivllm.serve import rerank as ranking
from minivllm.serve import responses_protocol as newer
from minivllm.serve.access import CLIENT_TIMEOUT, MAX_BODY_BYTES
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.browsers import Browsers
from minivllm.serve.connection import EventStream, JSONAnswer, reply
from minivllm.serve.connections import ConnectionLimits
from minivllm.serve.control_tokens import CONTROL_TOKENS
from minivllm.serve.deadline import Deadlines
from minivllm.serve.endpoint import KEPT, LOOK, PING, RUN, WORK, Endpoint, counted
from minivllm.serve.forms import FORM
from minivllm.serve.generation import Service, answer, attach, events
from minivllm.serve.guard import Guard
from minivllm.serve.keys import KeyFile, Keys
from minivllm.serve.ledger import Ledger, OwnLedger
from minivllm.serve.limits import HEADERS, Limits
from minivllm.serve.memory import MOST_BODIES
from minivllm.serve.proxies import Forwarded, TrustedProxies
from minivllm.serve.rate_limit import RateLimit, RateLimiter
from minivllm.serve.reasoning.reader import ReasoningReader
from minivllm.serve.request_limits import RequestLimits
from minivllm.serve.request_log import RequestLog
from minivllm.serve.response_shelf import NoShelf, Shelf
from minivllm.serve.response_store import ResponseStore
from minivllm.serve.roles import reserved
from minivllm.serve.root_path import RootPath
from minivllm.serve.telemetry import NoTracing, Tracing
from minivllm.serve.timings import Timings
from minivllm.serve.tools.formats.hermes import HermesParser
from minivllm.serve.tools.parsers import ToolParser


async def chat_completions(request: Request) -> ASGIApp:
    return await generate(request, protocol.ChatRequest, chat.prepare)


async def completions_(request: Request) -> ASGIApp:
    return await generate(request, protocol.CompletionRequest, completions.prepare)


async def generate(request: Request, kind: type[protocol.Sampling], prepare: Callable[..., Any]) -> ASGIApp:
    body = await taken(request, kind)
    request.app.state.service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise errors.BadRequest("stream_options needs stream=true", "stream_options")
    if request.app.state.tokens_as_ids and body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = True
    if body.stream and request.app.state.force_usage:
        body.stream_options = protocol.StreamOptions(include_usage=True, continuous_usage_stats=True)
    if body.prompt_logprobs is not None and body.stream:
        raise errors.BadRequest("prompt_logprobs does not go with stream=true", "prompt_logprobs")
    job, shape = await worked_out(request, lambda: prepare(body, request.app.state.service))
    attach(job, request)
    return EventStream(events(job, shape), job.id) if body.stream else JSONAnswer(answer(job, shape), job.id)


async def list_models(request: Request) -> Response:
    if anthropic_models.wants(request):
        return reply(anthropic_models.listing(request))
    service = request.app.state.service
    cards = [model_card(request, name) for name in service.names]
    return reply(protocol.ModelList(cards + [lora.adapter_card(request, a) for a in service.engine.list_loras()]))


async def get_model(request: Request) -> Response:
    name = request.path_params["model"]
    request.app.state.service.check_model(name)
    if anthropic_models.wants(request):
        return reply(anthropic_models.card(request, name))
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


async def ping(request: Request) -> Response:
    return await health(request)


async def post_ping(request: Request) -> Response:
    return await health(request)


async def load(request: Request) -> Response:
    return reply(protocol.Load(request.app.state.service.num_open))


async def version(request: Request) -> Response:
    return reply(protocol.Version(minivllm.__version__))


async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def document(request: Request) -> Response:
    return Response(request.app.state.document, media_type="application/json")


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
        cost=RUN,
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
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses_stored.responses,
        "Answer a text or conversation: OpenAI's newer API",
        newer.ResponseObject,
        newer.ResponsesRequest,
        newer.ResponseEvent,
        ("generate",),
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        responses_stored.input_tokens,
        "How long the prompt of such a request is",
        newer.InputTokenCount,
        newer.InputTokensRequest,
        tasks=("generate",),
        cost=WORK,
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}",
        responses_stored.retrieve,
        "A response that is kept",
        newer.ResponseObject,
        streams=newer.ResponseEvent,
        tasks=("generate",),
        asks=newer.RetrieveQuery,
        cost=KEPT,
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{response_id}",
        responses_stored.delete,
        "Forget a response",
        newer.ResponseDeleted,
        tasks=("generate",),
        cost=KEPT,
    ),
    Endpoint(
        "POST",
        "/v1/responses/{response_id}/cancel",
        responses_stored.cancel,
        "Stop a response with background=true",
        newer.ResponseObject,
        tasks=("generate",),
        cost=KEPT,
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        responses_stored.input_items,
        "What a response answers: the items of its conversation",
        newer.ItemList,
        tasks=("generate",),
        asks=newer.InputItemsQuery,
        cost=KEPT,
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
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        "How long the prompt of such a conversation is",
        anthropic.InputTokens,
        anthropic.CountTokensRequest,
        tasks=("generate",),
        cost=WORK,
    ),
    *(
        Endpoint(
            "POST",
            f"/v1/audio/{handler.__name__}",
            handler,
            what,
            transcriptions.Transcription,
            transcriptions.SpeechRequest,
            transcriptions.TranscriptEvent,
            ("generate",),
            takes_type=FORM,
            cost=RUN,
        )
        for handler, what in (
            (transcriptions.transcriptions, "What is said in a recording, in its language"),
            (transcriptions.translations, "What is said in a recording, in English"),
        )
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.embeddings,
        "The vectors of texts",
        embeddings.EmbeddingList,
        embeddings.EmbeddingRequest,
        tasks=("embed",),
        cost=RUN,
    ),
    *(
        Endpoint("POST", path, handler, what, answers, takes, tasks=pooling.POOLS, cost=RUN)
        for path, handler, what, answers, takes in (
            ("/score", ranking.score, "How like two texts are: vLLM's", ranking.ScoreList, ranking.ScoreRequest),
            ("/v1/score", ranking.v1_score, "The same as /score", ranking.ScoreList, ranking.ScoreRequest),
            ("/rerank", ranking.rerank, "Order documents by a query", ranking.Reranked, ranking.RerankRequest),
            ("/v1/rerank", ranking.v1_rerank, "The same as /rerank", ranking.Reranked, ranking.RerankRequest),
            (
                "/v2/rerank",
                ranking.v2_rerank,
                "The same as /rerank: Cohere's",
                ranking.Reranked,
                ranking.RerankRequest,
            ),
            (
                "/reranking",
                ranking.reranking,
                "The same as /rerank: llama.cpp's",
                ranking.Reranked,
                ranking.RerankRequest,
            ),
            ("/v1/reranking", ranking.v1_reranking, "The same as /rerank", ranking.Reranked, ranking.RerankRequest),
        )
    ),
    *(
        Endpoint("POST", path, handler, what, answers, takes, tasks=("embed",), cost=RUN)
        for path, handler, what, answers, takes in (
            (
                "/v2/embed",
                cohere.v2_embed,
                "The vectors of texts: Cohere's",
                cohere.CohereEmbeddings,
                cohere.CohereEmbedRequest,
            ),
            (
                "/pooling",
                vllm_pooling.pooling_,
                "The vectors of texts: vLLM's",
                vllm_pooling.PoolingList,
                vllm_pooling.PoolingRequest,
            ),
            ("/embed", tei.embed, "The vectors of texts: TEI's", list[list[float]], tei.TextsToEmbed),
            ("/similarity", tei.similarity, "How like texts are to one: TEI's", list[float], tei.SimilarityRequest),
        )
    ),
    Endpoint(
        "POST",
        "/classify",
        classification.classify,
        "Which class texts are of: vLLM's",
        classification.ClassificationList,
        classification.ClassificationRequest,
        tasks=pooling.CLASSIFIES,
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/predict",
        classification.predict,
        "Which class texts, or pairs, are of: TEI's",
        list[classification.Prediction] | list[list[classification.Prediction]],
        classification.PredictRequest,
        tasks=pooling.CLASSIFIES,
        cost=RUN,
    ),
    Endpoint(
        "GET",
        "/info",
        tei.info,
        "What the model is: TEI's",
        tei.ModelInfo,
        tasks=(*pooling.POOLS, pooling.CLASSIFY),
        cost=LOOK,
    ),
    Endpoint("GET", "/tokenizer_info", tokenize.tokenizer_info, "The tokenizer's configuration: vLLM's", cost=LOOK),
    Endpoint(
        "GET",
        "/v1/models",
        list_models,
        "The names that `model` may have; to Anthropic's client as its own",
        protocol.ModelList,
        cost=LOOK,
    ),
    Endpoint("GET", "/v1/models/{model:path}", get_model, "One model", protocol.ModelCard, cost=LOOK),
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        lora.load_lora_adapter,
        "Load a LoRA adapter, if the server has a --lora-dir",
        protocol.ModelCard,
        protocol.LoadAdapter,
        tasks=("generate",),
        role="admin",
        cost=WORK,
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        lora.unload_lora_adapter,
        "Forget a LoRA adapter; requests that live go on",
        protocol.ModelDeleted,
        protocol.UnloadAdapter,
        tasks=("generate",),
        role="admin",
        cost=WORK,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        "The tokens of a text or conversation",
        tokenize.Tokens | tokenize.LlamaTokens,
        tokenize.Tokenize,
        cost=WORK,
    ),
    Endpoint(
        "POST", "/detokenize", tokenize.detokenize, "The text of tokens", tokenize.Text, tokenize.Detokenize, cost=WORK
    ),
    *(
        Endpoint("POST", path, handler, what, answers, takes, answers, ("generate",), "application/x-ndjson", cost=RUN)
        for path, handler, what, answers, takes in (
            (
                "/api/chat",
                ollama.api_chat,
                "Answer a conversation: Ollama's",
                ollamas.OllamaChatAnswer,
                ollamas.OllamaChatRequest,
            ),
            (
                "/api/generate",
                ollama.api_generate,
                "Answer or continue a text: Ollama's",
                ollamas.OllamaGenerateAnswer,
                ollamas.OllamaGenerateRequest,
            ),
        )
    ),
    Endpoint("GET", "/api/tags", ollama_models.api_tags, "The models: Ollama's", ollamas.OllamaModelList, cost=LOOK),
    Endpoint(
        "GET",
        "/api/ps",
        ollama_models.api_ps,
        "The models that are loaded: Ollama's",
        ollamas.OllamaRunningList,
        cost=LOOK,
    ),
    Endpoint(
        "GET", "/api/version", ollama_models.api_version, "The same as /version: Ollama's", protocol.Version, cost=LOOK
    ),
    Endpoint(
        "POST",
        "/api/show",
        ollama_models.api_show,
        "What a model is and can: Ollama's",
        ollamas.OllamaShown,
        ollamas.OllamaShowRequest,
        cost=WORK,
    ),
    Endpoint(
        "POST",
        "/api/embed",
        ollama_models.api_embed,
        "The vectors of texts, at unit length: Ollama's",
        ollamas.OllamaEmbeddings,
        ollamas.OllamaEmbedRequest,
        tasks=("embed",),
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        ollama_models.api_embeddings,
        "The vector of one text: Ollama's older form",
        ollamas.OllamaEmbedding,
        ollamas.OllamaEmbeddingRequest,
        tasks=("embed",),
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/completion",
        llama_cpp.completion,
        "Continue a text: llama.cpp's",
        llamas.LlamaAnswer,
        llamas.LlamaCompletionRequest,
        llamas.LlamaChunk,
        ("generate",),
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/infill",
        llama_cpp.infill,
        "Fill in what stands between two texts: llama.cpp's",
        llamas.LlamaAnswer,
        llamas.InfillRequest,
        llamas.LlamaChunk,
        ("generate",),
        cost=RUN,
    ),
    Endpoint(
        "POST",
        "/apply-template",
        llama_cpp.apply_template,
        "The prompt that a conversation becomes: llama.cpp's",
        llamas.Templated,
        llamas.TemplateRequest,
        tasks=("generate",),
        cost=WORK,
    ),
    Endpoint(
        "GET",
        "/props",
        llama_cpp.props,
        "What the server is: llama.cpp's",
        llamas.LlamaProps,
        tasks=("generate",),
        cost=LOOK,
    ),
    Endpoint("GET", "/slots", llama_cpp.slots, "How many sequences run: llama.cpp's", tasks=("generate",), cost=LOOK),
    Endpoint(
        "GET",
        "/health",
        health,
        "200 while the engine or a replica runs, 503 if a step hangs",
        protocol.Health,
        cost=LOOK,
        role="anyone",
    ),
    Endpoint("GET", "/ping", ping, "The same as /health: SageMaker's", protocol.Health, cost=LOOK, role="anyone"),
    Endpoint("POST", "/ping", post_ping, "The same as GET /ping: vLLM's", protocol.Health, cost=PING),
    Endpoint("POST", "/invocations", invocations.invocations, "What the body's fields are for: SageMaker's", cost=RUN),
    Endpoint(
        "GET", "/load", load, "How many sequences the server works on: vLLM's", protocol.Load, role="metrics", cost=LOOK
    ),
    Endpoint("GET", "/version", version, "The server's version", protocol.Version, cost=LOOK, role="anyone"),
    Endpoint("GET", "/metrics", metrics, "Prometheus metrics", role="metrics", cost=LOOK),
    Endpoint("GET", "/openapi.json", document, "This document", cost=LOOK, role="anyone"),
)

PAGE_ENDPOINTS = (
    Endpoint(
        "GET",
        "/debug/live",
        live.live,
        "The engine as it runs: an event of each replica about four times a second, while there is news; ?replica=1",
        streams=live.LiveEvent,
        cost=LOOK,
    ),
)
DEBUG_ENDPOINTS = (
    Endpoint(
        "GET", "/debug/trace", debug.trace, "The last steps, as a Chrome trace: ?steps=100", role="admin", cost=KEPT
    ),
    Endpoint(
        "GET",
        "/debug/process",
        debug.process,
        "What the server's process holds: memory, files, tasks, requests",
        debug.ProcessState,
        role="admin",
        cost=LOOK,
    ),
)


class Versioned:
    """Clients whose base URL lacks /v1 find the same endpoints. Around the guard, which asks for keys by path."""

    def __init__(self, app: ASGIApp, without: Set[str]):
        """without: paths of /v1's endpoints less their beginning."""
        self.app, self.without = app, without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self.without:
            scope = {**scope, "path": f"/v1{scope['path']}"}
        await self.app(scope, receive, send)


def create_app(
    engine: AsyncLLM,
    metrics: Metrics,
    model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    tool_parser: type[ToolParser] | None = HermesParser,
    reasoning_parser: type[ReasoningReader] | None = None,
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
    refuse_unknown: bool = False,
    root_path: str = "",
    force_usage: bool = False,
    tells_timings: bool = False,
    tokens_as_ids: bool = False,
    trust_templates: bool = False,
    control_tokens: str = "tokens",
    takes_embeds: bool = False,
    response_store: ResponseStore | None = None,
    request_limits: RequestLimits | None = None,
    token_limit: RateLimit | None = None,
    sequence_limit: int | None = None,
    deadlines: Deadlines | None = None,
    key_file: KeyFile | None = None,
    host_names: Set[str] | None = None,
    proxies: TrustedProxies | None = None,
    connection_limits: ConnectionLimits | None = None,
    ledger: Ledger | None = None,
) -> Starlette:
    """`metrics` watches `engine` from now on. The app closes the engine when it shuts down.

    lora_dirs: clients may load LoRA adapters from below these folders; none: they may not load or unload any.
    key_file: of more keys. cors_origins: whose pages may use the server from a browser. max_waiting: see Service.admit;
    None: no limit.
    rate_limit, token_limit, sequence_limit: of each API key, or of each address (serve/limits.py). isolate_keys: no key
    finds another's prompts cached; secret: of all servers of one engine, which keeps keys apart in its cache
    (keys.Keys).
    deadlines: how long a request may take; None: as long as it says. client_timeout: seconds that a client may take to
    send a request, or leave an answer unread (serve/patience.py).
    debug_endpoints: with those below /debug, which show what the engine does for whom. with_page: the page at /, and
    /debug/live, where it reads what the engine does. tracing: where a span for each request goes; None: nowhere.
    place: which of several servers of the engine it is. refuse_unknown: a field that an endpoint does not have is a
    400, and not taken and named as ignored. response_store: what keeps /v1/responses; the app closes it when it shuts
    down. None: nothing is kept.
    root_path: that a proxy serves the app below. force_usage: every chunk of a stream holds the usage.
    tells_timings: answers hold how long they took (serve/timings.py).
    tokens_as_ids: log-probabilities call a token by its id, unless a request says otherwise.
    control_tokens: what becomes of them in a client's words (serve/control_tokens.py); raises ModelError.
    trust_templates: a request may bring its own chat template. takes_embeds: and a prompt as vectors.
    request_limits: of what one request may cost (serve/price.py).
    host_names: what the server may be called, of
    hosts.names; None: anything. proxies: who may say for whom they ask; None: nobody.
    connection_limits: which serve/server.py keeps. ledger: what clients hold; None: of this app alone.
    """
    endpoints = ENDPOINTS + PAGE_ENDPOINTS * with_page + DEBUG_ENDPOINTS * debug_endpoints
    tracing = tracing or NoTracing()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.closing = asyncio.get_running_loop().create_future()
        yield
        await app.state.shelf.close()
        await engine.shutdown()
        await asyncio.to_thread(tracing.close)

    handlers = [reserved(e.role, counted(e, pooling.served_by(engine.task, e))) for e in endpoints]
    routes = [Route(e.path, handler, methods=[e.method]) for e, handler in zip(endpoints, handlers, strict=True)]
    routes += refusals.routes() + (page.routes() if with_page else [ollama_models.probe()])
    app = Starlette(
        routes=routes,
        exception_handlers=errors.HANDLERS,
        lifespan=lifespan,
    )
    paths = {route.endpoint: route.path for route in routes}
    app.state.keys = keys = Keys(api_keys, isolate_keys, secret, key_file)
    app.state.ledger = ledger = ledger or OwnLedger()
    buckets = (rate_limit, ledger.requests), (token_limit, ledger.tokens)
    limits = Limits(*(RateLimiter(most, buckets=of) if most else None for most, of in buckets), sequence_limit)
    app.state.limits = limits
    app.state.deadlines = deadlines = deadlines or Deadlines()
    around = {"limits": limits, "deadlines": deadlines, "browsers": Browsers(host_names, cors_origins)}
    around |= {"ledger": ledger, "most_bodies": max(MOST_BODIES, 4 * max_body_bytes)}
    app.add_middleware(Guard, keys=keys, metrics=metrics, paths=paths, **around)
    if cors_origins:  # around the guard: a browser's preflight has no key, and may read a 401
        headers = ["x-request-id", "x-minivllm-ignored", "retry-after", *HEADERS]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=headers,
        )
    app.add_middleware(RequestLog)
    app.add_middleware(Versioned, {e.path.removeprefix("/v1") for e in endpoints} - {e.path for e in endpoints})
    if root_path:
        app.add_middleware(RootPath, prefix=root_path)
    app.state.proxies = proxies = proxies or TrustedProxies()
    if proxies:
        app.add_middleware(Forwarded, proxies=proxies)
    metrics.stats = engine.stats
    engine.watchers.append(metrics)
    parsers = tool_parser, reasoning_parser
    app.state.service = Service(
        engine,
        metrics,
        list(model_names),
        *parsers,
        max_waiting,
        tracing,
        control_tokens=CONTROL_TOKENS.get(control_tokens)(engine.tokenizer),
        trust_templates=trust_templates,
        takes_embeds=takes_embeds,
        ledger=ledger,
        limits=limits,
    )
    app.state.shelf = Shelf(response_store) if response_store else NoShelf()
    if tells_timings:
        app.state.service.timings = Timings()
    if request_limits is not None:
        app.state.service.request_limits = request_limits
    app.state.lora_dirs = [folder.resolve() for folder in lora_dirs]
    app.state.max_body_bytes = max_body_bytes
    app.state.client_timeout = client_timeout
    app.state.connection_limits = connection_limits or ConnectionLimits()
    app.state.refuse_unknown = refuse_unknown
    app.state.force_usage = force_usage
    app.state.tokens_as_ids = tokens_as_ids
    app.state.document = openapi.encoded(endpoints, root_path)
    app.state.switched_off = () if debug_endpoints else tuple(e.path for e in DEBUG_ENDPOINTS)
    app.state.place = place
    app.state.viewers = set()  # of /debug/live
    app.state.created = int(time.time())
    return app
