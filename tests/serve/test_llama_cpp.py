"""llama.cpp's endpoints; the shapes are those of its tools/server/README.md and server-task.cpp."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import httpx
import pytest
from serve.conftest import FakeEngine, FillingTokenizer

HELLO = [{"role": "user", "content": "Hi"}]
PART = {"index", "content", "tokens", "id_slot", "stop", "tokens_predicted", "tokens_evaluated"}
WHOLE = PART | {
    "model", "prompt", "generation_settings", "has_new_line", "truncated", "stop_type", "stopping_word",
    "tokens_cached", "timings",
}  # fmt: skip


class Client:
    def __init__(self, url):
        self.http = httpx.Client(base_url=url, timeout=30)

    def post(self, path="completion", **body):
        return self.http.post(f"/{path}", json=body)

    def get(self, path):
        return self.http.get(path).json()

    def whole(self, path="completion", **body):
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path="completion", **body):
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        blocks = reply.text.strip().split("\n\n")
        assert all(block.startswith("data: ") for block in blocks) and "[DONE]" not in reply.text
        return [json.loads(block[6:]) for block in blocks]

    def refused(self, path="completion", **body):
        reply = self.post(path, **body)
        assert reply.status_code == 400, reply.text
        return reply.json()["error"]["message"]


@pytest.fixture
def client(fake):
    return Client(fake.url)


@pytest.fixture(scope="session")
def tiny(tiny_url):
    return Client(tiny_url)


def params(fake):
    return fake.engine.calls[-1].params


def prompts(fake):
    return ["".join(map(chr, call.prompt["prompt_token_ids"])) for call in fake.engine.calls]


def test_a_whole_answer_has_llama_cpps_fields(client):
    answer = client.whole(prompt="Hi", return_tokens=True)
    assert set(answer) == WHOLE and answer["content"] == "abc" and answer["stop"] is True
    assert (answer["tokens"], answer["tokens_predicted"], answer["tokens_evaluated"]) == ([97, 98, 99], 3, 2)
    assert (answer["prompt"], answer["model"], answer["stop_type"], answer["stopping_word"]) == (
        "Hi",
        "fake",
        "eos",
        "",
    )
    assert client.whole(prompt="Hi")["tokens"] == []


def test_a_stream_ends_with_all_but_the_text(client):
    *pieces, last = client.events(prompt="Hi")
    assert [(piece["content"], piece["tokens"], piece["stop"]) for piece in pieces] == [
        (letter, [ord(letter)], False) for letter in "abc"
    ]
    assert all(set(piece) == PART for piece in pieces) and [p["tokens_predicted"] for p in pieces] == [1, 2, 3]
    assert set(last) == WHOLE and last["stop"] and (last["content"], last["tokens_predicted"]) == ("", 3)


def test_each_form_of_prompt_is_read(fake, client):
    for prompt, wanted in (
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        ([97, "bc", 100], ["abcd"]),
        ({"prompt_string": "ab"}, ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        (["ab", [97, "c"], {"prompt_string": "d"}], ["ab", "ac", "d"]),
    ):
        fake.engine.reset()
        answer = client.whole(prompt=prompt)
        assert sorted(prompts(fake)) == sorted(wanted)
        assert [one["prompt"] for one in (answer if isinstance(answer, list) else [answer])] == wanted


def test_parameters_reach_the_engine(fake, client):
    client.whole(
        prompt="Hi", n_predict=9, temperature=0.5, top_k=7, top_p=0.6, min_p=0.1, seed=5, stop=["x"],
        repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, n_probs=3, ignore_eos=True,
        logit_bias=[[65, 1.5], ["BC", -2], [70, False]],
    )  # fmt: skip
    got = params(fake)
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (0.5, 7, 0.6, 0.1, 5)
    assert (got.max_tokens, got.stop, got.logprobs, got.ignore_eos) == (9, ("x",), 3, True)
    assert (got.repetition_penalty, got.presence_penalty, got.frequency_penalty) == (1.1, 0.2, 0.3)
    assert got.logit_bias == {65: 1.5, 66: -2, 67: -2, 70: -100}
    client.whole(prompt="Hi", logit_bias={"65": 1, "B": False})
    assert params(fake).logit_bias == {65: 1, 66: -100}


def test_what_is_not_said_is_as_llama_cpp_has_it(fake, client):
    client.whole(prompt="Hi", n_predict=-1, seed=-1)
    got = params(fake)
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (0.8, 40, 0.95, 0.05, None)
    assert got.max_tokens == fake.engine.max_model_len
    shown = client.get("/props")["default_generation_settings"]
    assert (shown["params"]["temperature"], shown["params"]["top_k"], shown["n_ctx"]) == (0.8, 40, 100)


@pytest.mark.parametrize("samplers", [["top_k"], "k"])
def test_a_sampler_that_is_not_named_is_not_used(fake, client, samplers):
    client.whole(prompt="Hi", samplers=samplers, temperature=0.5, repeat_penalty=1.5)
    got = params(fake)
    assert (got.top_k, got.top_p, got.min_p, got.temperature, got.repetition_penalty) == (40, 1, 0, 1, 1)


def test_grammars_and_schemas_hold_the_answer(fake, client, tiny):
    client.whole(prompt="Hi", grammar='root ::= "a"')
    assert params(fake).structured.grammar == 'root ::= "a"'
    client.whole(prompt="Hi", json_schema={"type": "object"})
    assert json.loads(params(fake).structured.json) == {"type": "object"}
    assert tiny.whole(prompt="a", grammar='root ::= "yes"', n_predict=20)["content"] == "yes"
    assert tiny.refused(prompt="a", grammar="root ::= (").startswith("grammar: ")
    assert tiny.refused(prompt="a", json_schema={"type": "nothing"}).startswith("json_schema: ")


def test_only_the_fields_that_are_asked_for_come(client):
    fields = ["content", "generation_settings/n_predict", "nothing", "timings/nothing"]
    wanted = {"content": "abc", "generation_settings/n_predict": 5}
    assert client.whole(prompt="Hi", n_predict=5, response_fields=fields) == wanted
    assert client.events(prompt="Hi", n_predict=5, response_fields=fields)[-1] == wanted | {"content": ""}


def test_hints_are_taken_and_named(client):
    reply = client.post(prompt="Hi", cache_prompt=True, id_slot=0, n_keep=-1, t_max_predict_ms=500)
    assert reply.status_code == 200
    assert set(reply.headers["x-minivllm-ignored"].split(", ")) == {"id_slot", "n_keep", "t_max_predict_ms"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "prompt is missing"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["a", None]}, "texts and tokens"),
        ({"prompt": [[97, {}]]}, "texts and tokens"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "multimodal_data"),
        ({"prompt": "a" * 200}, "context"),
        ({"prompt": [2**40]}, "vocabulary"),
        ({"prompt": "a", "mirostat": 2}, "mirostat is not supported"),
        ({"prompt": "a", "dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"prompt": "a", "n_probs": 21}, "n_probs"),
        ({"prompt": "a", "repeat_penalty": -1}, "repeat_penalty"),
        ({"prompt": "a", "logit_bias": [[5, True]]}, "logit_bias"),
        ({"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "lora is not supported"),
    ],
)
def test_what_cannot_be_followed_is_refused(fake, client, body, text):
    assert text in client.refused(**body) and not fake.engine.calls


def test_a_real_engine_says_why_it_stopped_and_how_long_it_took(tiny):
    asked = {"prompt": "The sea", "temperature": 0, "n_predict": 12, "n_probs": 2}
    whole = tiny.whole(**asked)
    *pieces, last = tiny.events(**asked)
    assert whole["stop_type"] == last["stop_type"] == "limit" and not whole["truncated"]
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    streamed = [position for piece in pieces for position in piece["completion_probabilities"]]
    assert [position["id"] for position in streamed] == [p["id"] for p in whole["completion_probabilities"]]
    for position in streamed:
        assert position["top_logprobs"][0]["id"] == position["id"] and len(position["top_logprobs"]) == 2
    times = whole["timings"]
    assert times["predicted_n"] == 12 and times["predicted_ms"] > 0 and times["prompt_ms"] > 0
    assert times["cache_n"] + times["prompt_n"] == whole["tokens_evaluated"]
    assert times["predicted_per_second"] == pytest.approx(11e3 / times["predicted_ms"]), "steps behind the first token"
    text = whole["content"]
    word = next(text[i : i + 3] for i in range(1, len(text)) if text.index(text[i : i + 3]) > 0)
    cut = tiny.whole(**asked, stop=[word])
    assert (cut["stop_type"], cut["stopping_word"], cut["content"]) == ("word", word, text[: text.index(word)])
    assert tiny.whole(prompt="a", temperature=0, ignore_eos=True)["truncated"]


def test_several_answers_are_a_list_by_prompt(tiny):
    answers = tiny.whole(prompt=["a", "b"], n_cmpl=2, n_predict=2, seed=1)
    assert [(answer["index"], answer["prompt"]) for answer in answers] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    last = [event for event in tiny.events(prompt=["a", "b"], n_cmpl=2, n_predict=2, seed=1) if event["stop"]]
    assert sorted(event["index"] for event in last) == [0, 1, 2, 3]


def test_a_prompt_can_be_read_alone_for_the_next_request(tiny):
    prompt = "Once upon a time there was a sea. " * 3
    assert tiny.whole(prompt=prompt, n_predict=0)["tokens_predicted"] == 0
    assert tiny.whole(prompt=prompt, n_predict=1)["tokens_cached"] > 0


def test_an_error_inside_a_stream_is_its_last_event(fake, client):
    fake.engine.script = ["a", RuntimeError("boom"), "b"]
    assert "internal error" in client.events(prompt="Hi")[-1]["error"]["message"]


def test_a_client_that_leaves_ends_its_request(fake, client, eventually):
    fake.engine.script = ["a", threading.Event(), "b"]
    with client.http.stream("POST", "/completion", json={"prompt": "Hi", "stream": True}) as reply:
        next(reply.iter_lines())
    eventually(lambda: fake.engine.num_closed_early == 1 and fake.engine.num_open == 0)


def test_completions_without_v1_stay_openais(client):
    assert client.whole("completions", prompt="Hi")["object"] == "text_completion"


# --------------------------------------------------------------------------------------------------------------- infill


@pytest.fixture
def filling(serving):
    engine = FakeEngine()
    engine.tokenizer = FillingTokenizer()
    with serving(engine) as url:
        yield SimpleNamespace(client=Client(url), engine=engine)


def test_infill_asks_for_the_middle(filling):
    extra = [{"filename": "a.py", "text": "x = 1\n"}]
    answer = filling.client.whole("infill", input_prefix="f(", input_suffix=")", input_extra=extra, prompt="a, ")
    assert set(answer) == WHOLE and answer["content"] == "abc"
    assert answer["prompt"] == "x = 1\n<fim_prefix>f(<fim_suffix>)<fim_middle>a, "
    assert 0x110003 in filling.engine.calls[0].params.stop_token_ids


def test_a_model_that_knows_no_middle_says_so(client):
    assert "no tokens for filling in" in client.refused("infill", input_prefix="a", input_suffix="b")
    assert "input_suffix" in client.refused("infill", input_prefix="a")


# ------------------------------------------------------------------------------------------------- what the server is


def test_a_template_is_applied_and_no_more(fake, client):
    assert client.whole("apply-template", messages=HELLO) == {"prompt": "<u>Hi<a>"}
    assert client.whole("apply-template", messages=HELLO, add_generation_prompt=False) == {"prompt": "<u>Hi"}
    assert "chat_template is not supported" in client.refused("apply-template", messages=HELLO, chat_template="x")
    assert not fake.engine.calls


def test_tokens_and_texts_go_both_ways_in_llama_cpps_form(client, tiny):
    assert client.whole("tokenize", content="ab") == {"tokens": [97, 98]}
    pieces = client.whole("tokenize", content="ab", with_pieces=True)
    assert pieces == {"tokens": [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]}
    assert client.whole("detokenize", tokens=[97, 98])["content"] == "ab"
    parts = [token["piece"] for token in tiny.whole("tokenize", content="á€", with_pieces=True)["tokens"]]
    found = b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in parts)
    assert found.decode() == "á€" and any(isinstance(part, list) for part in parts)
    assert "count" in client.whole("tokenize", prompt="ab")


def test_props_and_slots_say_what_is_served(tiny):
    about, slots = tiny.get("/props"), tiny.get("/slots")
    assert about["default_generation_settings"]["n_ctx"] == 256 and about["model_alias"] == "tiny"
    assert "messages" in about["chat_template"] and about["modalities"] == {"vision": False, "audio": False}
    assert len(slots) == about["total_slots"] and [slot["id"] for slot in slots] == list(range(len(slots)))
    assert not any(slot["is_processing"] or slot["speculative"] for slot in slots)
    assert tiny.http.get("/slots?fail_on_no_slot=1").status_code == 200
    for path in ("slots/0?action=erase", "lora-adapters"):
        reply = tiny.post(path)
        assert reply.status_code == 501 and "not supported" in reply.json()["error"]["message"]


def test_a_key_guards_all_of_it(fake_engine, serving):
    with serving(fake_engine, api_keys=["k"]) as url:
        for method, path in (("GET", "props"), ("GET", "slots"), ("POST", "completion"), ("POST", "apply-template")):
            assert httpx.request(method, f"{url}/{path}").status_code == 401
        assert httpx.get(f"{url}/props", headers={"authorization": "Bearer k"}).status_code == 200
