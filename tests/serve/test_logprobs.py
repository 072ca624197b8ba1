"""The log-probabilities that clients get equal transformers', with `echo`, in streams, and where only the prompt is
scored: what evaluation harnesses build on."""

from __future__ import annotations

from types import SimpleNamespace

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm.loading.dummy import write_tokenizer

TOLERANCE = 4e-4  # see tests/engine/test_logprobs.py
PROMPT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def server(serving, tmp_path_factory):
    from minivllm.engine.async_llm import AsyncLLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, 320)

    def log_softmax(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    overrides = {"kv.num_blocks": 64, "kv.block_size": 8, "executor.num_threads": 1, "debug.check": True}
    engine = AsyncLLM(str(folder), dtype="float32", overrides=overrides, max_num_batched_tokens=16)
    with serving(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60)
        yield SimpleNamespace(client=client, log_softmax=log_softmax, tokenizer=engine.tokenizer)


def near(values):
    return pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize("again", [False, True])  # the second time, the prompt is in the prefix cache
@pytest.mark.parametrize("prompt", [PROMPT, "x"])
def test_echo_with_no_tokens_scores_a_prompt(server, prompt, again):
    reply = server.client.completions.create(model="fake", prompt=prompt, echo=True, logprobs=3, max_tokens=0)
    (choice,) = reply.choices
    ids = server.tokenizer.encode(prompt)
    expected = server.log_softmax(ids)
    found = choice.logprobs
    assert choice.text == prompt and found.tokens == list(prompt)
    assert found.text_offset == list(range(len(prompt)))
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == near([expected[i, ids[i + 1]].item() for i in range(len(ids) - 1)])
    for i, top in enumerate(found.top_logprobs[1:]):
        best = expected[i].topk(3).values.tolist()
        assert len(top) in (3, 4) and sorted(top.values(), reverse=True)[:3] == near(best)
        assert top[found.tokens[i + 1]] == found.token_logprobs[i + 1]


def test_parts_of_characters_are_told_apart(server):
    reply = server.client.completions.create(model="fake", prompt="aé", echo=True, logprobs=20, max_tokens=0)
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == "aé"
    assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert found.text_offset == [0, 1, 1]
    ids = server.tokenizer.encode("aé")
    for row, top in zip(server.log_softmax(ids)[:-1], found.top_logprobs[1:], strict=True):
        assert sorted(top.values(), reverse=True)[:20] == near(row.topk(20).values.tolist())


def test_several_prompts_are_scored_each_for_itself(server):
    prompts = [PROMPT, PROMPT[:20], PROMPT[4:]]
    reply = server.client.completions.create(model="fake", prompt=prompts, echo=True, logprobs=0, max_tokens=0)
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        ids = server.tokenizer.encode(prompt)
        expected = server.log_softmax(ids)
        assert sum(choice.logprobs.token_logprobs[1:]) == pytest.approx(
            sum(expected[i, ids[i + 1]].item() for i in range(len(ids) - 1)), abs=len(ids) * TOLERANCE
        )


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_n_score_prompt_and_every_choice(server, stream):
    reply = server.client.completions.create(
        model="fake", prompt=PROMPT, echo=True, logprobs=2, max_tokens=5, n=2, seed=1, stream=stream,
        extra_body={"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    choices = [c for chunk in reply for c in chunk.choices] if stream else reply.choices
    prompt = server.tokenizer.encode(PROMPT)
    for index in (0, 1):
        mine = [c for c in choices if c.index == index]
        ids = prompt + [t for c in mine for t in getattr(c, "token_ids", None) or ()]
        values = [v for c in mine if c.logprobs for v in c.logprobs.token_logprobs]
        expected = server.log_softmax(ids)
        assert len(ids) == len(prompt) + 5 and values[0] is None
        assert values[1:] == near([expected[i, ids[i + 1]].item() for i in range(len(ids) - 1)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_top_logprobs_are_the_models_whatever_the_sampler_does(server, stream):
    fields = {"temperature": 0.5, "top_p": 0.5, "frequency_penalty": 1.0, "seed": 3, "max_tokens": 6, "stream": stream}
    reply = server.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=4, **fields,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    chunks = list(reply) if stream else [reply]
    prompt = chunks[0].prompt_token_ids
    choices = [chunk.choices[0] for chunk in chunks]
    ids = [t for c in choices for t in getattr(c, "token_ids", None) or ()]
    content = [position for c in choices if c.logprobs for position in c.logprobs.content]
    expected = server.log_softmax(prompt + ids)[len(prompt) - 1 : -1]
    assert len(content) == len(ids) == 6
    for position, token, row in zip(content, ids, expected, strict=True):
        assert position.logprob == near(row[token].item())
        assert [top.logprob for top in position.top_logprobs] == near(row.topk(4).values.tolist())


def test_prompt_logprobs_have_every_position_and_rank(server):
    reply = server.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": PROMPT}], max_tokens=1,
        extra_body={"prompt_logprobs": 2, "return_token_ids": True},
    )  # fmt: skip
    ids, positions = reply.prompt_token_ids, reply.prompt_logprobs
    expected = server.log_softmax(ids)
    assert positions[0] is None and len(positions) == len(ids)
    for i, position in enumerate(positions[1:]):
        for token, found in position.items():
            row, value = expected[i], expected[i, int(token)]
            assert found["logprob"] == near(value.item())
            assert (row > value + 2 * TOLERANCE).sum() < found["rank"] <= (row >= value - 2 * TOLERANCE).sum()
        assert str(ids[i + 1]) in position and len(position) >= 2
