"""Whose prompts a request may find in the prefix cache: those of its salt, and of its API key."""

from __future__ import annotations

import httpx
import pytest

from minivllm.errors import BadRequest
from minivllm.serve.keys import Keys, salted

TINY = {"kv.num_blocks": 200, "kv.block_size": 8, "executor.num_threads": 1}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


def post(url, path="/v1/completions", key="", prompt="x", **fields):
    message = [{"role": "user", "content": prompt}]
    asked = {"/v1/completions": {"prompt": prompt}, "/v1/responses": {"input": prompt}}
    body = asked.get(path, {"messages": message}) | fields
    if path == "/v1/messages":
        body["max_tokens"] = 5
    return httpx.post(url + path, json=body, headers={"x-api-key": key}, timeout=20)


@pytest.mark.parametrize("path", PATHS)
def test_a_salt_reaches_the_engine_from_every_endpoint(fake, path):
    assert post(fake.url, path, cache_salt="s").status_code == 200
    assert post(fake.url, path).status_code == 200
    assert [call.salt for call in fake.engine.calls] == [salted("", "s"), ""]
    reply = post(fake.url, path, cache_salt="")
    assert reply.status_code == 400 and "cache_salt" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_several_keys_have_salts_of_their_own(fake_engine, serving, path):
    with serving(fake_engine, api_keys=["one", "two"]) as url:
        for key in ("one", "two", "one"):
            assert post(url, path, key).status_code == 200
        first, second, again = (call.salt for call in fake_engine.calls)
        assert first == again != second and "" not in (first, second)
        assert "one" not in first and len(first) == len(second) == 32


def test_a_requests_salt_divides_its_keys_part_and_never_leaves_it(fake_engine, serving):
    with serving(fake_engine, api_keys=["one", "two"]) as url:
        post(url, key="one"), post(url, key="one", cache_salt="s"), post(url, key="two", cache_salt="s")
        own, divided, other = (call.salt for call in fake_engine.calls)
        assert divided == salted(own, "s") != other and len(other) == len(divided) > len(own)
        post(url, key="two", cache_salt=own)  # though somebody knew it
        assert fake_engine.calls[-1].salt == salted(other[: len(own)], own)


@pytest.mark.parametrize("options", [{}, {"api_keys": ["one"]}, {"api_keys": ["one", "one"]},
                                     {"api_keys": ["one", "two"], "isolate_keys": False}])  # fmt: skip
def test_one_tenant_or_none_shares_everything(fake_engine, serving, options):
    with serving(fake_engine, **options) as url:
        post(url, key="one")
    assert fake_engine.calls[0].salt == ""


def test_a_keys_salt_is_another_one_in_every_process():
    first, second = Keys(["one", "two"]), Keys(["one", "two"])
    assert first.tenant(first.accept(b"one")) != second.tenant(second.accept(b"one"))


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("prefix", ["hash", "radix"])
def test_no_key_finds_what_another_left(serving, isolated, prefix):
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={**TINY, "kv.prefix": prefix})
    with serving(engine, names=("tiny",), api_keys=["one", "two"], isolate_keys=isolated) as url:
        prompt, found = "a prompt of more than one block " * 3, []
        for key in ("one", "two", "one"):
            reply = post(url, "/v1/completions", key, prompt, max_tokens=1)
            found.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert found == [False, not isolated, True]


@pytest.mark.parametrize("isolated", [True, False])
def test_no_key_is_guessed_by_what_another_was_answered(serving, isolated):
    """Accepted guesses make an answer come sooner, which tells that somebody had it before."""
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={**TINY, "spec_decode.method": "suffix"})
    asked = {"prompt": "tell me", "max_tokens": 60, "temperature": 1, "seed": 3, "ignore_eos": True}
    with serving(engine, names=("tiny",), api_keys=["one", "two"], isolate_keys=isolated) as url:
        accepted = [0]
        for key in ("one", "two", "one"):
            assert post(url, key=key, **asked).status_code == 200
            accepted.append(engine.stats.num_accepted)
    assert [more - less > 30 for less, more in zip(accepted, accepted[1:], strict=False)] == [False, not isolated, True]


def test_a_prompt_dictionary_may_have_a_salt():
    from minivllm import LLM, SamplingParams

    ids = list(range(10, 40))
    one = SamplingParams(max_tokens=1)
    with LLM("dummy:tiny", overrides=TINY) as llm:
        cached = []
        for salt in ("a", "b", "a"):
            (output,) = llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, one, use_tqdm=False)
            cached.append(output.num_cached_tokens)
        assert cached == [0, 0, 24]
        for wrong in ("", 5):
            with pytest.raises(BadRequest, match="cache_salt"):
                llm.generate({"prompt_token_ids": ids, "cache_salt": wrong}, one, use_tqdm=False)


@pytest.mark.parametrize("path", PATHS)
def test_however_long_a_salt_is_it_crosses_to_the_core_as_a_short_one(fake, path):
    for salt in ("s", "s" * 4096, "\u00e4" * 4096):
        assert post(fake.url, path, cache_salt=salt).status_code == 200
    assert len({call.salt for call in fake.engine.calls}) == 3 and {len(call.salt) for call in fake.engine.calls} == {
        32
    }
    reply = post(fake.url, path, cache_salt="s" * 4097)
    assert reply.status_code == 400 and "cache_salt" in reply.text
