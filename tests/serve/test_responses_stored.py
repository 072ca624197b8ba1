"""Responses that are kept: with the `openai` package, at a served dummy and at an engine that does what a test says."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import msgspec
import openai
import pytest
from eventually import eventually as wait_for
from serve.conftest import FakeEngine

from minivllm.serve.rate_limit import RateLimit
from minivllm.serve.response_store import Record, ResponseStore

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"]}
BACKGROUND = {"background": True}


def client_of(url, key="x"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "responses.sqlite"


@pytest.fixture(scope="module")
def one_keeper(serving, tmp_path_factory):
    path, engine = tmp_path_factory.mktemp("store") / "responses.sqlite", FakeEngine()
    with serving(engine, response_store=ResponseStore(path, 0.0)) as url:
        yield served(engine, url, path=path)


@pytest.fixture
def kept(one_keeper):
    """A server that keeps what it answers."""
    one_keeper.engine.reset()
    return one_keeper


def served(engine, url, key="x", **more):
    client = client_of(url, key)

    def ask(**fields):
        return client.responses.create(**{"model": "fake", "input": "Hi", **fields})

    return SimpleNamespace(engine=engine, url=url, responses=client.responses, ask=ask, **more)


@pytest.fixture
def gate(kept, eventually):
    """The engine's next answers wait for it, after a letter."""
    gate = threading.Event()
    kept.engine.script = ["a", gate, "b"]
    yield gate
    gate.set()
    eventually(lambda: kept.engine.num_open == 0)


def prompt(engine):
    return bytes(engine.calls[-1].prompt["prompt_token_ids"]).decode()


def looks(asks):
    """All that one can do with the id of a response."""
    responses = asks.responses
    return responses.retrieve, responses.delete, responses.cancel, responses.input_items.list


def texts(items):
    return [item.content[0].text for item in items]


# --------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_read_again_as_it_was(kept, streamed):
    fields = {"metadata": {"a": "b"}, "instructions": "Be brief", "tools": [WEATHER], "temperature": 0.5}
    if streamed:
        *_, last = kept.ask(stream=True, **fields)
        answer = last.response
    else:
        answer = kept.ask(**fields)
    assert answer.store and answer.completed_at >= answer.created_at and answer.status == "completed"
    assert kept.responses.retrieve(answer.id) == answer


def test_a_restart_loses_nothing(serving, fake_engine, path):
    with serving(fake_engine, response_store=ResponseStore(path, 0.0)) as url:
        answer = served(fake_engine, url).ask(input="One")
    fake_engine.reset()
    with serving(fake_engine, response_store=ResponseStore(path, 0.0)) as url:
        again = served(fake_engine, url)
        assert again.responses.retrieve(answer.id) == answer
        assert again.ask(input="Two", previous_response_id=answer.id).previous_response_id == answer.id
    assert prompt(fake_engine) == "<u>One<a>abc<u>Two<a>"


def test_a_conversation_goes_on_without_the_earlier_instructions(kept):
    one = kept.ask(input="One", instructions="Be brief")
    two = kept.ask(input="Two", instructions="Be kind", previous_response_id=one.id)
    kept.ask(input=[{"role": "user", "content": "Three"}], previous_response_id=two.id)
    assert prompt(kept.engine) == "<u>One<a>abc<u>Two<a>abc<u>Three<a>"
    kept.ask(input="Other", previous_response_id=one.id)
    assert prompt(kept.engine) == "<u>One<a>abc<u>Other<a>"


def test_a_result_answers_the_call_of_the_response_before(kept):
    kept.engine.script = [f"Hm {CALL}"]
    called = kept.ask(tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": called.output[1].call_id, "output": "rain"}
    kept.ask(tools=[WEATHER], input=[result], previous_response_id=called.id)
    messages = kept.engine.tokenizer.rendered["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"] and messages[1]["tool_calls"]
    with pytest.raises(openai.BadRequestError) as info:
        kept.ask(input=[{**result, "call_id": "c9"}], previous_response_id=called.id)
    assert info.value.param == "input[0].call_id", "places are those of what was sent"


def test_what_is_not_to_be_kept_is_not(kept):
    answer = kept.ask(store=False)
    assert not answer.store
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(answer.id)


def test_a_response_that_is_deleted_is_gone(kept):
    one = kept.ask()
    two = kept.ask(previous_response_id=one.id)
    kept.responses.delete(one.id)
    for forget in (kept.responses.delete, kept.responses.retrieve, kept.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is kept here"):
            forget(one.id)
    for previous in (one.id, two.id):
        with pytest.raises(openai.BadRequestError, match=one.id) as info:
            kept.ask(previous_response_id=previous)
        assert (info.value.code, info.value.param) == ("previous_response_not_found", "previous_response_id")
    assert kept.responses.retrieve(two.id) == two


def test_an_answer_that_cannot_be_kept_says_so(serving, fake_engine, path, caplog):
    with serving(fake_engine, response_store=ResponseStore(path, 0.0, max_bytes=500)) as url:
        answer = served(fake_engine, url).ask()
        assert answer.output_text == "abc" and not answer.store
        with pytest.raises(openai.BadRequestError, match="store-max-bytes"):
            served(fake_engine, url).ask(**BACKGROUND)
    assert f"{answer.id} is not kept" in caplog.text


def test_a_conversation_may_be_as_long_as_one_that_is_sent(serving, fake_engine, path):
    with serving(fake_engine, response_store=ResponseStore(path, 0.0), max_body_bytes=2500) as url:
        keeps = served(fake_engine, url)
        one = keeps.ask()
        two = keeps.ask(previous_response_id=one.id)
        three = keeps.ask(previous_response_id=two.id)
        with pytest.raises(openai.BadRequestError, match="more than 2500 bytes") as info:
            keeps.ask(previous_response_id=three.id)
        assert info.value.code == "conversation_too_long"


# ----------------------------------------------------------------------------------------------------- input items


def test_the_input_of_a_response_is_its_conversation_page_by_page(kept):
    kept.engine.script = [f"Hm {CALL}"]
    one = kept.ask(input="One", tools=[WEATHER])
    kept.engine.script = ["b"]
    result = {"type": "function_call_output", "call_id": one.output[1].call_id, "output": "rain"}
    two = kept.ask(input=[result, {"role": "developer", "content": "Now"}], previous_response_id=one.id)
    three = kept.ask(input="Three", previous_response_id=two.id)
    items = list(kept.responses.input_items.list(three.id, order="asc", limit=2))  # of several pages
    kinds = ["message", "message", "function_call", "function_call_output", "message", "message", "message"]
    assert [item.type for item in items] == kinds
    assert texts([items[0], items[1], *items[4:]]) == ["One", "Hm", "Now", "b", "Three"]
    assert [item.id for item in items[1:3]] == [item.id for item in one.output]
    assert all(item.id and item.status == "completed" for item in items)
    assert list(kept.responses.input_items.list(three.id)) == items[::-1], "the last first, if not asked otherwise"
    page = kept.responses.input_items.list(three.id, order="asc", after=items[4].id)
    assert page.data == items[5:] and not page.has_more
    assert kept.responses.input_items.list(one.id).data == items[:1]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after"),
     ("include[]=x", "include[0]")],
)  # fmt: skip
def test_bad_pages_are_refused_by_name(kept, query, param):
    reply = httpx.get(f"{kept.url}/v1/responses/{kept.ask().id}/input_items?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_parameter_that_nobody_knows_is_named(kept):
    reply = httpx.get(f"{kept.url}/v1/responses/{kept.ask().id}?limits=5&include[]=reasoning.encrypted_content")
    assert (reply.status_code, reply.headers["x-minivllm-ignored"]) == (200, "limits")


def test_tokens_are_counted_as_they_are_asked_for(kept):
    one = kept.ask(input="One", instructions="Be brief")
    asked = {"input": "Two", "instructions": "Be kind", "previous_response_id": one.id}
    counted = kept.responses.input_tokens.count(model="fake", **asked)
    assert counted.object == "response.input_tokens" and counted.input_tokens == kept.ask(**asked).usage.input_tokens
    assert kept.responses.input_tokens.count(input="x" * 500).input_tokens == 506, "also what no answer has room for"
    with pytest.raises(openai.BadRequestError):
        kept.responses.input_tokens.count(input="x", conversation="c")


# ------------------------------------------------------------------------------------------------------ background


def test_a_response_in_the_background_is_queued_then_works_then_is_there(kept, gate, eventually):
    queued = kept.ask(input="One", **BACKGROUND)
    assert (queued.status, queued.background, queued.store, queued.output) == ("queued", True, True, [])
    eventually(lambda: kept.responses.retrieve(queued.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        kept.ask(previous_response_id=queued.id)
    gate.set()
    eventually(lambda: kept.responses.retrieve(queued.id).status == "completed")
    answer = kept.responses.retrieve(queued.id)
    assert (answer.output_text, answer.usage.output_tokens, answer.error) == ("ab", 2, None)
    assert kept.responses.cancel(answer.id) == answer, "what is over stays as it was"
    kept.ask(input="Two", previous_response_id=queued.id)
    assert prompt(kept.engine) == "<u>One<a>ab<u>Two<a>"


def test_it_works_on_when_the_client_leaves_a_stream_that_can_be_taken_up_again(kept, gate, eventually):
    with kept.ask(stream=True, **BACKGROUND) as stream:
        begun = [next(stream) for _ in range(3)]
    assert [event.type for event in begun] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in begun] == ["queued", "queued", "in_progress"]
    id = begun[0].response.id
    followed = kept.responses.retrieve(id, stream=True, starting_after=1)
    assert next(followed) == begun[2]
    gate.set()
    rest = list(followed)
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "ab"
    whole = list(kept.responses.retrieve(id, stream=True))
    assert [event.sequence_number for event in whole] == list(range(len(whole))) and whole == [*begun, *rest]
    assert list(kept.responses.retrieve(id, stream=True, starting_after=len(whole) - 1)) == []
    assert kept.responses.retrieve(id) == whole[-1].response


def test_the_events_are_there_after_a_restart(serving, fake_engine, path):
    with serving(fake_engine, response_store=ResponseStore(path, 0.0)) as url:
        whole = list(served(fake_engine, url).ask(stream=True, **BACKGROUND))
    fake_engine.reset()
    with serving(fake_engine, response_store=ResponseStore(path, 0.0)) as url:
        stream = served(fake_engine, url).responses.retrieve(whole[0].response.id, stream=True, starting_after=3)
        assert list(stream) == whole[4:]


def test_one_that_is_cancelled_keeps_what_it_had(kept, gate, eventually):
    with kept.ask(stream=True, **BACKGROUND) as stream:
        events = [next(stream) for _ in range(6)]
        id = events[0].response.id
        cancelled = kept.responses.cancel(id)
        events += stream
    assert (cancelled.status, cancelled.output_text, cancelled.output[0].status) == ("cancelled", "a", "incomplete")
    assert (events[-1].type, events[-1].code) == ("error", "response_cancelled")
    assert kept.responses.cancel(id) == kept.responses.retrieve(id) == cancelled
    assert list(kept.responses.retrieve(id, stream=True)) == events
    assert kept.engine.num_open == 0 and kept.engine.num_closed_early == 1


def test_one_that_is_deleted_works_no_longer(kept, gate, eventually):
    queued = kept.ask(**BACKGROUND)
    eventually(lambda: kept.engine.num_open == 1)
    kept.responses.delete(queued.id)
    assert kept.engine.num_open == 0
    with pytest.raises(openai.NotFoundError):
        kept.responses.retrieve(queued.id)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_another_server_of_the_store_can_stop_it(serving, kept, gate, eventually, how):
    with kept.ask(stream=True, **BACKGROUND) as stream:
        id = next(stream).response.id
        eventually(lambda: kept.engine.num_open == 1)
        with serving(FakeEngine(), response_store=ResponseStore(kept.path, 0.0)) as url:
            other = served(None, url)
            if how == "cancel":
                assert other.responses.cancel(id).status == "cancelled"
                (told,) = other.responses.retrieve(id, stream=True)
                assert (told.type, told.code) == ("error", "response_cancelled")
            else:
                other.responses.delete(id)
            eventually(lambda: kept.engine.num_open == 0)
        *_, last = stream
        assert (last.type, last.code) == ("error", "response_cancelled")
    assert httpx.get(f"{kept.url}/load").json() == {"server_load": 0}


def test_a_stream_is_followed_at_another_server_of_the_store(serving, kept, gate):
    with kept.ask(stream=True, **BACKGROUND) as stream:
        begun = [next(stream) for _ in range(3)]
        with serving(FakeEngine(), response_store=ResponseStore(kept.path, 0.0)) as url:
            gate.set()
            followed = list(served(None, url).responses.retrieve(begun[0].response.id, stream=True))
        assert followed == [*begun, *stream]


def test_one_that_the_engine_cannot_finish_has_failed(kept, eventually):
    kept.engine.script = ["a", RuntimeError("the secret of the engine")]
    *_, last = kept.ask(stream=True, **BACKGROUND)
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    found = kept.responses.retrieve(last.response.id)
    assert found == last.response and found.status == "failed" and "secret" not in found.error.message


def test_a_server_that_stops_fails_what_it_works_on(serving, fake_engine, path):
    fake_engine.script = ["a", threading.Event(), "b"]
    with serving(fake_engine, response_store=ResponseStore(path, 0.0)) as url:
        stream = served(fake_engine, url).ask(stream=True, **BACKGROUND)
        events = [next(stream) for _ in range(4)]
        plain = served(fake_engine, url).ask(**BACKGROUND)
    assert fake_engine.num_open == 0
    with serving(fake_engine, response_store=ResponseStore(path, 0.0)) as url:
        for id in (events[0].response.id, plain.id):
            found = served(fake_engine, url).responses.retrieve(id)
            assert found.status == "failed" and "was stopped" in found.error.message
        *_, last = served(fake_engine, url).responses.retrieve(events[0].response.id, stream=True)
        assert last.type == "response.failed"


def test_a_place_in_the_queue_is_taken_before_the_answer(serving, fake_engine, path):
    fake_engine.script = ["a", threading.Event(), "b"]
    with serving(fake_engine, response_store=ResponseStore(path, 0.0), max_waiting=1) as url:
        asks = served(fake_engine, url)
        ids = [asks.ask(**BACKGROUND).id for _ in range(3)]  # two in a full batch, and one that waits
        with pytest.raises(openai.RateLimitError) as info:
            asks.ask(**BACKGROUND)
        assert info.value.code == "queue_full" and info.value.response.headers["retry-after"]
        assert asks.responses.cancel(ids[0]).status == "cancelled"
        assert asks.ask(**BACKGROUND).status == "queued"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"store": False, **BACKGROUND}, "background"), ({"previous_response_id": "resp_x"}, "previous_response_id")],
)
def test_what_cannot_be_kept_apart_is_refused(kept, fields, param):
    with pytest.raises(openai.BadRequestError) as info:
        kept.ask(**fields)
    assert info.value.param == param


def test_only_what_was_made_so_can_be_cancelled_or_streamed_again(kept, eventually):
    answer = kept.ask()
    with pytest.raises(openai.BadRequestError, match="background=true"):
        kept.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="stream=true"):
        kept.responses.retrieve(answer.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="stream=true"):
        kept.responses.retrieve(answer.id, starting_after=1)


# ----------------------------------------------------------------------------------------------- who, and whether


def test_a_key_finds_its_own_responses_alone_also_after_a_restart(serving, fake_engine, path):
    with serving(fake_engine, response_store=ResponseStore(path, 0.0), api_keys=["ann's key"]) as url:
        id = served(fake_engine, url, "ann's key").ask().id
    fake_engine.reset()
    with serving(fake_engine, response_store=ResponseStore(path, 0.0), api_keys=["bob's", "ann's key"]) as url:
        ann, bob = served(fake_engine, url, "ann's key"), served(fake_engine, url, "bob's")
        assert ann.responses.retrieve(id).id == id
        for look in looks(bob):
            with pytest.raises(openai.NotFoundError):
                look(id)
        with pytest.raises(openai.BadRequestError, match="is kept here"):
            bob.ask(previous_response_id=id)
        for method in ("GET", "DELETE"):
            assert httpx.request(method, f"{url}/v1/responses/{id}").status_code == 401
        assert ann.ask(previous_response_id=id).status == "completed"
    assert b"ann's" not in path.read_bytes()


def test_a_server_that_keeps_nothing_says_so(fake):
    asks = served(fake.engine, fake.url)
    reply = httpx.post(f"{fake.url}/v1/responses", json={"input": "Hi", "store": True})
    assert reply.headers["x-minivllm-ignored"] == "store" and reply.json()["store"] is False
    for look in looks(asks):
        with pytest.raises(openai.NotFoundError, match="nothing is stored here"):
            look("resp_x")
    for fields in ({"previous_response_id": "resp_x"}, BACKGROUND):
        with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
            asks.ask(**fields)
    assert asks.responses.input_tokens.count(input="Hi").input_tokens == len("<u>Hi<a>")


def test_pages_of_another_origin_may_delete(serving, fake_engine):
    with serving(fake_engine, cors_origins=["https://a.example"]) as url:
        headers = {"origin": "https://a.example", "access-control-request-method": "DELETE"}
        reply = httpx.options(f"{url}/v1/responses/resp_x", headers=headers)
        assert reply.status_code == 200 and "DELETE" in reply.headers["access-control-allow-methods"]


def test_the_document_and_a_wrong_method_tell_of_all_methods(fake):
    paths = httpx.get(f"{fake.url}/openapi.json").json()["paths"]
    assert paths["/v1/responses/{response_id}"].keys() == {"get", "delete"}
    asks = paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [parameter["name"] for parameter in asks] == ["response_id", "limit", "order", "after", "include"]
    reply = httpx.post(f"{fake.url}/v1/responses/resp_x", json={})
    assert reply.status_code == 405 and reply.headers["allow"] == "DELETE, GET, HEAD"


# --------------------------------------------------------------------------------------------------------- a model


@pytest.fixture(scope="module")
def tiny(serving, tmp_path_factory):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 64, "model.dtype": "float32"}, max_model_len=256)
    store = ResponseStore(tmp_path_factory.mktemp("store") / "responses.sqlite", 0.0)
    with serving(engine, Metrics("tiny"), ("tiny",), response_store=store) as url:
        yield client_of(url)


def test_a_conversation_with_a_model_is_the_one_that_is_sent_whole(tiny):
    asked = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
    one = tiny.responses.create(input="One", **asked)
    two = tiny.responses.create(input="Two", previous_response_id=one.id, **asked)
    sent = [{"role": "user", "content": "One"}, *[item.to_dict() for item in one.output]]
    whole = tiny.responses.create(input=[*sent, {"role": "user", "content": "Two"}], store=False, **asked)
    assert (two.output_text, two.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    assert two.status == "incomplete" and tiny.responses.retrieve(two.id) == two


def test_the_background_gives_the_same_answer(tiny, eventually):
    asked = {"model": "tiny", "input": "Grüße 🙂", "max_output_tokens": 12, "temperature": 0}
    queued = tiny.responses.create(**asked, **BACKGROUND)
    eventually(lambda: tiny.responses.retrieve(queued.id).status == "incomplete", 20)
    assert tiny.responses.retrieve(queued.id).output_text == tiny.responses.create(**asked).output_text


def test_logprobs_are_those_of_a_chat_and_are_kept(tiny):
    asked = {"model": "tiny", "temperature": 0}
    chat = tiny.chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}], max_tokens=12, logprobs=True, top_logprobs=2, **asked
    )
    fields = {"input": "Hi", "max_output_tokens": 12, "top_logprobs": 2, **LOGPROBS}
    whole = tiny.responses.create(**asked, **fields)
    events = list(tiny.responses.create(**asked, **fields, stream=True))
    found = whole.output[0].content[0].logprobs
    assert [lp.token for lp in found] == [lp.token for lp in chat.choices[0].logprobs.content][: len(found)]
    assert len(found) >= 11 and [len(lp.top_logprobs) for lp in found] == [2] * len(found)
    told = [lp for event in events if event.type == "response.output_text.delta" for lp in event.logprobs]
    assert [lp.token for lp in told] == [lp.token for lp in found]
    assert events[-1].response.output[0].content[0].logprobs == found
    assert tiny.responses.retrieve(whole.id).output[0].content[0].logprobs == found
    assert tiny.responses.create(input="Hi", max_output_tokens=2, **asked).output[0].content[0].logprobs == []


# ---------------------------------------------------------------------------------------------------------- references


def reference(item) -> dict:
    return {"type": "item_reference", "id": item.id}


def test_an_item_that_is_kept_may_be_sent_by_its_id(kept):
    kept.engine.script = [CALL]
    first = kept.ask(input="Hi", tools=[WEATHER])
    (call,) = first.output
    (asked,) = kept.responses.input_items.list(first.id)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    kept.engine.script = ["a"]
    kept.ask(input=[asked.model_dump(exclude_none=True), call.model_dump(exclude_none=True), result], tools=[WEATHER])
    sent_whole = prompt(kept.engine)
    second = kept.ask(input=[reference(asked), {"id": call.id}, result], tools=[WEATHER])
    assert prompt(kept.engine) == sent_whole
    listed = [item.type for item in kept.responses.input_items.list(second.id)]
    assert listed == ["function_call_output", "function_call", "message"], "what it refers to is kept with it"
    count = kept.responses.input_tokens.count(model="fake", input=[reference(asked)]).input_tokens
    assert count == kept.responses.input_tokens.count(model="fake", input="Hi").input_tokens


def test_an_item_that_is_not_there_is_named(kept, serving, fake_engine):
    (message,) = kept.ask().output
    for wrong in ("msg_1", message.id + "0", "msg_" + "0" * 32 + "o0"):
        with pytest.raises(openai.BadRequestError) as caught:
            kept.ask(input=[{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": wrong}])
        assert caught.value.param == "input[1]" and wrong in caught.value.message
    with serving(fake_engine) as url, pytest.raises(openai.BadRequestError, match="Send the item itself"):
        served(fake_engine, url).ask(input=[reference(message)])


# --------------------------------------------------------------------------------------------------- in fair shares


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {f"k{i}": "v" for i in range(17)}])
def test_metadata_are_sixteen_short_pairs(kept, metadata):
    reply = httpx.post(f"{kept.url}/v1/responses", json={"input": "x", "metadata": metadata})
    assert reply.status_code == 400 and "metadata" in reply.json()["error"]["param"]
    most = {f"{i:064}": "v" * 512 for i in range(16)}
    assert kept.ask(metadata=most).metadata == most


def test_answers_that_are_not_read_take_no_memory_for_what_is_kept(kept, monkeypatch):
    """Each connection has read so far as its buffers hold."""
    read, real = [], ResponseStore.part

    def part(self, seen, column, begin):
        read.append(begin)
        return real(self, seen, column, begin)

    monkeypatch.setattr(ResponseStore, "part", part)
    answer, store = {"id": "resp_long", "output": [], "instructions": "x" * 12_000_000}, ResponseStore(kept.path, 0.0)
    store.put(Record("resp_long", "", b"[]", msgspec.json.encode(answer)), time.time())
    store.close()
    assert httpx.get(f"{kept.url}/v1/responses/resp_long").json() == answer
    parts_of_whole, place = len(read), urlsplit(kept.url)
    assert parts_of_whole > 30
    read.clear()
    clients = []
    for _ in range(10):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((place.hostname, place.port))
        client.sendall(b"GET /v1/responses/resp_long HTTP/1.1\r\nhost: x\r\n\r\n")
        clients.append(client)
    wait_for(lambda: len(read) >= 10)
    assert httpx.get(f"{kept.url}/v1/responses/{kept.ask().id}").status_code == 200
    assert len(read) < 10 * parts_of_whole / 4
    for client in clients:
        client.close()


def test_a_flood_of_one_keys_reading_keeps_no_other_waiting(serving, fake_engine, path, monkeypatch):
    gate, begun, real = threading.Event(), threading.Event(), ResponseStore.page

    def page(self, *args):
        begun.set()
        assert gate.wait(60)
        return real(self, *args)

    monkeypatch.setattr(ResponseStore, "page", page)
    with serving(fake_engine, response_store=ResponseStore(path, 0.0), api_keys=["a", "b"]) as url:

        def asked(key, method="GET", what="", **body):
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request(method, f"{url}/v1/responses{what}", headers=headers, timeout=60, **body)

        one = asked("a", "POST", json={"input": "x"}).json()["id"]
        with ThreadPoolExecutor(20) as pool:
            flood = [pool.submit(asked, "a", what=f"/{one}/input_items") for _ in range(20)]
            assert begun.wait(60)
            other = asked("b", "POST", json={"input": "x"})
            assert other.status_code == 200 and asked("b", what=f"/{other.json()['id']}").status_code == 200
            assert not any(each.done() for each in flood)
            gate.set()
            assert {each.result().status_code for each in flood} == {200}


def test_reading_what_is_kept_counts_among_a_clients_requests(serving, fake_engine, path):
    limit = RateLimit(1e-3, 2)
    with serving(fake_engine, response_store=ResponseStore(path, 0.0), rate_limit=limit) as url:
        id = httpx.post(f"{url}/v1/responses", json={"input": "x"}).json()["id"]
        assert httpx.get(f"{url}/v1/responses/{id}").headers["x-ratelimit-remaining-requests"] == "0"
        assert httpx.get(f"{url}/v1/responses/{id}/input_items").status_code == 429
        assert httpx.get(f"{url}/v1/models").status_code == 200


@pytest.mark.parametrize(("code", "status"), [(sqlite3.SQLITE_FULL, 507), (sqlite3.SQLITE_IOERR, 503)])
def test_a_disk_that_is_full_is_told_as_that(kept, monkeypatch, code, status):
    one = kept.ask()

    def full(*_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(ResponseStore, "put", full)
    monkeypatch.setattr(ResponseStore, "delete", full)
    url = f"{kept.url}/v1/responses"
    for reply in (httpx.post(url, json={"input": "x", "background": True}), httpx.delete(f"{url}/{one.id}")):
        assert reply.status_code == status and reply.json()["error"]["code"] == "store_failed"
    assert httpx.get(f"{url}/{one.id}").status_code == 200


def test_what_is_kept_survives_a_clock_that_jumps(kept, monkeypatch):
    one, real = kept.ask(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 60 * 86_400)
    two = kept.ask()
    assert {httpx.get(f"{kept.url}/v1/responses/{each.id}").status_code for each in (one, two)} == {200}
