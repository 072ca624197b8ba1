"""What a request may cost at worst is known before it runs; too much is a 400 that names the field and the limit."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import inspect
from serve.conftest import FakeEngine

from minivllm.engine.output import CompletionOutput, Logprob, RequestOutput
from minivllm.request import BeamSearchParams
from minivllm.serve import price
from minivllm.serve.command import parser
from minivllm.serve.completions import CompletionShape
from minivllm.serve.generation import Job, Prompt
from minivllm.serve.protocol import ChatRequest, CompletionRequest
from minivllm.serve.request_limits import RequestLimits, chosen

NAMES = price.Names("prompt", "max_tokens", "logprobs")
HELLO = [{"role": "user", "content": "x"}]
LIKELIEST = {"logprobs": True, "top_logprobs": 3}


def job(prompts=1, length=100, context=8192, score_only=False, **fields):
    """Of a request to /v1/completions, or with `chat` to the other endpoint."""
    kind = ChatRequest if fields.pop("chat", False) else CompletionRequest
    body = kind(messages=[]) if kind is ChatRequest else CompletionRequest(prompt="")
    for name, value in fields.items():
        setattr(body, name, value)
    num_logprobs = fields.get("top_logprobs") if kind is ChatRequest else fields.get("logprobs")
    params = body.sampling(1 if score_only else fields.get("max_tokens", 16), num_logprobs)
    engine = SimpleNamespace(max_model_len=context, tokenizer=SimpleNamespace(vocab_size=50_000))
    service = SimpleNamespace(engine=engine, request_limits=RequestLimits())
    return Job(service, "j", [Prompt([1] * length, "")] * prompts, params, body, score_only)


def takes_text(kind: Any) -> bool:
    """Whether a field of this type may hold a text of any length, as far as its type says."""
    if isinstance(kind, inspect.Metadata):
        return takes_text(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(map(takes_text, kind.types))
    return isinstance(kind, inspect.StrType | inspect.AnyType) or (
        isinstance(kind, inspect.ListType) and takes_text(kind.item_type)
    )


TEXTS = [
    f.encode_name for f in inspect.type_info(CompletionRequest).fields if takes_text(f.type) and f.name != "prompt"
]
MANY, THRIFTY = 512, RequestLimits(answer_bytes=2**20)
SHAPES = [str, lambda text: [text], lambda text: {"type": "object", "description": text}]


@pytest.fixture(scope="module")
def thrifty(serving):
    with serving(engine := FakeEngine(), request_limits=THRIFTY) as url:
        yield SimpleNamespace(engine=engine, url=url)


@pytest.mark.parametrize("shape", SHAPES, ids=["text", "list", "schema"])
@pytest.mark.parametrize("field", [*TEXTS, "structured_outputs", "response_format"])
@pytest.mark.parametrize("length", [300_000, 16_000, 3_000])
def test_no_text_of_a_request_is_multiplied_by_its_prompts_beyond_the_limit(thrifty, field, shape, length):
    given = shape("x" * length)
    if field == "structured_outputs":
        given = {"regex" if isinstance(given, str) else "choice" if isinstance(given, list) else "json": given}
    if field == "response_format":
        given = {"type": "json_schema", "json_schema": {"name": "x" * 64, "schema": given}}
    thrifty.engine.reset()
    thrifty.engine.script = ["a"]
    body = {"prompt": [[120]] * MANY, "max_tokens": 1, field: given}
    reply = httpx.post(f"{thrifty.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code < 500
    carried = sum(len(msgspec.msgpack.encode([call.params, call.salt, call.id])) for call in thrifty.engine.calls)
    assert carried < THRIFTY.answer_bytes, (field, reply.status_code)


def refused(made: Job) -> tuple[str, str]:
    with pytest.raises(price.BadRequest) as error:
        price.check(made, NAMES)
    return error.value.param, str(error.value)


@pytest.mark.parametrize(
    "asked, param, limit",
    [
        ({"prompts": 16, "n": 128}, "prompt", "1024 at most in one request (--max-request-sequences)"),
        ({"prompts": 1025}, "prompt", "1024 at most"),
        ({"prompts": 64, "length": 1500, "n": 8, "echo": True, "logprobs": 20}, "logprobs", "134,217,728 at most"),
        ({"prompts": 64, "length": 1500, "n": 8, "prompt_logprobs": 20}, "prompt_logprobs", "(--max-answer-bytes)"),
        ({"n": 128, "max_tokens": 8000, "logprobs": 20}, "logprobs", "(--max-answer-bytes)"),
        ({"n": 128, "max_tokens": 8000, "top_logprobs": 5, "chat": True}, "logprobs", "(--max-answer-bytes)"),
        ({"prompts": 8, "n": 128, "max_tokens": 8000}, "max_tokens", "4,194,304 at most in one request"),
        ({"prompts": 600, "length": 8000}, "prompt", "(--max-request-tokens)"),
        ({"n": 128, "allowed_token_ids": list(range(10_000))}, "allowed_token_ids", "1,048,576 at most"),
        ({"n": 128, "logit_bias": dict.fromkeys(range(10_000), 1.0)}, "logit_bias", "1,048,576 at most"),
        ({"prompts": 300, "bad_words": [f"a bad word {i}" for i in range(1000)]}, "bad_words", "1,048,576 at most"),
    ],
)  # fmt: skip
def test_what_is_too_dear_is_refused_by_field_and_limit(asked, param, limit):
    named, message = refused(job(**asked))
    assert named == param and limit in message


@pytest.mark.parametrize(
    "asked",
    [
        {"prompts": 128, "length": 4000, "echo": True, "logprobs": 1, "max_tokens": 0, "score_only": True},  # lm-eval
        {"prompts": 64, "length": 8000, "echo": True, "logprobs": 1},
        {"prompts": 16, "length": 8000, "prompt_logprobs": 5, "chat": True},
        {"length": 8000, "prompt_logprobs": 100, "chat": True},  # for distillation
        {"n": 128, "max_tokens": 2000},
        {"prompts": 1000, "max_tokens": 256},
        {"length": 1000, "context": 131_072, "max_tokens": None, "top_logprobs": 20, "chat": True},
        {"prompts": 8, "n": 2, "allowed_token_ids": list(range(50_000))},
        {"prompts": 1000, "logit_bias": dict.fromkeys(range(300), 1.0), "bad_words": ["bad"] * 1000},
        {"n": 8, "max_tokens": 100_000, "context": 131_072},
    ],
)
def test_what_evaluations_and_clients_ask_for_is_not(asked):
    made = job(**asked)
    price.check(made, NAMES)
    assert 0 < made.num_bytes <= price.most_answer_bytes(None, made.service.engine.max_model_len)


def test_a_price_costs_the_same_however_much_is_asked_for():
    """It is arithmetic on lengths: neither tokens nor the values of lists are looked at."""

    class Unread(list):
        def __iter__(self):
            raise AssertionError("read")

    made = job(prompts=3)
    made.prompts = [Prompt(Unread([1] * 50), "")] * 3
    price.check(made, NAMES)


def test_beams_are_priced_by_their_width():
    made = job(max_tokens=8000)
    made.params = BeamSearchParams(beam_width=10, max_tokens=8000)
    price.check(made, NAMES)
    assert made.num_bytes == 10 * 8000 * price.TOKEN_BYTES
    made.service.request_limits = RequestLimits(tokens=10_000)
    assert refused(made)[0] == "max_tokens"


def test_limits_are_options_of_the_server(capsys):
    args = parser("serve").parse_args(
        ["--max-request-sequences=7", "--max-request-tokens=8", "--max-answer-bytes=9", "--max-audio-seconds=10"]
    )
    assert chosen(args) == RequestLimits(7, 8, 9, 10) and chosen(parser("serve").parse_args([])) == RequestLimits()
    with pytest.raises(SystemExit):
        chosen(parser("serve").parse_args(["--max-answer-bytes", "0"]))
    assert "--max-answer-bytes 0: must be at least 1" in capsys.readouterr().err


# ---- over HTTP


@pytest.mark.parametrize(
    "path, fields, param",
    [
        ("/v1/completions", {"prompt": ["x"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 5, "temperature": 1}, "n"),
        ("/v1/completions", {"prompt": "x" * 50, "max_tokens": 20}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 50, "logprobs": 9}, "logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "n": 5, "temperature": 1}, "n"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 90}, "max_tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 50, **LIKELIEST}, "top_logprobs"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 90}, None),
        ("/v1/responses", {"input": "x", "max_output_tokens": 90}, "max_output_tokens"),
        ("/completion", {"prompt": ["x"] * 5}, "prompt"),
        ("/completion", {"prompt": "x", "n_predict": 50, "n_probs": 9}, None),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 90}}, None),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 90}}, None),
    ],
)  # fmt: skip
def test_every_endpoint_that_generates_has_a_price(fake_engine, serving, path, fields, param):
    with serving(fake_engine, request_limits=RequestLimits(sequences=4, tokens=60, answer_bytes=8000)) as url:
        reply = httpx.post(url + path, json=fields, timeout=20)
        assert reply.status_code == 400 and "--max-" in reply.text, reply.text
        assert param is None or reply.json()["error"]["param"] == param
    assert not fake_engine.calls


def complete(url, key, **fields):
    body = {"prompt": "x", "max_tokens": 90, "logprobs": 20, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=20)


def test_long_answers_share_the_limit_of_one_and_short_ones_wait_for_none(
    fake_engine, serving, eventually, monkeypatch
):
    monkeypatch.setattr("minivllm.serve.shares.LIGHT_BYTES", 5_000)
    hold = threading.Event()
    fake_engine.script = ["a", hold, "b"]
    options = {"api_keys": ["a", "b"], "request_limits": RequestLimits(answer_bytes=350_000)}  # two of 160,080
    with serving(fake_engine, max_waiting=50, **options) as url, ThreadPoolExecutor(8) as pool:
        long = [pool.submit(complete, url, "a") for _ in range(2)]
        eventually(lambda: fake_engine.num_open == 2)
        reply = complete(url, "a")
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "answers_full")
        assert int(reply.headers["retry-after"]) > 0
        others = [pool.submit(complete, url, "b"), pool.submit(complete, url, "a", logprobs=None)]
        eventually(lambda: fake_engine.num_open == 4)
        hold.set()
        assert [each.result().status_code for each in (*long, *others)] == [200] * 4
        assert complete(url, "a").status_code == 200  # it is given back


def test_a_flood_of_sequences_leaves_other_clients_a_place_under_every_policy(fake_engine, serving, eventually):
    """One client's requests fill the queue; another's is taken, though not for more than its part."""
    hold = threading.Event()
    fake_engine.script = ["a", hold, "b"]
    with serving(fake_engine, max_waiting=10, api_keys=["a", "b"]) as url, ThreadPoolExecutor(8) as pool:
        assert fake_engine.config.scheduler.policy == "fcfs"
        flood = [pool.submit(complete, url, "a", n=4, temperature=1, logprobs=None) for _ in range(3)]
        eventually(lambda: fake_engine.num_open == 3)  # of four sequences each: two in the batch, ten waiting
        fake_engine.stats.num_waiting = 10
        assert complete(url, "a", logprobs=None).status_code == 429
        assert complete(url, "b", n=7, temperature=1, logprobs=None).status_code == 429
        other = pool.submit(complete, url, "b", n=6, temperature=1, logprobs=None)
        eventually(lambda: fake_engine.num_open == 4)
        hold.set()
        assert [each.result().status_code for each in (*flood, other)] == [200] * 4


# ---- what an answer holds


class Letters:
    special_ids, vocab_size = frozenset(), 128

    def token_bytes(self, token):
        return chr(token).encode()


def scored(num_tokens: int, n: int) -> RequestOutput:
    position = {t: Logprob(-1.0 - t, 1 + t, chr(t)) for t in range(97, 118)}
    choices = [CompletionOutput(i, "a", [97], 0.0, [position], "length") for i in range(n)]
    return RequestOutput("r", None, [97] * num_tokens, [None, *[position] * (num_tokens - 1)], choices, True)


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}])
def test_log_probabilities_of_a_prompt_are_held_once_for_all_its_choices(fields):
    body = CompletionRequest(prompt="", n=8, **fields)
    service = SimpleNamespace(engine=SimpleNamespace(tokenizer=Letters()), answers_as=lambda body: "m", fingerprint="f")

    def kept(n: int) -> int:
        shape, output, prompt = CompletionShape("c", service, body), scored(500, 8), Prompt([97] * 500, "a" * 500)
        tracemalloc.start()
        whole = [shape.whole(i, prompt, output, out) for i, out in enumerate(output.outputs[:n])]
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(whole) == n
        return kept

    assert kept(8) < 1.5 * kept(1)


def test_echoed_choices_go_on_where_the_prompt_ends():
    body = CompletionRequest(prompt="", n=2, echo=True, logprobs=0)
    service = SimpleNamespace(engine=SimpleNamespace(tokenizer=Letters()), answers_as=lambda body: "m", fingerprint="f")
    shape, output, prompt = CompletionShape("c", service, body), scored(3, 2), Prompt([97] * 3, "aaa")
    choices = [shape.whole(i, prompt, output, out) for i, out in enumerate(output.outputs)]
    assert [choice.logprobs.text_offset for choice in choices] == [[0, 1, 2, 3]] * 2
    assert [choice.logprobs.token_logprobs for choice in choices] == [[None, -98.0, -98.0, -98.0]] * 2


# ---- the real engine


@pytest.fixture(scope="module")
def real(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    overrides = {"kv.num_blocks": 256, "model.dtype": "float32", "engine.core": "inproc"}
    engine = AsyncLLM("dummy:tiny", overrides=overrides, max_model_len=256)
    with serving(engine, Metrics("m"), ("m",)) as url:
        yield url


INCLUDED = "message.output_text.logprobs"
TEXT = "The quick brown fox jumps over the lazy dog. "
OPTIONS = {"stream": False, "options": {"num_predict": 9}}


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 20, "max_tokens": 9, "n": 3}),
        ("/v1/completions", {"prompt": [TEXT, "x"], "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/completions", {"prompt": TEXT, "prompt_logprobs": 20, "max_tokens": 9, "n": 3}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 90, "return_token_ids": True}),
        ("/v1/completions", {"prompt": TEXT, "logprobs": 20, "max_tokens": 90}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 20, "max_tokens": 30, "n": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 20, "max_tokens": 9}),
        ("/v1/responses", {"input": "x", "include": [INCLUDED], "top_logprobs": 20, "max_output_tokens": 30}),
        ("/completion", {"prompt": TEXT, "n_probs": 20, "n_predict": 30}),
        ("/api/chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 20, **OPTIONS}),
        ("/api/generate", {"prompt": TEXT, "logprobs": True, "top_logprobs": 20, **OPTIONS}),
    ],
)
def test_no_answer_is_much_longer_than_its_price(real, monkeypatch, path, fields):
    """dummy:tiny's tokens are bytes and pairs of them, many of which JSON and OpenAI's forms write at length."""
    jobs, check = [], price.check
    monkeypatch.setattr(price, "check", lambda job, names: (check(job, names), jobs.append(job)))
    extra = {} if path in ("/api/chat", "/completion") else {"ignore_eos": True}
    reply = httpx.post(real + path, json={"temperature": 1, **extra, **fields}, timeout=60)
    envelope = 2_000  # and what llama.cpp's and Ollama's tell of the prompt and their settings
    assert reply.status_code == 200 and len(reply.content) < 1.1 * jobs[0].num_bytes + envelope, len(reply.content)


def test_a_list_of_many_times_one_id_is_one_id_wherever_it_goes(fake_engine, serving):
    body = {"prompt": "x", "allowed_token_ids": [97] * 300_000, "n": 128, "temperature": 1}
    with serving(fake_engine) as url:
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    (call,) = fake_engine.calls
    assert call.params.allowed_token_ids == (97,) and call.params.n == 128
