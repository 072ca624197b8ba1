"""A request ends when its deadline passes, waiting or running, and gives its place back. Time passes when a test says
so: `Time` is the server's clock."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from steps import before_each_step, slow_down

from minivllm.serve.deadline import Deadlines
from minivllm.serve.errors import ApiError
from minivllm.serve.response_store import ResponseStore

HELLO = [{"role": "user", "content": "Hi"}]


class Time:
    """A clock that stands still, and what waits for it."""

    def __init__(self):
        self.now, self.waiting, self.num_looks = 1000.0, [], 0

    def clock(self):
        self.num_looks += 1
        return self.now

    async def sleep(self, seconds):
        until = self.now + seconds
        self.waiting.append(seconds)
        while self.now < until:
            await asyncio.sleep(0.005)

    def deadlines(self, most=None):
        return Deadlines(most, self.clock, self.sleep)


@pytest.fixture
def time():
    return Time()


def complete(url, seconds=None, **fields):
    headers = {} if seconds is None else {"x-server-timeout": str(seconds)}
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x"} | fields, headers=headers, timeout=20)


def test_a_request_that_runs_too_long_is_a_504_that_clients_do_not_send_again(fake_engine, serving, eventually, time):
    fake_engine.script = ["a", threading.Event()]
    with serving(fake_engine, deadlines=time.deadlines()) as url, ThreadPoolExecutor() as pool:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=2, timeout=20)
        headers = {"x-server-timeout": "2.5"}
        asked = pool.submit(client.completions.create, model="fake", prompt="x", extra_headers=headers)
        eventually(lambda: time.waiting == [2.5])
        time.now += 2.4
        assert httpx.get(f"{url}/load").json() == {"server_load": 1}
        time.now += 0.2
        with pytest.raises(openai.APIStatusError, match=r"not done within 2.5 s \(x-server-timeout\)") as failure:
            asked.result()
        assert (failure.value.status_code, failure.value.code) == (504, "deadline_exceeded")
        assert len(fake_engine.calls) == 1 and fake_engine.num_open == 0
        assert httpx.get(f"{url}/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    "path, asked, told",
    [
        ("/v1/chat/completions", {"messages": HELLO}, '"code":"deadline_exceeded"'),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, '"type":"timeout_error"'),
        ("/v1/responses", {"input": "x"}, '"code":"deadline_exceeded"'),
        ("/api/chat", {"messages": HELLO}, '"error":"the request was not done'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error(fake_engine, serving, time, path, asked, told):
    fake_engine.script = ["a", "b", threading.Event()]
    with (
        serving(fake_engine, deadlines=time.deadlines(5.0)) as url,
        httpx.stream("POST", url + path, json=asked | {"stream": True}, timeout=20) as reply,
    ):
        text = ""
        for line in reply.iter_lines():
            text += line
            time.now = 1006.0
    assert reply.status_code == 200 and told in text and "(--request-timeout)" in text
    assert fake_engine.num_open == 0 and fake_engine.num_closed_early == 1


def test_a_request_that_waits_leaves_the_queue_and_the_one_that_runs_goes_on(serving, eventually, time):
    from minivllm.engine.async_llm import AsyncLLM

    tiny = {"kv.num_blocks": 250, "kv.block_size": 8, "executor.num_threads": 1, "scheduler.max_num_seqs": 1}
    engine = AsyncLLM("dummy:tiny", overrides=tiny)
    long = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with serving(engine, names=("tiny",), deadlines=time.deadlines()) as url, ThreadPoolExecutor() as pool:
        with (
            before_each_step(engine, slow_down),
            httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=20) as running,
        ):
            lines = running.iter_lines()
            next(lines)
            waiting = pool.submit(complete, url, 3, max_tokens=1)
            eventually(lambda: engine.stats.num_waiting == 1)
            time.now += 3
            assert waiting.result().status_code == 504
            eventually(lambda: engine.stats.num_waiting == 0)
            assert engine.stats.num_running == 1 and next(line for line in lines if line)
        assert complete(url, 3, max_tokens=1).status_code == 200


def test_a_background_response_fails_at_its_deadline(fake_engine, serving, eventually, time, tmp_path):
    fake_engine.script = ["a", threading.Event()]
    store = ResponseStore(tmp_path / "store.sqlite", 0.0)
    with serving(fake_engine, deadlines=time.deadlines(4.0), response_store=store) as url:
        body = {"input": "x", "background": True}
        id = httpx.post(f"{url}/v1/responses", json=body, timeout=20).json()["id"]
        eventually(lambda: time.waiting == [4.0] and fake_engine.num_open == 1)
        time.now += 4
        eventually(lambda: httpx.get(f"{url}/v1/responses/{id}").json()["status"] == "failed")
        assert "not done within 4 s" in httpx.get(f"{url}/v1/responses/{id}").json()["error"]["message"]
        assert fake_engine.num_open == 0


def test_the_servers_limit_is_the_most_that_a_request_may_have(time):
    def seconds(asked, most):
        deadline = time.deadlines(most).of(asked)
        time.waiting.clear()
        if deadline is not None:
            time.now += 100
            asyncio.run(deadline.passes())
            told = str(deadline.error())
            return float(told.partition("within ")[2].partition(" s")[0])
        return None

    given = [(None, None), ("3", None), (None, 5.0), ("3", 5.0), ("9", 5.0), ("0.5", 5.0)]
    assert [seconds(*each) for each in given] == [None, 3, 5, 3, 5, 0.5]


@pytest.mark.parametrize("wrong", ["", "0", "-1", "nan", "inf", "soon", "5S"])
def test_a_deadline_that_is_none_is_refused_by_name(fake, wrong):
    with pytest.raises(ApiError, match="x-server-timeout is a number of seconds above 0"):
        Deadlines().of(wrong)
    reply = complete(fake.url, wrong)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "x-server-timeout"


def test_time_before_the_answer_counts(fake_engine, serving, eventually, time):
    """A deadline that has passed while the body came: nothing of the request is left to run."""
    fake_engine.script = ["a", threading.Event()]
    with serving(fake_engine, deadlines=time.deadlines()) as url:

        def body():
            yield b'{"prompt": '
            eventually(lambda: time.num_looks == 1)
            time.now += 50
            yield b'"x"}'

        headers = {"x-server-timeout": "30", "content-type": "application/json"}
        reply = httpx.post(f"{url}/v1/completions", content=body(), headers=headers, timeout=20)
        assert reply.status_code == 504 and fake_engine.num_open == 0
