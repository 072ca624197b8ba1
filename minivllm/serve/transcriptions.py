"""/v1/audio/transcriptions and /v1/audio/translations: what is said in a recording, as OpenAI's endpoints tell it.

A model hears half a minute at once. A longer recording is cut where it is quiet, its pieces are prompts of one job, and
their texts are put together.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.engine.audio import KEY as AUDIO
from minivllm.engine.audio import AudioReader
from minivllm.engine.speech import Speech, Task
from minivllm.errors import BadRequest
from minivllm.request import Beside, SamplingParams
from minivllm.serve import errors, price
from minivllm.serve.connection import Bytes, BytesAnswer, EventStream, JSONAnswer
from minivllm.serve.containers import FORMATS
from minivllm.serve.forms import taken_form
from minivllm.serve.generation import DONE, Job, Prompt, Service, attach, event, final_outputs, new_id
from minivllm.serve.off_loop import UNBOUNDED, by_size, client_of
from minivllm.serve.protocol import NOBODY_ASKS, Int32, NotEmpty, RequestBody, Sampling, doc, hint, refused
from minivllm.serve.recordings import pieces

FILE = "file"
NAMES = price.Names(FILE, "max_completion_tokens", "logprobs")
NO_TIMES = "when words are said is not told yet"
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")
SAMPLED += ("frequency_penalty", "presence_penalty", "repetition_penalty")
NEVER = -100.0  # added to the logits of what no transcript has


class SpeechRequest(RequestBody, kw_only=True):
    file: Annotated[
        bytes,
        Meta(
            description=f"The recording: {FORMATS}, of any rate and number of channels.",
            extra_json_schema={"contentEncoding": "binary"},
        ),
    ]
    model: Annotated[str | None, doc("A name that GET /v1/models lists; null: the model that is served.")] = None
    language: Annotated[NotEmpty | None, doc("ISO 639's name of what is spoken; null: the model hears it.")] = None
    to_language: Annotated[Any, refused("the model translates into English", "en")] = None
    prompt: Annotated[str | None, doc("What was said before, or how it is spelt: the model goes on from it.")] = None
    response_format: Annotated[Literal["json", "text", "srt", "verbose_json", "vtt"] | None, doc("null: json.")] = None
    temperature: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, doc("null: 0, the likeliest words.")] = None
    stream: bool | None = None
    timestamp_granularities: Annotated[list[str] | None, refused(NO_TIMES)] = None
    keywords: Annotated[Any, refused("put them into the prompt", [])] = None
    languages: Annotated[Any, refused("several at once; see language", [])] = None
    known_speaker_names: Annotated[Any, refused("who speaks", [])] = None
    known_speaker_references: Annotated[Any, refused("who speaks", [])] = None
    include: Annotated[list[str] | None, refused("log-probabilities of a transcript")] = None
    chunking_strategy: Annotated[str | None, hint("a long recording is cut where it is quiet")] = None
    user: Annotated[str | None, hint(NOBODY_ASKS)] = None

    top_p: Annotated[float | None, doc("vLLM's.")] = None
    top_k: Annotated[Int32 | None, doc("vLLM's. 0 and -1 keep the whole vocabulary.")] = None
    min_p: Annotated[float | None, doc("vLLM's.")] = None
    seed: Annotated[int | None, doc("vLLM's.")] = None
    frequency_penalty: Annotated[float | None, doc("vLLM's.")] = None
    presence_penalty: Annotated[float | None, doc("vLLM's.")] = None
    repetition_penalty: Annotated[float | None, doc("vLLM's.")] = None
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        doc("vLLM's: of each piece; null: as many as there is room for."),
    ] = None


class Duration(Struct):
    type: Literal["duration"]
    seconds: int


class Transcription(Struct):
    text: str
    usage: Duration


class TextDelta(Struct, tag_field="type", tag="transcript.text.delta"):
    delta: str


class TextDone(Struct, tag_field="type", tag="transcript.text.done"):
    text: str
    usage: Duration


TranscriptEvent = TextDelta | TextDone
Begin = Callable[[], Awaitable[Job]]  # its language is heard first, if nobody has told it


async def transcriptions(request: Request) -> ASGIApp:
    return await heard(request, "transcribe")


async def translations(request: Request) -> ASGIApp:
    return await heard(request, "translate")


class Heard(NamedTuple):
    pieces: Sequence[Beside]
    seconds: float  # of all of them


async def heard(request: Request, task: Task) -> ASGIApp:
    body = await taken_form(request, SpeechRequest)
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.response_format not in (None, "json", "text"):
        raise BadRequest(f"response_format {body.response_format} is not supported: {NO_TIMES}", "response_format")
    reader, speech = service.engine.hearing
    language = None if body.language is None else speech.language(body.language)
    speech.check(task)
    params = params_of(body, speech)
    before = speech.start(body.prompt or "", service.engine.max_model_len // 2)
    most, client, file = service.request_limits.audio_seconds, client_of(request.scope["state"]), body.file
    body.file = b""  # what is made of it is kept, until it is answered
    with errors.renaming({AUDIO: FILE}):
        found = await by_size(UNBOUNDED, lambda: listen(file, reader, most), client)
    id = new_id("trsc" if task == "transcribe" else "trsl")

    def job(id: str, start: list[int], heard: Sequence[Beside], params: SamplingParams) -> Job:
        made = Job(service, id, [Prompt(start, "", piece) for piece in heard], params, Sampling(model=body.model))
        price.check(made, NAMES)
        attach(made, request)
        return made

    async def begin() -> Job:
        spoken = language
        if spoken is None and speech.is_multilingual:
            asked = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(speech.languages.values()))
            (output,) = await final_outputs(job(f"{id}-language", before, found.pieces[:1], asked))
            spoken = output.outputs[0].token_ids[0]
        return job(id, [*before, *speech.rest(task, spoken)], found.pieces, params)

    usage = Duration("duration", math.ceil(found.seconds))
    if body.stream:
        return EventStream(events(begin, usage), id)
    if body.response_format == "text":
        return BytesAnswer(plain(begin), id)
    return JSONAnswer(whole(begin, usage), id)


def listen(data: bytes, reader: AudioReader, most: int) -> Heard:
    """most: seconds. Raises BadRequest."""
    found, seconds = [], 0.0
    for piece in pieces(data, reader.seconds, most, FILE):
        seconds += piece.seconds
        found.append(reader.heard(piece.samples))
    if not found:
        raise BadRequest(f"{FILE}: the recording is empty", FILE)
    return Heard(found, seconds)


def params_of(body: SpeechRequest, speech: Speech) -> SamplingParams:
    """Raises BadRequest."""
    given = {name: value for name in SAMPLED if (value := getattr(body, name)) is not None}
    never = dict.fromkeys(speech.unsaid, NEVER)
    most = body.max_completion_tokens
    return SamplingParams(
        **{"temperature": 0, **given},
        max_tokens=most,
        logit_bias=never or None,
        begin_suppress_tokens=speech.unsaid_first,
    )


async def text_of(begin: Begin) -> str:
    return "".join(output.outputs[0].text for output in await final_outputs(await begin())).strip()


async def whole(begin: Begin, usage: Duration) -> Transcription:
    return Transcription(await text_of(begin), usage)


async def plain(begin: Begin) -> Bytes:
    return Bytes(f"{await text_of(begin)}\n".encode(), media_type=b"text/plain; charset=utf-8")


async def events(begin: Begin, usage: Duration) -> AsyncIterator[bytes]:
    """The pieces run together, and are told in their order."""
    job = await begin()
    waiting: list[list[str]] = [[] for _ in job.prompts]
    ended, at, told = [False] * len(waiting), 0, ""
    async with aclosing(job.outputs("delta")) as stream:
        async for i, output in stream:
            waiting[i].append(output.outputs[0].text)
            ended[i] = ended[i] or output.finished
            while at < len(waiting):
                new, waiting[at] = "".join(waiting[at]), []
                new = new if told else new.lstrip()
                if new:
                    told += new
                    yield event(TextDelta(new))
                if not ended[at]:
                    break
                at += 1
    yield event(TextDone(told.strip(), usage))
    yield DONE
