"""What the endpoints of an engine that pools share, and how a server of the other kind refuses them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.cli import print_table
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.async_pooler import AsyncPooler
from minivllm.engine.frontend import make_config
from minivllm.engine.pooling_core import NOT_FINITE
from minivllm.engine.tokenizer import LONG_TEXT
from minivllm.errors import EngineDead, MinivllmError
from minivllm.pooling.task import EMBED, GENERATE, SCORE, choose_task
from minivllm.pooling.text import Text
from minivllm.serve import errors
from minivllm.serve.generation import Service
from minivllm.serve.protocol import RequestBody, accepted, doc

if TYPE_CHECKING:
    import numpy as np

    from minivllm.serve.app import Endpoint

R = TypeVar("R")

POOLS = (EMBED, SCORE)
DOES = {GENERATE: "generates text", EMBED: "embeds texts", SCORE: "scores pairs of texts"}
HOW_TO_START = {
    GENERATE: "python -m minivllm.serve --model <one that generates>",
    EMBED: "python -m minivllm.serve --model minilm, or --task embed with the model that is served here",
}


class PoolingBody(RequestBody, kw_only=True):
    """The fields that all of these endpoints share."""

    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    user: Annotated[str | None, accepted()] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        doc("vLLM's: leave out the end of texts of more tokens; -1: of more than the model takes. null: a 400."),
    ] = None


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


def start(options: dict[str, Any]) -> AsyncLLM | AsyncPooler:
    """The engine for the model's task; options: AsyncLLM's."""
    given = dict(options)
    config = make_config(given.pop("model", None), given.pop("preset", "v1"), given.pop("overrides", None), given)
    if choose_task(config).value != GENERATE:
        return AsyncPooler(**options)
    return AsyncLLM(**with_core_apart(options))


def with_core_apart(options: dict[str, Any]) -> dict[str, Any]:
    """AsyncLLM's options with a process for the core, unless they say otherwise: beside HTTP and detokenising, each
    step would wait for them (bench/serve_overhead.py)."""
    return options | {"overrides": {"engine.core": "process", **options["overrides"]}}


def served_by(task: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The endpoint's handler; where the engine's task is another, one that says so and keeps the handler's name."""
    if not endpoint.tasks or task in endpoint.tasks:
        return endpoint.handler
    need = endpoint.tasks[0]
    message = (
        f"this server's model {DOES[task]} (task {task}), and {endpoint.path} needs one that {DOES[need]}; start one: "
        f"{HOW_TO_START[need]}"
    )

    async def refuse(_: Request) -> ASGIApp:
        raise errors.ApiError(400, message, code="task_not_served", param="model")

    return refuse


async def in_thread_if_long(size: int, work: Callable[[], R]) -> R:
    """Tokenising long texts would hold up every other request; the tokenizer gives the interpreter's lock back."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


async def run(service: Service, texts: list[Text]) -> list[np.ndarray]:
    """The engine's vectors. Raises ApiError 429 while too many wait, 500 if a text failed."""
    service.admit()
    begin, reason = time.monotonic(), "abort"
    service.num_open += len(texts)
    try:
        vectors = await service.engine.pool(texts)
        reason = "stop"
        return vectors
    except EngineDead:
        reason = "error"
        raise
    except MinivllmError as error:
        reason = "error"
        errors.logger.error("a text failed: %s", error)
        what = str(error) if str(error) == NOT_FINITE else "the engine could not finish this request"
        raise errors.ApiError(500, what, code="internal_error") from None
    finally:
        service.num_open -= len(texts)
        service.metrics.e2e.observe(time.monotonic() - begin, len(texts))
        for text in texts:
            service.metrics.on_request_end(reason)
            service.metrics.prompt.observe(len(text.token_ids))


def usage_of(texts: Sequence[Text]) -> PoolingUsage:
    num_tokens = sum(len(text.token_ids) for text in texts)
    return PoolingUsage(num_tokens, num_tokens)


def report(engine: AsyncPooler, names: Sequence[str], url: str) -> None:
    """What is served and each choice that was made for the user, as `serve` prints it for a model that generates."""
    paths = "/v1/embeddings, /v1/score and /v1/rerank" if engine.task == EMBED else "/v1/score and /v1/rerank"
    rows = [
        ("URL", f"{url}/v1", f"{paths}; /metrics, /health and /openapi.json are beside it"),
        ("model", ", ".join(names), "" if names == [engine.config.model.path] else engine.config.model.path),
        *engine.decisions,
    ]
    print_table("minivllm", ("what", "value", "why"), rows)
