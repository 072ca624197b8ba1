"""The event loop does little in a turn, whatever a body up to the limit holds: everything long is done in threads.

Work is counted, and no clock is asked (tests/loop_watch.py). A row for each endpoint that takes a body; bodies are near
the server's limit, which is lower here than a real one so that the tests are quick.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from loop_watch import watched_loops
from models.speech import recording, save_speaking, sound
from pooling.tiny import write_bert

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.serve.app import ENDPOINTS
from minivllm.serve.transcriptions import FILE

LIMIT = 300_000  # bytes
MODEL = "dummy:tiny"
TEXT = "word, " * (LIMIT // 7)
SHORT_ONES = ["text"] * (LIMIT // 8)
IDS = [7] * (LIMIT // 4)
MANY = 8_000  # items
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}}}
TOOL = {"type": "function", "function": FUNCTION}


def chats(messages=USER, **fields):
    """Bodies with a long conversation, a long message, and many unknown fields."""
    return [
        {"messages": [messages] * MANY, **fields},
        {"messages": [{**messages, "content": TEXT}], **fields},
        {"messages": [{**USER, "unknown": 1}] * 6_000, **fields},
    ]


PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5_000}]}
TURNS = [{"role": "user", "content": "x" * 9}, {"role": "assistant", "content": "y" * 4}]
BLOCKS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 5_000}
COMPLETIONS = [{"prompt": TEXT}, {"prompt": SHORT_ONES}, {"prompt": IDS}, {"prompt": [[7] * 20] * 500}]

GENERATING = {
    "/v1/chat/completions": [*chats(), PARTS, {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}],
    "/v1/completions": [*COMPLETIONS, {"prompt": ["x" * 100] * 400}],
    "/v1/responses": [
        {"input": TEXT},
        {"input": [{"role": "user", "content": "hi"}] * 5_000},
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}] * 4_000},
    ],
    "/v1/responses/input_tokens": [{"input": TEXT}, {"input": [{"role": "user", "content": "hi"}] * 5_000}],
    "/v1/messages": [
        {"max_tokens": 1, "messages": [TURNS[0]] * 5_000},
        {"max_tokens": 1, "messages": TURNS * 2_500},
        {"max_tokens": 1, "messages": [BLOCKS]},
        {"max_tokens": 1, "messages": [{"role": "user", "content": TEXT}], "system": TEXT[:999]},
    ],
    "/v1/messages/count_tokens": [{"messages": [TURNS[1]] * 5_000}, {"messages": [BLOCKS]}],
    "/tokenize": [{"prompt": "ab" * 60_000, "return_token_strs": True}, *chats(), {"content": "a" * 130_000}],
    "/detokenize": [{"tokens": IDS}, {"tokens": [7] * 8_000}],
    "/api/chat": [{"messages": [USER] * MANY}, {"messages": [{"role": "user", "content": TEXT}]}],
    "/api/generate": [{"prompt": TEXT}, {"prompt": "hi", "context": IDS}, {"prompt": TEXT, "raw": True}],
    "/api/show": [{"model": TEXT}],
    "/completion": [{"prompt": TEXT}, {"prompt": SHORT_ONES}, {"prompt": ["x", 7] * 30_000}, {"prompt": IDS}],
    "/infill": [{"input_prefix": TEXT, "input_suffix": TEXT[:9]}],
    "/apply-template": [*chats()],
    "/v1/load_lora_adapter": [{"lora_name": TEXT, "lora_path": "x"}],
    "/v1/unload_lora_adapter": [{"lora_name": TEXT}],
}
RATE = 16_000
RECORDINGS = [
    {FILE: sound(recording(0, 9 * RATE)), "language": "de", "max_completion_tokens": "1"},
    {FILE: sound(np.zeros(60 * RATE, np.float32), format="FLAC"), "max_completion_tokens": "1"},
    {FILE: b"x" * (LIMIT - 1000)},
    {FILE: b"", **{f"field-{i}": "x" for i in range(250)}},
    {FILE: b"", "prompt": "word " * (LIMIT // 6)},
]
HEARING = {"/v1/audio/transcriptions": RECORDINGS, "/v1/audio/translations": RECORDINGS[:1]}
RANKING = [{"query": "q", "documents": SHORT_ONES}, {"query": TEXT[:50_000], "documents": ["d"]}]
PAIRS = [{"text_1": "q", "text_2": SHORT_ONES}, {"text_1": TEXT[:50_000], "text_2": "d"}]
INPUTS = [{"input": SHORT_ONES[:2048]}, {"input": TEXT[:50_000]}, {"input": IDS}, {"input": [[7] * 20] * 600}]
EMBEDDING = {
    "/v1/embeddings": INPUTS,
    "/pooling": INPUTS[:1],
    "/api/embed": [{"input": SHORT_ONES[:999]}],
    "/api/embeddings": [{"prompt": TEXT[:20_000]}],
    "/v2/embed": [{"texts": SHORT_ONES[:999]}, {"inputs": [{"content": [{"type": "text", "text": "x"}] * 5_000}]}],
    "/embed": [{"inputs": SHORT_ONES[:999]}, {"inputs": TEXT[:50_000], "truncate": True}],
    "/similarity": [{"inputs": {"source_sentence": "q", "sentences": SHORT_ONES[:1500]}}],
    "/rerank": RANKING,
    "/score": PAIRS,
}
CLASSIFYING = {
    "/classify": INPUTS[:2],
    "/predict": [{"inputs": [["a"], ["q", "d"]] * 500}, {"inputs": [TEXT[:50_000], "d"], "truncate": True}],
}
# As others, by another name.
SAME = {"/v1/score", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/invocations"}
NO_BODY = {"/v1/responses/{response_id}/cancel", "/ping"}

SERVERS = {"generating": GENERATING, "embedding": EMBEDDING, "classifying": CLASSIFYING, "hearing": HEARING}


def test_each_endpoint_that_takes_a_body_has_its_row():
    paths = {endpoint.path for endpoint in ENDPOINTS if endpoint.method == "POST"}
    assert paths - NO_BODY - SAME == GENERATING.keys() | EMBEDDING.keys() | CLASSIFYING.keys() | HEARING.keys()


@pytest.fixture(scope="module")
def watch():
    with watched_loops() as watch:
        yield watch


@pytest.fixture(scope="module")
def generating(watch, serving):
    engine = AsyncLLM(MODEL, overrides={"kv.num_blocks": 64}, max_model_len=512)
    with serving(engine, Metrics(MODEL), (MODEL,), max_body_bytes=LIMIT) as url:
        post(SimpleNamespace(url=url), "/tokenize", {"messages": [USER]})  # compiles the template
        yield begun(url, watch)


@pytest.fixture(scope="module")
def embedding(watch, serving, tmp_path_factory):
    yield from reading(watch, serving, tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def hearing(watch, serving, tmp_path_factory):
    save_speaking(folder := tmp_path_factory.mktemp("whisper"), is_multilingual=True)
    engine = AsyncLLM(str(folder), overrides={"executor.num_threads": 1})
    with serving(engine, names=("tiny",), max_body_bytes=LIMIT) as url:
        server = begun(url, watch)
        post(server, "/v1/audio/transcriptions", HEARING["/v1/audio/transcriptions"][0])
        watch.faults.clear()
        yield server


@pytest.fixture(scope="module")
def classifying(watch, serving, tmp_path_factory):
    yield from reading(watch, serving, tmp_path_factory.mktemp("bert"), num_labels=3)


def reading(watch, serving, folder, **how):
    write_bert(folder, **how)
    engine = AsyncLLM(str(folder), overrides={"executor.num_threads": 1})
    with serving(engine, names=("tiny",), max_body_bytes=LIMIT) as url:
        yield begun(url, watch)


def begun(url, watch):
    """A server that has imported all that it will, which it does in its loop."""
    server = SimpleNamespace(url=url)
    post(server, "/tokenize", {"prompt": "text"})
    watch.faults.clear()
    return server


def post(server, path, body):
    """body: with a file it is a form."""
    form, data = {}, json.dumps(body, separators=(",", ":")).encode() if FILE not in body else None
    if data is None:
        fields = {name: value for name, value in body.items() if name != FILE}
        form = {"data": fields, "files": {FILE: ("a", body[FILE])}}
    assert len(data or body[FILE]) <= LIMIT
    headers = {} if data is None else {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}{path}", content=data, headers=headers, timeout=60, **form)
    assert reply.status_code < 500, reply.text[:500]
    return reply


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        pytest.param(server, path, body, id=f"{server}-{path}-{i}")
        for server, bodies in SERVERS.items()
        for path, rows in bodies.items()
        for i, body in enumerate(rows)
    ],
)
def test_a_server_never_stands_still(request, watch, server, path, body):
    limits = {"max_tokens": 1} if "completions" in path else {"n_predict": 1} if path == "/completion" else {}
    post(request.getfixturevalue(server), path, {**limits, **body})
    watch.check()


def test_answers_of_many_log_probabilities_are_built_and_written_in_threads(generating, watch):
    fields = {"max_tokens": 1, "echo": True, "logprobs": 20, "n": 2}
    reply = post(generating, "/v1/completions", {"prompt": [[7] * 400] * 6, **fields})
    assert len(reply.json()["choices"]) == 12
    watch.check()
    post(generating, "/v1/completions", {"prompt": [7] * 400, **fields, "stream": True})
    watch.check()
    fields = {"max_tokens": 1, "prompt_logprobs": 20}
    post(generating, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 400}], **fields})
    watch.check()


def test_the_watch_sees_a_loop_that_stands_still(watch):
    import asyncio

    async def busy():
        for _ in range(120_000):
            pass

    asyncio.run(busy())
    with pytest.raises(AssertionError, match="lines in a turn.*busy"):
        watch.check()
