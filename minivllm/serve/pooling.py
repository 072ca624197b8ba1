"""What the endpoints of an engine that pools share, and how a server of the other kind refuses them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.engine.async_llm import AsyncLLM
from minivllm.errors import BadRequest, EngineDead, MinivllmError
from minivllm.plan import NOT_FINITE
from minivllm.pooling.task import CLASSIFY, EMBED, GENERATE, SCORE
from minivllm.pooling.text import Cut, Text
from minivllm.request import AS_IT_IS, PoolingParams
from minivllm.serve import errors
from minivllm.serve.completions import as_list
from minivllm.serve.generation import Service
from minivllm.serve.limits import Demand
from minivllm.serve.off_loop import SHORT, by_size
from minivllm.serve.protocol import TEXT_ONLY, RequestBody, accepted, doc, hint, refused
from minivllm.terminal import print_table

if TYPE_CHECKING:
    import numpy as np

    from minivllm.serve.endpoint import Endpoint

POOLS = (EMBED, SCORE)
CLASSIFIES = (CLASSIFY, SCORE)  # one label too is one
MAX_INPUTS = 2048  # OpenAI's
PATHS = {
    EMBED: "/v1/embeddings, /v1/score and /v1/rerank",
    SCORE: "/v1/score, /v1/rerank and /classify",
    CLASSIFY: "/classify, and TEI's /predict",
}
PER_TEXT = 32  # characters: that long takes what each text needs, however short it is
NO_CHAT = "texts are taken as they are, without a chat template"
DOES = {
    GENERATE: "generates text",
    EMBED: "embeds texts",
    SCORE: "scores pairs of texts",
    CLASSIFY: "tells classes of texts apart",
}
HOW_TO_START = {
    GENERATE: "python -m minivllm.serve --model <one that generates>",
    EMBED: "python -m minivllm.serve --model minilm, or --task embed with the model that is served here",
    CLASSIFY: "python -m minivllm.serve --model <a folder of a ...ForSequenceClassification>",
}


TruncationDirection = Annotated[  # a field of TEI's
    Literal["Left", "Right", "left", "right"] | None, doc("Which side of a text is cut off; null: Right.")
]
TEI_NAMES = {"truncate_prompt_tokens=-1": "truncate=true", "truncate_prompt_tokens": "truncate"}


class PoolingBody(RequestBody, kw_only=True):
    """The fields that all of these endpoints share."""

    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    user: Annotated[str | None, accepted()] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        doc("vLLM's: leave out the end of texts of more tokens; -1: of more than the model takes; null: refuse those."),
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, doc("vLLM's: left: their start; null: right.")] = None
    padding: Annotated[Any, refused("texts run without padding", "do_not_pad")] = None
    use_activation: Annotated[
        bool | None,
        doc("vLLM's: vectors at unit length or not, scores after a head's sigmoid or before; null: the model's way."),
    ] = None
    mm_processor_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None
    priority: Annotated[Any, hint("texts run in the order in which they come", 0)] = None
    cache_salt: Annotated[Any, accepted("Nothing is cached.")] = None
    request_id: Annotated[str | None, hint("an answer's id is the server's")] = None
    chat_template_kwargs: Annotated[Any, refused(NO_CHAT, {})] = None

    @property
    def cut(self) -> Cut:
        return Cut(self.truncate_prompt_tokens, self.truncation_side or "right")

    def asked(self, dimensions: int | None = None) -> PoolingParams:
        return PoolingParams(dimensions=dimensions, use_activation=self.use_activation)


class TextsBody(PoolingBody, kw_only=True):
    input: Annotated[
        str | list[str | int | list[int]],
        doc("A text, texts, token ids, or lists of token ids. Token ids are taken as they are."),
    ]
    add_special_tokens: Annotated[Any, refused("texts get the model's special tokens; give token ids", True)] = None
    messages: Annotated[Any, refused(NO_CHAT)] = None
    chat_template: Annotated[Any, refused(NO_CHAT)] = None
    add_generation_prompt: Annotated[Any, refused(NO_CHAT, False)] = None
    continue_final_message: Annotated[Any, refused(NO_CHAT, False)] = None
    media_io_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


def for_serving(options: dict[str, Any], api_keys: Sequence[str]) -> dict[str, Any]:
    """AsyncLLM's options with what a server needs, unless they say otherwise. A process for the core: beside HTTP and
    detokenising, each step would wait for them (bench/serve_overhead.py). And with several keys a policy under which
    none of them holds up the others."""
    own = {"engine.core": "process"}
    if len(set(api_keys)) > 1:
        own["scheduler.policy"] = "fair"
    return options | {"overrides": {**own, **options["overrides"]}}


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


def service_for(request: Request) -> Service:
    """Of this request's client, whom what it runs is counted for."""
    return replace(request.app.state.service, client=getattr(request.state, "client", ""))


async def texts_of(body: TextsBody, service: Service, prompt_name: str | None = None) -> list[Text]:
    """prompt_name: of the model's prompts, the one to put before each. Raises BadRequest."""
    engine, cut = service.engine.texts, body.cut

    def tokenised() -> list[Text]:
        inputs = as_list(body.input, "input")
        check_number(inputs, "input")
        return [engine.text(item, cut, "input", prompt_name) for item in inputs]

    return await by_size(length_of(body.input), tokenised, service.client)


def check_number(inputs: Sequence[Any], param: str) -> None:
    """Raises BadRequest."""
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(f"{param} has {len(inputs)} texts; {MAX_INPUTS} at most", param)


async def run(service: Service, texts: list[Text], id: str, asked: PoolingParams = AS_IT_IS) -> list[np.ndarray]:
    """The engine's vectors. id: of the request; asked: of each. Raises ApiError 429 while too many wait, 500 if a text
    failed."""
    client, num_tokens = service.client, usage_of(texts).total_tokens
    with service.ledger.sequences.alone():
        service.admit(client, 1)
        service.limits.take(client, Demand(len(texts), num_tokens, num_tokens), service.ledger.sequences.of(client))
        service.ledger.sequences.add(client, len(texts))
    begin, reason = time.monotonic(), "abort"
    try:
        vectors = await service.engine.pool(texts, id, asked=asked, client=client)
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
        service.ledger.sequences.add(client, -len(texts))
        service.metrics.e2e.observe(time.monotonic() - begin, len(texts))
        for text in texts:
            service.metrics.on_request_end(reason)
            service.metrics.prompt.observe(len(text.token_ids))


def length_of(texts: str | Sequence[Any]) -> int:
    """Of what is to be tokenised, as off_loop.by_size takes it: characters, and as many for each text of its own."""
    if isinstance(texts, str) or len(texts) > SHORT // PER_TEXT:
        return len(texts) * (1 if isinstance(texts, str) else PER_TEXT)
    return sum(PER_TEXT + (1 if isinstance(text, int) else len(text)) for text in texts)


def at_unit_length(vector: np.ndarray) -> np.ndarray:
    """Zeros stay what they are."""
    return vector / max(float((vector @ vector) ** 0.5), 1e-12)


def side_of(direction: str | None) -> Literal["left", "right"]:
    """TEI's Left and Right as vLLM has them."""
    return "left" if direction in ("Left", "left") else "right"


def usage_of(texts: Sequence[Text]) -> PoolingUsage:
    num_tokens = sum(len(text.token_ids) for text in texts)
    return PoolingUsage(num_tokens, num_tokens)


def report(engine: AsyncLLM, names: Sequence[str], url: str) -> None:
    """What is served and each choice that was made for the user, as `serve` prints it for a model that generates."""
    rows = [
        ("URL", f"{url}/v1", f"{PATHS[engine.task]}; /metrics, /health and /openapi.json are beside it"),
        ("model", ", ".join(names), "" if names == [engine.config.model.path] else engine.config.model.path),
        *engine.decisions,
    ]
    print_table("minivllm", ("what", "value", "why"), rows)
