"""/tokenize says exactly what the generating endpoints see, and /detokenize is its inverse."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

MODEL = "dummy:tiny"
HELLO = [{"role": "user", "content": "Grüße, 世界! 🙂"}]


@pytest.fixture(scope="module")
def real(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    engine = AsyncLLM(MODEL, overrides={"kv.num_blocks": 64}, max_model_len=512)
    with serving(engine, Metrics(MODEL), (MODEL,)) as url:
        yield SimpleNamespace(engine=engine, url=url)


def post(server, path, **body):
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("text", ["Hello", "Grüße, 世界! 🙂", ""])
def test_a_prompts_tokens_are_those_that_completions_sees(real, text):
    status, found = post(real, "/tokenize", prompt=text, model=MODEL)
    assert (status, found["count"], found["max_model_len"]) == (200, len(found["tokens"]), 512)
    assert found["tokens"] == real.engine.tokenizer.encode(text) and found["token_strs"] is None
    if text:
        _, answer = post(real, "/v1/completions", prompt=text, max_tokens=1, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == found["tokens"]
    assert post(real, "/detokenize", tokens=found["tokens"]) == (200, {"prompt": text, "content": text})


def test_a_conversations_tokens_are_those_that_chat_sees(real):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for fields in ({}, {"tools": tools}, {"add_generation_prompt": False}):
        _, found = post(real, "/tokenize", messages=HELLO, **fields)
        _, answer = post(real, "/v1/chat/completions", messages=HELLO, max_tokens=1, return_token_ids=True, **fields)
        assert found["tokens"] == answer["prompt_token_ids"]


def test_token_strings_are_those_of_the_vocabulary(real):
    """As vLLM has them, whose endpoint gives what transformers' convert_ids_to_tokens does."""
    _, found = post(real, "/tokenize", prompt="Hello there é", return_token_strs=True)
    assert len(found["token_strs"]) == found["count"] and "".join(found["token_strs"]) == "HelloĠthereĠÃ©"


def test_token_strings_are_transformers(tmp_path):
    from transformers import AutoTokenizer

    from minivllm.engine.tokenizer import TextTokenizer
    from minivllm.loading.dummy import write_tokenizer

    write_tokenizer(tmp_path, 320)
    ids = list(range(320))
    wanted = AutoTokenizer.from_pretrained(tmp_path).convert_ids_to_tokens(ids)
    assert [TextTokenizer.load(tmp_path).token_str(token) for token in ids] == wanted


def test_special_tokens_are_added_to_prompts_unless_told_otherwise(fake, monkeypatch):
    seen = []
    monkeypatch.setattr(
        fake.engine.tokenizer, "encode", lambda text, add_special_tokens=True: [seen.append(add_special_tokens) or 1]
    )
    for fields in ({"prompt": "a"}, {"messages": HELLO}):
        for given in (None, True, False):
            post(fake, "/tokenize", add_special_tokens=given, **fields)
    assert seen == [True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_bad_requests_name_the_field(fake, path, body, param):
    status, reply = post(fake, path, **body)
    assert (status, reply["error"]["param"]) == (400, param)


def test_a_model_that_is_not_served_is_a_404(fake):
    assert post(fake, "/tokenize", prompt="a", model="gpt")[0] == 404
    assert post(fake, "/detokenize", tokens=[65], model="gpt")[0] == 404
