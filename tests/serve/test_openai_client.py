"""Every endpoint over a real socket, with the `openai` package and the real engine (random weights)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

MODEL = "dummy:tiny"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who are you?"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def real(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    metrics = Metrics(MODEL)
    overrides = {"kv.num_blocks": 512, "model.dtype": "float32", "debug.check": True}
    engine = AsyncLLM(MODEL, overrides=overrides, max_model_len=1024, max_num_seqs=32)
    with serving(engine, metrics, (MODEL,)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        yield SimpleNamespace(engine=engine, url=url, client=client)


@pytest.fixture
def chat(real):
    return lambda **fields: real.client.chat.completions.create(**{"messages": HELLO, **GREEDY, **fields})


@pytest.fixture
def complete(real):
    return lambda prompt, **fields: real.client.completions.create(prompt=prompt, **{**GREEDY, **fields})


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def metric(real, name, **labels):
    families = text_string_to_metric_families(httpx.get(f"{real.url}/metrics").text)
    found = [s for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in found)


# ---- chat


def test_a_chat_answer_has_openais_shape(chat):
    reply = chat()
    assert (reply.object, reply.model) == ("chat.completion", MODEL)
    assert reply.id.startswith("chatcmpl-") and reply._request_id == reply.id
    choice = reply.choices[0]
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.message.content
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    assert choice.logprobs is None


def test_a_stream_is_role_then_text_and_the_last_token_says_why_it_ends(chat):
    chunks = list(chat(stream=True))
    first, *middle, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].delta.content for chunk in middle)
    assert last.choices[0].delta.content and last.choices[0].finish_reason == "length"
    assert {chunk.choices[0].finish_reason for chunk in middle} == {None}
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


@pytest.mark.parametrize("prompt", ["Hello", "Grüße, 世界! 🙂🙃", "def f(x):\n    return"])
def test_the_streamed_text_is_the_unstreamed_text(chat, prompt):
    fields = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 40}
    assert text_of(chat(stream=True, **fields)) == chat(**fields).choices[0].message.content


def test_include_usage_ends_the_stream_with_a_chunk_without_choices(chat):
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == [] and last.usage == chat().usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


def test_usage_counts_cached_prompt_tokens(chat):
    messages = [{"role": "user", "content": "a prompt of more than one block " * 4}]
    chat(messages=messages)
    usage = chat(messages=messages).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_a_cache_salt_keeps_prefixes_apart(chat):
    messages = [{"role": "user", "content": "a salted prompt of more than one block " * 4}]
    chat(messages=messages, extra_body={"cache_salt": "a"})
    for salt, cached in (("b", False), ("a", True)):
        usage = chat(messages=messages, extra_body={"cache_salt": salt}).usage
        assert bool(usage.prompt_tokens_details.cached_tokens) == cached


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_each_have_their_index(chat, stream):
    reply = chat(n=3, temperature=1.0, seed=1, stream=stream)
    if stream:
        texts = {0: "", 1: "", 2: ""}
        for chunk in reply:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in reply.choices}
        assert reply.usage.completion_tokens == 36
    assert set(texts) == {0, 1, 2} and len(set(texts.values())) == 3


def test_a_seed_gives_the_same_text_again(chat):
    def texts(seed):
        return [chat(temperature=1.0, seed=seed).choices[0].message.content for _ in range(2)]

    assert texts(7)[0] == texts(7)[1] != texts(8)[0]


def test_chat_logprobs_name_the_token_its_bytes_and_the_likeliest(chat):
    reply = chat(logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert "".join(token.token for token in content) == reply.choices[0].message.content
    for token in content:
        assert token.bytes == list(token.token.encode())
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # greedy takes the likeliest
        assert token.logprob <= 0
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_streamed_logprobs_are_the_unstreamed_ones(chat):
    chunks = list(chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    whole = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [token.token for token in streamed] == [token.token for token in whole]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_never_leaks(chat, stream):
    whole = chat(max_tokens=30).choices[0].message.content
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    reply = chat(max_tokens=30, stop=[stop], stream=stream)
    if stream:
        chunks = list(reply)
        assert text_of(chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        choice = reply.choices[0]
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (expected, "stop", stop)


def test_max_completion_tokens_is_max_tokens(real):
    reply = real.client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=3)
    assert reply.usage.completion_tokens <= 3


def test_vllm_fields_are_understood(chat):
    forced = {"allowed_token_ids": [70], "min_tokens": 2, "ignore_eos": True, "top_k": 5, "min_p": 0.1}
    reply = chat(extra_body={**forced, "return_token_ids": True, "prompt_logprobs": 1})
    assert reply.choices[0].token_ids == [70] * 12
    assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens == len(reply.prompt_logprobs)
    assert reply.prompt_logprobs[0] is None
    assert str(reply.prompt_token_ids[1]) in reply.prompt_logprobs[1]


def test_continue_final_message_goes_on_where_it_ends(chat):
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2,"}]
    plain = chat(messages=messages)
    goes_on = chat(messages=messages, extra_body={"continue_final_message": True})
    assert goes_on.usage.prompt_tokens < plain.usage.prompt_tokens


def test_content_may_be_a_list_of_text_parts_and_the_developer_is_the_system(chat):
    parts = [{"type": "text", "text": "Hello,"}, {"type": "text", "text": "you"}]
    one = chat(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    two = chat(messages=[{"role": "system", "content": "x"}, {"role": "user", "content": "Hello,\nyou"}])
    assert one.choices[0].message.content == two.choices[0].message.content


# ---- completions


def test_a_completion_has_openais_shape(complete):
    reply = complete("Once upon a time")
    assert (reply.object, reply.choices[0].finish_reason) == ("text_completion", "length")
    assert reply.id.startswith("cmpl-")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (16, 12)  # one token a byte


def test_the_four_forms_of_a_prompt(complete):
    ids = list(complete("ab", extra_body={"return_token_ids": True}).choices[0].prompt_token_ids)
    assert complete(ids).choices[0].text == complete("ab").choices[0].text
    for prompts in (["ab", "cd"], [ids, ids[::-1]]):
        reply = complete(prompts)
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.choices[0].text == complete("ab").choices[0].text
        assert reply.usage.prompt_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_times_n_are_numbered_by_prompt(complete, stream):
    fields = {"n": 2, "temperature": 1.0, "seed": 3, "echo": True}
    reply = complete(["ab", "cd"], stream=stream, **fields)
    texts = {}
    for choice in [c for chunk in reply for c in chunk.choices] if stream else reply.choices:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert sorted(texts) == [0, 1, 2, 3]
    assert [texts[i][:2] for i in range(4)] == ["ab", "ab", "cd", "cd"]


def test_a_streamed_completion_is_the_unstreamed_one(complete):
    chunks = list(complete("Once", stream=True, max_tokens=40, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == complete("Once", max_tokens=40).choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40 == len(chunks) - 1


def test_streamed_echo_with_logprobs_gives_every_choice_those_of_the_prompt(complete):
    chunks = complete("Once", echo=True, logprobs=0, n=3, temperature=1.0, max_tokens=2, stream=True)
    openings = [c for chunk in chunks for c in chunk.choices if c.text == "Once"]
    assert sorted(c.index for c in openings) == [0, 1, 2]
    assert len({str(c.logprobs) for c in openings}) == 1 and len(openings[0].logprobs.token_logprobs) == 4


def test_streamed_token_ids_are_the_unstreamed_ones(chat, complete):
    for ask in (chat, lambda **fields: complete("Once", **fields)):
        whole = ask(extra_body={"return_token_ids": True})
        chunks = list(ask(extra_body={"return_token_ids": True}, stream=True))
        streamed = [c for chunk in chunks for c in chunk.choices]
        assert [t for c in streamed for t in getattr(c, "token_ids", [])] == whole.choices[0].token_ids
        first = chunks[0] if hasattr(chunks[0], "prompt_token_ids") else streamed[0]
        assert first.prompt_token_ids == getattr(whole, "prompt_token_ids", None) or whole.choices[0].prompt_token_ids


def test_each_chunk_of_a_completion_has_token_ids_if_they_are_asked_for(complete):
    """vLLM's own test adds them up without a look."""
    for fields in ({}, {"echo": True, "logprobs": 1}, {"stop": ["zzz"], "n": 2, "temperature": 1.0, "seed": 1}):
        chunks = list(complete("Once", stream=True, extra_body={"return_token_ids": True}, **fields))
        assert all(isinstance(c.token_ids, list) for chunk in chunks for c in chunk.choices)
        assert any(c.token_ids == [] and c.prompt_token_ids for chunk in chunks for c in chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_logprobs_with_echo_cover_prompt_and_text(complete, stream):
    fields = {"extra_body": {"skip_special_tokens": False}, "stream": stream}
    reply = complete("Once upon", echo=True, logprobs=2, max_tokens=4, **fields)
    choices = [c for chunk in reply for c in chunk.choices] if stream else reply.choices
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, offsets, values, tops = (
        [item for part in parts for item in getattr(part, name)]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    )
    shown = ["\ufffd" if token.startswith("bytes:") else token for token in tokens]  # bytes that are no character
    assert "".join(shown) == text and text.startswith("Once upon")
    assert [text[o : o + len(t)] for o, t in zip(offsets, shown, strict=True)] == shown
    assert values[0] is None and tops[0] is None
    assert [next(iter(top)) for top in tops[1:]] == tokens[1:], "the token itself comes first, then the likeliest"
    assert all(value <= 0 for value in values[1:])
    assert all(token in top and len(top) in (2, 3) for token, top in list(zip(tokens, tops, strict=True))[1:])


def test_echo_without_tokens_scores_the_prompt(complete):
    reply = complete("Once upon", echo=True, logprobs=0, max_tokens=0)
    assert reply.choices[0].text == "Once upon"
    assert len(reply.choices[0].logprobs.token_logprobs) == 9
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (0, "length")


def test_best_of_returns_the_likeliest(complete):
    fields = {"temperature": 1.0, "seed": 2, "logprobs": 0}
    every = complete("Once", n=4, **fields).choices
    scores = {choice.text: sum(choice.logprobs.token_logprobs) for choice in every}
    reply = complete("Once", n=2, best_of=4, **fields)
    assert [c.index for c in reply.choices] == [0, 1]
    assert [c.text for c in reply.choices] == sorted(scores, key=scores.get, reverse=True)[:2]


def test_logit_bias_has_string_keys_in_json(complete):
    reply = complete("ab", logit_bias={"70": 100}, extra_body={"return_token_ids": True}, max_tokens=3)
    assert reply.choices[0].token_ids == [70, 70, 70]


# ---- the rest


def test_models(real):
    models = real.client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert real.client.models.retrieve(MODEL).max_model_len == 1024


def test_health_and_version(real):
    assert httpx.get(f"{real.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{real.url}/version").json()["version"]


def test_the_openapi_document_describes_every_endpoint_and_field(real):
    document = httpx.get(f"{real.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models/{model}", "/metrics"}
    schemas = document["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False
    assert "Ignored" in chat["properties"]["user"]["description"]
    assert "Not supported" in chat["properties"]["functions"]["description"]
    assert all(f"#/components/schemas/{name}" in str(document) for name in ("ChatChunk", "ErrorBody"))


def test_metrics_count_requests_tokens_and_times(real, chat, eventually):
    before = metric(real, "minivllm:request_success_total", finished_reason="length")
    tokens = metric(real, "minivllm:generation_tokens_total")
    chat(), list(chat(stream=True))
    assert metric(real, "minivllm:request_success_total", finished_reason="length") == before + 2
    assert metric(real, "minivllm:generation_tokens_total") == tokens + 24
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"):
        assert metric(real, f"minivllm:{name}_seconds_count") > 0
        assert metric(real, f"minivllm:{name}_seconds_sum") > 0
    eventually(lambda: metric(real, "minivllm:num_requests_running") == 0)
    assert metric(real, "minivllm:prefix_cache_queries_total") > metric(real, "minivllm:prefix_cache_hits_total") > 0
    assert metric(real, "minivllm:http_requests_total", status="200", path="/v1/chat/completions") > 0


def test_sixty_four_at_once_get_the_answers_they_get_alone(real, chat):
    prompts = [f"Question {i}: " + "why? " * (i % 7) for i in range(64)]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="x", max_retries=0, timeout=120) as client:

            async def ask(prompt):
                message = [{"role": "user", "content": prompt}]
                stream = await client.chat.completions.create(**GREEDY, messages=message, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(ask, prompts))

    together = asyncio.run(ask_all())
    for i in (0, 13, 63):
        alone = chat(messages=[{"role": "user", "content": prompts[i]}]).choices[0].message.content
        assert together[i] == alone


def test_two_hundred_aborted_streams_leave_no_block_in_use(real, eventually):
    async def abort_all():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=real.url, limits=limits, timeout=60) as client:

            async def abort(i):
                body = {"prompt": f"{i} " * (1 + i % 40), "stream": True, "max_tokens": 800, "ignore_eos": True}
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    lines = reply.aiter_lines()
                    for _ in range(i % 3):  # leave before the first token, after it, in the middle
                        await anext(lines)

            await asyncio.gather(*map(abort, range(200)))

    aborted = metric(real, "minivllm:request_success_total", finished_reason="abort")
    asyncio.run(abort_all())
    eventually(lambda: real.engine.stats.num_running == real.engine.stats.num_waiting == 0, 30)
    stats = real.engine.stats
    assert stats.num_free_blocks == stats.num_total_blocks == 512
    assert metric(real, "minivllm:kv_cache_usage_perc") == 0
    assert metric(real, "minivllm:request_success_total", finished_reason="abort") == aborted + 200


def test_a_client_that_leaves_before_its_answer_is_aborted(real, eventually):
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{real.url}/v1/completions", json=body, timeout=0.1)
    eventually(lambda: real.engine.stats.num_free_blocks == 512)
    assert real.engine.stats.generation_tokens > 0


def test_token_ids_outside_the_vocabulary_are_a_400_and_the_server_goes_on(real, complete):
    for extra in ({"allowed_token_ids": [10**6]}, {"stop_token_ids": [-5]}):
        with pytest.raises(openai.BadRequestError):
            complete("a", extra_body=extra)
    with pytest.raises(openai.BadRequestError) as caught:
        complete("a", logit_bias={str(10**7): 1})
    assert caught.value.param == "logit_bias"
    assert complete("a").choices[0].text
