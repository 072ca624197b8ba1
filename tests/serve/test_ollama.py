"""/api: the shapes are those of Ollama's api/types.go; its Python client was tried against the same server."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace

import httpx
import pytest
from pooling.tiny import TEXTS, write_bert
from serve.conftest import FakeEngine, FillingTokenizer

from minivllm.engine.async_llm import AsyncLLM
from minivllm.serve.reasoning.parsers import Qwen3Reader

HELLO = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


class Client:
    def __init__(self, url):
        self.http = httpx.Client(base_url=url, timeout=30)

    def post(self, path, **body):
        return self.http.post(f"/api/{path}", json=body)

    def whole(self, path, **body):
        reply = self.post(path, stream=False, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "application/json"
        return reply.json()

    def lines(self, path, **body):
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in reply.text.splitlines()]

    def refused(self, path, **body):
        reply = self.post(path, **body)
        assert reply.status_code == 400 and set(reply.json()) == {"error"}, reply.text
        return reply.json()["error"]


@pytest.fixture
def client(fake):
    return Client(fake.url)


@pytest.fixture(scope="session")
def tiny(tiny_url):
    return Client(tiny_url)


def params(fake):
    return fake.engine.calls[-1].params


def prompt(fake):
    return bytes(fake.engine.calls[-1].prompt["prompt_token_ids"]).decode()


# ------------------------------------------------------------------------------------------------------------- answers


def test_a_chat_streams_by_default_and_its_last_line_has_the_figures(fake, client):
    *pieces, last = client.lines("chat", model="fake", messages=HELLO)
    assert [piece["message"] for piece in pieces] == [{"role": "assistant", "content": c} for c in "abc"]
    assert not any(piece["done"] or FIGURES & set(piece) for piece in pieces)
    assert last["done"] and last["done_reason"] == "stop" and last["message"]["content"] == ""
    assert set(last) >= FIGURES and (last["prompt_eval_count"], last["eval_count"]) == (len("<u>Hi<a>"), 3)
    assert last["created_at"].endswith("Z") and last["model"] == "fake"
    whole = client.whole("chat", model="fake", messages=HELLO)
    assert whole["message"] == {"role": "assistant", "content": "abc"} and whole["done"] and set(whole) >= FIGURES


def test_generate_is_a_chat_of_one_message_unless_raw(fake, client):
    *pieces, last = client.lines("generate", prompt="Hi", system="Be brief")
    assert prompt(fake) == "<s>Be brief<u>Hi<a>"
    assert "".join(piece["response"] for piece in pieces) == "abc" and last["done"] and last["response"] == ""
    raw = client.whole("generate", prompt="Hi", raw=True)
    assert prompt(fake) == "Hi" and raw["response"] == "abc" and "context" not in raw


def test_a_prompt_goes_on_behind_an_earlier_answers_context(fake, client):
    first = client.whole("generate", prompt="Hi")
    assert bytes(first["context"]).decode() == "<u>Hi<a>abc"
    *_, last = client.lines("generate", prompt="And?", context=first["context"])
    assert prompt(fake) == "<u>Hi<a>abc<u>And?<a>" and bytes(last["context"]).decode() == prompt(fake) + "abc"


@pytest.mark.parametrize(("path", "text"), [("chat", {"messages": []}), ("generate", {"prompt": ""}), ("chat", {})])
def test_without_a_prompt_the_model_is_only_loaded(fake, client, path, text):
    reply = client.post(path, model="fake", keep_alive="5m", **text)
    assert reply.json()["done"] and reply.json()["done_reason"] == "load" and not fake.engine.calls
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-minivllm-ignored"] == "keep_alive"


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", "0m0s", 0.0])
@pytest.mark.parametrize(("path", "text"), [("chat", {"messages": []}), ("generate", {"prompt": ""}), ("generate", {})])
def test_no_time_to_keep_the_model_is_answered_as_an_unload(client, path, text, keep_alive):
    reply = client.post(path, model="fake", keep_alive=keep_alive, **text)
    assert reply.json()["done"] and reply.json()["done_reason"] == "unload"
    for longer in (-1, "5m", "0h5m", None):
        assert client.post(path, model="fake", keep_alive=longer, **text).json()["done_reason"] == "load"


def test_a_real_engine_gives_times_reasons_and_log_probabilities(tiny):
    asked = {"messages": HELLO, "options": {"num_predict": 6, "temperature": 0}}
    *pieces, last = tiny.lines("chat", logprobs=True, top_logprobs=2, **asked)
    whole = tiny.whole("chat", logprobs=True, top_logprobs=2, **asked)
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    for answer in (last, whole):
        assert answer["done_reason"] == "length" and answer["eval_count"] == 6
        assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] > 0
    found = [position for piece in pieces for position in piece.get("logprobs", ())]
    assert len(found) == len(whole["logprobs"]) == 6
    for position in found:
        assert position["logprob"] == position["top_logprobs"][0]["logprob"] and len(position["top_logprobs"]) == 2
    raw = tiny.whole("generate", raw=True, prompt="a", logprobs=True, options={"num_predict": 2, "temperature": 0})
    assert len(raw["logprobs"]) == 2 and not raw["logprobs"][0]["top_logprobs"]


def test_a_schema_that_is_none_names_the_field(tiny):
    assert tiny.refused("chat", messages=HELLO, format={"type": "nothing"}).startswith("format: ")


def test_a_limit_beyond_the_context_is_no_error(tiny):
    options = {"num_predict": 10**6, "temperature": 0}
    assert tiny.whole("generate", prompt="a", options=options)["done_reason"] in ("length", "stop")


# -------------------------------------------------------------------------------------------------------------- options


def test_options_reach_the_engine(fake, client):
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.6, "min_p": 0.1, "seed": 5, "stop": ["x"], "num_predict": 9,
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
    }  # fmt: skip
    for path, text in (("chat", {"messages": HELLO}), ("generate", {"prompt": "Hi"})):
        client.whole(path, options=options, **text)
        got = params(fake)
        assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (0.5, 7, 0.6, 0.1, 5)
        assert (got.stop, got.max_tokens, got.repetition_penalty) == (("x",), 9, 1.1)
        assert (got.presence_penalty, got.frequency_penalty) == (0.2, 0.3)


def test_what_is_not_said_is_as_ollama_has_it(fake, client):
    client.whole("chat", messages=HELLO, options={"seed": -1, "num_predict": -1})
    got = params(fake)
    assert (got.temperature, got.top_k, got.top_p, got.seed, got.repetition_penalty) == (0.8, 40, 0.9, None, 1.0)
    assert got.max_tokens == fake.engine.max_model_len


def test_no_penalties_if_they_look_at_no_tokens(fake, client):
    client.whole("chat", messages=HELLO, options={"repeat_penalty": 1.5, "repeat_last_n": 0})
    assert params(fake).repetition_penalty == 1.0


def test_what_the_server_decides_is_named_as_ignored(client):
    reply = client.post("chat", messages=HELLO, options={"num_ctx": 8192, "repeat_last_n": 64, "numa": True})
    assert reply.status_code == 200
    named = set(reply.headers["x-minivllm-ignored"].split(", "))
    assert named == {"options.num_ctx", "options.repeat_last_n", "options.numa"}


def test_format_holds_the_answer(fake, client):
    client.whole("chat", messages=HELLO, format=CITY)
    assert json.loads(params(fake).structured.json) == CITY
    client.whole("generate", prompt="Hi", format="json")
    assert params(fake).structured.json_object
    client.whole("chat", messages=HELLO, format="")
    assert params(fake).structured is None


def test_think_is_the_templates_switch(fake, client):
    client.whole("chat", messages=HELLO, think=False)
    assert fake.engine.tokenizer.rendered["enable_thinking"] is False
    client.whole("chat", messages=HELLO, think="high")
    rendered = fake.engine.tokenizer.rendered
    assert (rendered["enable_thinking"], rendered["reasoning_effort"]) == (True, "high")


def test_a_last_message_of_the_assistant_is_gone_on_with(fake, client):
    client.whole("chat", messages=[*HELLO, {"role": "assistant", "content": "Well,"}])
    assert prompt(fake) == "<u>Hi<a>Well,"


# ---------------------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize("letters", [False, True])
def test_a_call_is_whole_and_its_arguments_are_an_object(fake, client, letters):
    text = f"Let me look. {CALL}{CALL}"
    fake.engine.script = list(text) if letters else [text]
    whole = client.whole("chat", messages=HELLO, tools=[WEATHER])["message"]
    lines = client.lines("chat", messages=HELLO, tools=[WEATHER])
    streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
    for calls in (whole["tool_calls"], streamed):
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        assert named == [("weather", {"city": "Paris"})] * 2
        assert [call["function"]["index"] for call in calls] == [0, 1] and calls[0]["id"] != calls[1]["id"]
    said = "".join(line["message"]["content"] for line in lines)
    assert said.strip() == whole["content"].strip() == "Let me look."
    assert lines[-1]["done_reason"] == "stop"
    assert fake.engine.tokenizer.rendered["tools"][0]["function"]["parameters"] == CITY


def test_results_find_their_calls_without_ids(fake, client):
    calls = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("weather", "now")]
    turns = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    results = [{"role": "tool", "content": "12:00", "tool_name": "now"}, {"role": "tool", "content": "rain"}]
    client.whole("chat", messages=[*turns, *results], tools=[WEATHER])
    _, called, now, weather = fake.engine.tokenizer.rendered["messages"]
    ids = {call["function"]["name"]: call["id"] for call in called["tool_calls"]}
    assert (now["tool_call_id"], weather["tool_call_id"]) == (ids["now"], ids["weather"])
    assert "waits for this result" in client.refused("chat", messages=[*turns, *results, results[1]])


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": HELLO, "format": "xml"}, "format must be"),
        ("chat", {"messages": HELLO, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        ("chat", {"messages": HELLO, "options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
        ("chat", {"messages": HELLO, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("chat", {"messages": HELLO, "_debug_render_only": True}, "apply-template"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"prompt": "x", "raw": True, "system": "y"}, "raw=true"),
        ("generate", {"prompt": "x", "suffix": "y"}, "no tokens for filling in the middle"),
        ("generate", {"prompt": "x" * 200}, "context"),
        ("generate", {"prompt": "x", "context": [2**40]}, "vocabulary"),
        ("embed", {"input": "x"}, "embeds texts"),
    ],
)
def test_errors_have_ollamas_shape(fake, client, path, body, text):
    assert text in client.refused(path, **body) and not fake.engine.calls


def test_a_name_may_have_the_tag_latest(client):
    assert client.whole("chat", model="fake:latest", messages=HELLO)["model"] == "fake:latest"
    reply = client.post("chat", model="llama3", messages=HELLO)
    assert reply.status_code == 404 and "llama3" in reply.json()["error"]


def test_an_error_inside_a_stream_is_a_line(fake, client):
    fake.engine.script = ["a", RuntimeError("boom"), "b"]
    *_, last = client.lines("chat", messages=HELLO)
    assert "internal error" in last["error"]


def test_a_client_that_leaves_ends_its_request(fake, client, eventually):
    fake.engine.script = ["a", threading.Event(), "b"]
    with client.http.stream("POST", "/api/chat", json={"messages": HELLO}) as reply:
        next(reply.iter_lines())
    eventually(lambda: fake.engine.num_closed_early == 1 and fake.engine.num_open == 0)


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete", "blobs/sha256:1", "me"])
def test_what_manages_models_is_refused_by_name(client, path):
    reply = client.http.request("DELETE" if path == "delete" else "POST", f"/api/{path}", json={"model": "x"})
    assert reply.status_code == 501 and path.partition("/")[0] in reply.json()["error"]


# --------------------------------------------------------------------------------------------------------------- models


def test_the_model_is_listed_loaded_and_shown(fake, client):
    (listed,) = client.http.get("/api/tags").json()["models"]
    (loaded,) = client.http.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == loaded["name"] == "fake:latest"
    assert listed["digest"] == loaded["digest"] and loaded["context_length"] == 100
    shown = client.post("show", model=listed["name"]).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 100
    assert shown["capabilities"] == ["completion", "tools"] and shown["details"] == listed["details"]
    assert client.post("show", name="fake").json()["model_info"] == shown["model_info"]
    assert client.post("show", model="x").status_code == 404
    assert client.http.get("/api/version").json() == client.http.get("/version").json()


def test_there_is_a_server_at_the_root_with_the_page_and_without(client, fake_engine, serving):
    assert client.http.head("/").status_code == 200
    with serving(fake_engine, with_page=False) as url:
        assert httpx.head(url).status_code == 200 and httpx.get(url).status_code == 404


def test_a_key_guards_all_of_it(fake_engine, serving):
    with serving(fake_engine, api_keys=["k"]) as url:
        for method, path in (("GET", "tags"), ("GET", "ps"), ("POST", "chat"), ("POST", "pull"), ("DELETE", "delete")):
            reply = httpx.request(method, f"{url}/api/{path}")
            assert reply.status_code == 401 and "--api-key" in reply.json()["error"]
        assert httpx.get(f"{url}/api/tags", headers={"authorization": "Bearer k"}).status_code == 200
        assert httpx.head(url).status_code == 200


@pytest.fixture
def filling(serving):
    engine = FakeEngine()
    engine.tokenizer = FillingTokenizer()
    with serving(engine) as url:
        yield SimpleNamespace(client=Client(url), engine=engine)


def test_a_suffix_is_for_models_that_know_the_middle(filling):
    assert filling.client.whole("generate", prompt="def f(", suffix="): pass")["response"] == "abc"
    assert prompt(filling) == "<fim_prefix>def f(<fim_suffix>): pass<fim_middle>"
    assert 0x110003 in params(filling).stop_token_ids
    assert "insert" in filling.client.post("show").json()["capabilities"]


# -------------------------------------------------------------------------------------------------------------- vectors


@pytest.fixture(scope="module")
def embedder(tmp_path_factory, serving):
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    with serving(AsyncLLM(str(folder), overrides={"executor.num_threads": 1}), names=("tiny",)) as url:
        yield Client(url)


def test_embed_gives_unit_vectors_and_cuts_texts_that_are_too_long(embedder):
    vectors = embedder.post("embed", model="tiny:latest", input=TEXTS, dimensions=10).json()
    assert len(vectors["embeddings"]) == len(TEXTS) and vectors["prompt_eval_count"] > 0
    assert all(len(v) == 10 and math.isclose(math.hypot(*v), 1, abs_tol=1e-5) for v in vectors["embeddings"])
    assert embedder.post("embed", input="the sea " * 100).status_code == 200
    assert "this model takes 64" in embedder.refused("embed", input="the sea " * 100, truncate=False)
    assert embedder.post("embed", input=[]).json()["embeddings"] == []


def test_the_older_form_gives_one_vector(embedder):
    (wanted,) = embedder.http.post("/v1/embeddings", json={"input": TEXTS[0]}).json()["data"]
    assert embedder.post("embeddings", prompt=TEXTS[0]).json() == {"embedding": wanted["embedding"]}
    assert embedder.post("embeddings", prompt="").json() == {"embedding": []}
    assert embedder.post("show").json()["capabilities"] == ["embedding"]
    assert "generates text" in embedder.refused("chat", messages=HELLO)


def test_thinking_stands_beside_the_content_whole_and_in_lines(fake_engine, serving):
    text = "<think>Hm. So.</think>Yes."
    with serving(fake_engine, reasoning_parser=Qwen3Reader) as url:
        client = Client(url)
        fake_engine.script = [text]
        whole = client.whole("chat", messages=HELLO)["message"]
        assert (whole["thinking"], whole["content"]) == ("Hm. So.", "Yes.")
        fake_engine.script = list(text)
        lines = [line["message"] for line in client.lines("chat", messages=HELLO)]
        fake_engine.script = [text]
        made = client.whole("generate", prompt="Hi")
        assert (made["thinking"], made["response"]) == ("Hm. So.", "Yes.")
        assert client.whole("generate", prompt="Hi", raw=True)["response"] == text, "as it is: no template, no reader"
        client.whole("generate", prompt="Hi", format="json")
        assert fake_engine.calls[-1].params.structured.prelude, "the grammar begins behind the thinking"
        fake_engine.script = list(text)
        generated = client.lines("generate", prompt="Hi")
    for told, said in (lines, "content"), (generated, "response"):
        assert "".join(line.get("thinking", "") for line in told) == "Hm. So."
        assert "".join(line[said] for line in told) == "Yes."
