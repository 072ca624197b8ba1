"""What is made of a body takes time in proportion to it, and a body that asks for too much is refused before that."""

from __future__ import annotations

import json
import random

import httpx
import msgspec
import pytest

from minivllm.engine.tool_prompt import told_in_words
from minivllm.errors import BadRequest
from minivllm.serve import bodies, json_bounds, json_pieces, messages, protocol, responses
from minivllm.serve.messages_protocol import CountTokensRequest, MessageTurn
from minivllm.serve.protocol import MAX_ITEMS, ChatRequest, CompletionRequest
from minivllm.serve.responses_protocol import InputItem, InputPart, ResponsesRequest


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


# --- what JSON may be made of


def any_json(rng, depth=0):
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return "".join(rng.choice('"\\,:[]{}a\n') for _ in range(rng.randrange(9)))
    if kind < 0.7:
        return [any_json(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {any_json(rng, 9): any_json(rng, depth + 1) for _ in range(rng.randrange(5))}


def marks_of(data):
    """Commas, colons and opening brackets, by the value that a parser reads."""
    if not isinstance(data, list | dict):
        return ""
    inner = [*data] if isinstance(data, list) else [*data.values()]
    own = "[" if isinstance(data, list) else "{" + ":" * len(inner)
    return own + "," * (len(inner) - 1) + "".join(map(marks_of, inner))


@pytest.mark.parametrize("piece", [2, 3, 7, 2**16])
def test_what_stands_in_a_string_is_no_part_of_the_body(piece, monkeypatch):
    monkeypatch.setattr(json_bounds, "PIECE", piece)
    rng = random.Random(piece)
    for _ in range(200):
        data = any_json(rng)
        text = json.dumps(data, ensure_ascii=rng.random() < 0.5).encode()
        found = b"".join(json_bounds._outside_strings(text)).decode()
        assert sorted(c for c in found if c in ",:[{") == sorted(marks_of(data)), text


@pytest.mark.parametrize("inner", ["1,", "{},", "[],", '{"a":1},', '"",'])
def test_a_body_of_too_many_parts_is_refused_and_the_same_text_in_a_string_is_not(inner):
    many = inner * (2**20)
    with pytest.raises(BadRequest, match="524,288 values"):
        bodies.parse(f'{{"prompt": [{many}1]}}'.encode(), CompletionRequest)
    assert bodies.parse(json.dumps({"prompt": many}).encode(), CompletionRequest).prompt == many


def test_as_many_messages_as_an_endpoint_takes_are_not_too_many_parts():
    message = {"role": "user", "content": [{"type": "text", "text": "a, b: [c]"}]}
    data = json.dumps({"messages": [message] * MAX_ITEMS}).encode()
    assert len(bodies.parse(data, ChatRequest).messages) == MAX_ITEMS
    with pytest.raises(BadRequest, match=f"length <= {MAX_ITEMS}"):
        bodies.parse(json.dumps({"messages": [{"role": "user"}] * (MAX_ITEMS + 1)}).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("kind", "body"),
    [(CountTokensRequest, {"messages": [{"role": "user", "content": ""}] * (MAX_ITEMS + 1)}),
     (CountTokensRequest, {"messages": [], "system": [{"type": "text", "text": ""}] * (MAX_ITEMS + 1)}),
     (ResponsesRequest, {"input": [{"role": "user", "content": ""}] * (MAX_ITEMS + 1)})],
)  # fmt: skip
def test_the_other_protocols_conversations_have_the_same_limit(kind, body):
    with pytest.raises(BadRequest, match=f"length <= {MAX_ITEMS}"):
        bodies.parse(json.dumps(body).encode(), kind)


def test_an_unknown_field_of_many_items_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(bodies, "did_you_mean", lambda name, known: asked.append(name) or "")
    data = {"messages": [{"role": "user", "content": "a", "x": 1}] * 1000}
    ignored = {}
    bodies.parse(json.dumps(data).encode(), ChatRequest, ignored)
    assert list(ignored) == ["messages[].x"] and asked == ["x"]


# --- conversations


class Counted(str):
    """A text that counts how many characters are copied out of it and its like by `+`."""

    num_copied = 0

    def __add__(self, other):
        Counted.num_copied += len(self) + len(other)
        return Counted(str(self) + other)


def test_turns_of_one_role_are_put_together_once():
    Counted.num_copied = 0
    for role in ("user", "assistant"):
        (made,) = messages.conversation([MessageTurn(role, Counted("text")) for _ in range(1000)])
        assert made.content == ("\n" if role == "user" else "").join(["text"] * 1000)
    assert Counted.num_copied == 0


def test_thoughts_and_calls_in_a_row_are_put_together_once():
    Counted.num_copied = 0
    thought = [InputPart("reasoning_text", Counted("hm"))]
    call = [InputItem(type="function_call", call_id=f"c{i}", name="f", arguments="{}") for i in range(1000)]
    made = responses.conversation([InputItem(type="reasoning", content=thought)] * 1000 + call)
    assert [len(message.tool_calls) for message in made] == [1000]
    assert made[0].reasoning_content == "\n".join(["hm"] * 1000) and Counted.num_copied == 0


def test_results_of_tools_in_a_row_are_told_in_one_message():
    results = [{"role": "tool", "content": f"r{i}"} for i in range(3)]
    told = told_in_words([{"role": "user", "content": "q"}, *results, {"role": "user", "content": "go on"}], None)
    assert [message["role"] for message in told] == ["user", "user", "user"]
    assert told[1]["content"] == "\n".join(f"<tool_response>\nr{i}\n</tool_response>" for i in range(3))


# --- prompts


def test_prompts_behind_one_that_is_too_long_are_not_tokenised(fake, monkeypatch):
    encoded, real = [], fake.engine.tokenizer.encode
    monkeypatch.setattr(fake.engine.tokenizer, "encode", lambda text, **kw: encoded.append(text) or real(text, **kw))
    reply = post(fake, "/v1/completions", prompt=["ok", "x" * 200, *["y" * 200] * 50])
    assert reply.json()["error"]["code"] == "context_length_exceeded" and encoded == ["ok", "x" * 200]
    encoded.clear()
    assert post(fake, "/completion", prompt=[1, *["x" * 60] * 50]).status_code == 400 and len(encoded) == 2


def test_more_tokens_than_any_prompts_have_are_not_detokenised(fake):
    most = 16 * fake.engine.max_model_len
    assert post(fake, "/detokenize", tokens=[97] * most).json()["prompt"] == "a" * most
    reply = post(fake, "/detokenize", tokens=[97] * (most + 1))
    assert reply.status_code == 400 and f"{most} at most" in reply.json()["error"]["message"]


# --- answers


LONG = protocol.Completion(
    id="x", model="m", usage=protocol.Usage(),
    choices=[
        protocol.CompletionChoice(
            index=0, text='é"' * 90_000, token_ids=list(range(9_000)), prompt_token_ids=None,
            prompt_logprobs=[None, *({i: protocol.PromptLogprob(-1.0, 1, "ü"), 7: None} for i in range(3_000))],
            logprobs=protocol.LegacyLogprobs([1] * 3_000, [None] * 3_000, ["t"] * 3_000, [{"a": -0.5}] * 3_000),
        )
    ],
)  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        LONG,
        [LONG] * 2,
        [[[0.5] * 3_000] * 3, []],
        {"a": [1] * 5_000, 2: {}},
        ["x" * 10**6] * 2,
        [{}] * 9_000,
        [],
        {},
        1,
    ],
)
def test_json_in_pieces_is_the_same_json(data):
    assert b"".join(json_pieces.encode(data)) == msgspec.json.encode(data)


def test_no_piece_of_an_answer_is_made_of_much(monkeypatch):
    sizes, real = [], msgspec.json.encode
    monkeypatch.setattr(msgspec.json, "encode", lambda data: sizes.append(json_pieces.weight(data)) or real(data))
    json_pieces.encode([LONG] * 3)
    assert max(size for size in sizes if size != json_pieces.weight(LONG.choices[0].text)) <= 2 * json_pieces.MOST
