"""`use_beam_search` over a real socket is AsyncLLM's beam search, and says what it cannot honour."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from minivllm.request import BeamSearchParams

MODEL = "dummy:tiny"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def real(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    overrides = {"kv.num_blocks": 256, "model.dtype": "float32", "debug.check": True}
    engine = AsyncLLM(MODEL, overrides=overrides, max_model_len=256)
    with serving(engine, Metrics(MODEL), (MODEL,)) as url:
        yield SimpleNamespace(engine=engine, url=url)


@pytest.fixture(scope="module")
def offline():
    from minivllm import LLM

    with LLM(MODEL, overrides={"kv.num_blocks": 256, "model.dtype": "float32"}, max_model_len=256) as llm:
        yield llm


def post(url, path, **body):
    reply = httpx.post(f"{url}/v1/{path}", json={"use_beam_search": True, **body}, timeout=60)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("fields", [{}, {"length_penalty": 0.0, "early_stopping": True}, {"ignore_eos": True}])
def test_beams_are_those_of_the_offline_engine(real, offline, fields):
    status, reply = post(
        real.url, "completions", prompt="The sea is", n=3, max_tokens=8, return_token_ids=True, **fields
    )
    params = BeamSearchParams(beam_width=3, max_tokens=8, **fields)
    (expected,) = offline.beam_search("The sea is", params, use_tqdm=False)
    assert status == 200
    assert [c["token_ids"] for c in reply["choices"]] == [out.token_ids for out in expected.outputs]
    assert [c["text"] for c in reply["choices"]] == [out.text for out in expected.outputs]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["completion_tokens"] == sum(len(out.token_ids) for out in expected.outputs)


def test_two_prompts_have_n_beams_each(real):
    _, both = post(real.url, "completions", prompt=["The sea", "A dog"], n=2, max_tokens=5)
    _, second = post(real.url, "completions", prompt="A dog", n=2, max_tokens=5)
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in both["choices"][2:]] == [c["text"] for c in second["choices"]]


def test_each_prompts_beams_end_where_its_context_does(real):
    prompts = [[7] * 250, [7] * 200]
    status, reply = post(real.url, "completions", prompt=prompts, max_tokens=50, ignore_eos=True, return_token_ids=True)
    assert status == 200
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [6, 50]


def test_a_conversation_has_beams_too(real):
    status, reply = post(real.url, "chat/completions", messages=HELLO, n=2, max_tokens=6, temperature=0, seed=3)
    first, second = (choice["message"]["content"] for choice in reply["choices"])
    assert status == 200 and first and second and first != second


def test_without_max_tokens_the_context_is_the_limit(fake):
    post(fake.url, "chat/completions", messages=HELLO, n=1)
    (call,) = fake.engine.calls
    assert call.params == BeamSearchParams(beam_width=1, max_tokens=100 - len(call.prompt["prompt_token_ids"]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 1), ("stop", "x"),
     ("stop_token_ids", [1]), ("bad_words", ["x"]), ("logit_bias", {"1": 1}), ("allowed_token_ids", [1]),
     ("min_tokens", 2), ("logprobs", True), ("prompt_logprobs", 1), ("stream", True), ("skip_special_tokens", False),
     ("include_stop_str_in_output", True), ("guided_regex", "a+"), ("response_format", {"type": "json_object"}),
     ("n", 11), ("tools", [{"type": "function", "function": {"name": "f"}}])],
)  # fmt: skip
def test_what_beams_cannot_honour_is_refused_by_name(fake, field, value):
    status, reply = post(fake.url, "chat/completions", **{"messages": HELLO, "max_tokens": 5, field: value})
    assert (status, reply["error"]["param"]) == (400, field)
    assert not fake.engine.calls


@pytest.mark.parametrize("field", [{"length_penalty": 2.0}, {"early_stopping": True}])
def test_the_options_of_beam_search_need_it(fake, field):
    status, reply = post(fake.url, "completions", prompt="a", use_beam_search=False, **field)
    assert (status, reply["error"]["param"]) == (400, *field)
    status, _ = post(fake.url, "completions", prompt="a", use_beam_search=False, length_penalty=1.0)
    assert status == 200


def test_best_of_and_scoring_are_no_beam_searches(fake):
    for fields, param in (({"best_of": 2}, "best_of"), ({"echo": True, "max_tokens": 0}, "max_tokens")):
        status, reply = post(fake.url, "completions", prompt="a", **fields)
        assert (status, reply["error"]["param"]) == (400, param)
