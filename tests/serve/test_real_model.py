"""The default model behind the server: what a newcomer sees first."""

from __future__ import annotations

import openai
import pytest

pytestmark = pytest.mark.model
QUESTIONS = ("What is the capital of France?", "Say hello in Japanese, with an emoji.", "Count from one to ten.")


@pytest.fixture(scope="module")
def client(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    metrics = Metrics("smollm2-135m")
    # float32: in bf16 a prefix-cache hit may tip a tie between two tokens
    engine = AsyncLLM(overrides={"kv.num_blocks": 256}, dtype="float32", max_model_len=2048)
    with serving(engine, metrics, ("smollm2-135m",)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client, question, **fields):
    message = [{"role": "user", "content": question}]
    fields = {"model": "smollm2-135m", "max_completion_tokens": 40, "temperature": 0} | fields
    return client.chat.completions.create(messages=message, **fields)


def test_it_knows_the_capital_of_france_and_ends_by_itself(client):
    choice = ask(client, QUESTIONS[0]).choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_streamed_answer_is_the_unstreamed_one(client, question):
    chunks = list(ask(client, question, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = ask(client, question).choices[0]
    assert (streamed, chunks[-1].choices[0].finish_reason) == (whole.message.content, whole.finish_reason)


def test_a_stop_string_inside_a_token_is_cut_there(client):
    assert ask(client, QUESTIONS[0], stop=["ari"]).choices[0].message.content.endswith(" P")
