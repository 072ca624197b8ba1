"""What one client may have: tokens over time, sequences at once, and what it is told of it."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest
from pooling.tiny import write_bert

from minivllm.engine.async_llm import AsyncLLM
from minivllm.errors import BadRequest
from minivllm.serve.errors import ApiError
from minivllm.serve.limits import Demand, Limits, demand, duration
from minivllm.serve.rate_limit import RateLimit, RateLimiter

A_YEAR = 1 / (365 * 24 * 3600)  # of a token a second: none comes back while a test runs


def complete(url, key="", **fields):
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x"} | fields, headers={"x-api-key": key}, timeout=20)


def remaining(reply):
    return int(reply.headers["x-ratelimit-remaining-tokens"])


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


# ---- what a request may take


def test_an_answer_counts_as_long_as_it_is_named_and_else_up_to_the_end_of_the_context():
    assert demand([10, 20], 2, 5, 100) == Demand(4, 50, 50)
    assert demand([10], 2, None, 100) == demand([10], 2, 90, 100) == demand([10], 2, 500, 100) == Demand(2, 12, 190)


def test_over_any_time_a_client_makes_no_more_than_its_bucket_and_its_rate():
    """One answer is as long as it may be, the next has one token; the bucket holds less than a context."""
    clock = Clock()
    limits = Limits(tokens=RateLimiter(RateLimit(10.0, 300), clock))
    made = [0]
    for _ in range(3000):
        clock.now += 1
        try:
            taken = limits.take("a", Demand(1, 11, 1000), 0)
        except ApiError:
            continue
        made.append(1000 if made[-1] == 11 else 11)
        limits.settle("a", taken, made[-1])
    assert 28_000 < sum(made) <= 300 + 10 * 3000 + 1000, "one answer at most is owed"


def test_what_can_never_be_had_is_no_429():
    limits = Limits(tokens=RateLimiter(RateLimit(1.0, 300)), sequences=4)
    with pytest.raises(BadRequest, match=r"301 tokens .* 300 at once \(--token-limit 60/min\)"):
        limits.take("a", Demand(1, 301, 301), 0)
    with pytest.raises(BadRequest, match=r"5 sequences .* 4 .--sequence-limit"):
        limits.take("a", Demand(5, 5, 5), 0)


@pytest.mark.parametrize(
    "seconds, told",
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (360, "6m0s"), (3661.25, "1h1m1.25s")],
)
def test_durations_are_written_as_openai_writes_them(seconds, told):
    assert duration(seconds) == told


# ---- over HTTP


def test_tokens_are_taken_before_an_answer_and_what_it_did_not_need_comes_back(fake_engine, serving, eventually):
    hold = threading.Event()
    fake_engine.script = ["a", hold, "b"]
    with (
        serving(fake_engine, token_limit=RateLimit(A_YEAR, 100), api_keys=["a", "b"]) as url,
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(complete, url, "a", max_tokens=59)  # 60 with its prompt
        eventually(lambda: fake_engine.num_open == 1)
        refused = complete(url, "a", max_tokens=40)
        assert refused.status_code == 429 and remaining(refused) == 40 and int(refused.headers["retry-after"]) > 0
        assert "41 tokens, and 40 are left (--token-limit" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = pool.submit(complete, url, "b", max_tokens=40)
        hold.set()
        assert first.result().status_code == other.result().status_code == 200
        assert first.result().headers["x-ratelimit-limit-tokens"] == "100"
        assert remaining(first.result()) == 97  # a prompt of one token, an answer of two
        assert complete(url, "a", max_tokens=90).status_code == 200


@pytest.mark.parametrize("fields", [{"prompt": ["xx"] * 9, "max_tokens": 10}, {"n": 10, "max_tokens": 10},
                                    {"best_of": 20, "max_tokens": 5}, {"max_tokens": 98}])  # fmt: skip
def test_a_request_over_the_whole_limit_is_a_400_that_names_it(fake_engine, serving, fields):
    with serving(fake_engine, token_limit=RateLimit(A_YEAR, 98)) as url:
        reply = complete(url, temperature=1, **fields)
        assert reply.status_code == 400 and "--token-limit" in reply.json()["error"]["message"]
        assert complete(url).status_code == 200


@pytest.mark.parametrize("fields, num_sequences", [({}, 1), ({"best_of": 3, "temperature": 1}, 3)])
def test_what_was_made_counts_though_nobody_waited_for_it(serving, eventually, fields, num_sequences):
    """An answer that comes whole is known to nobody before; leaving early must not make it free."""
    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 300, "executor.num_threads": 1})
    made = []
    engine.watchers.append(SimpleNamespace(
        on_add=lambda request: None, on_abort=lambda ids: None,
        on_report=lambda report: made.extend(token for delta in report.deltas for token in delta.token_ids),
    ))  # fmt: skip
    with serving(engine, names=("tiny",), token_limit=RateLimit(A_YEAR, 6000)) as url:
        long = json.dumps({"prompt": [5], "max_tokens": 1900, "ignore_eos": True} | fields)
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(long)}\r\n\r\n"
            client.sendall((head + long).encode())
            eventually(lambda: len(made) >= 30)
        eventually(lambda: httpx.get(f"{url}/load").json() == {"server_load": 0})
        num_made = 6000 - remaining(complete(url, prompt=[5], max_tokens=1)) - 3
        assert 30 <= num_made <= len(made) < 1900 * num_sequences


@pytest.mark.parametrize(
    "path, asked",
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "x"}),
        ("/api/generate", {"prompt": "x", "stream": False}),
        ("/completion", {"prompt": "x"}),
    ],
)
def test_every_endpoint_takes_from_the_same_buckets(fake_engine, serving, path, asked):
    limits = {"token_limit": RateLimit(A_YEAR, 1000), "rate_limit": RateLimit(A_YEAR, 2), "sequence_limit": 1}
    with serving(fake_engine, **limits) as url:
        replies = [httpx.post(url + path, json=asked, timeout=20) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["1", "0", "0"]
    left = [remaining(reply) for reply in replies]
    assert 980 < left[0] < 1000 and 1000 - left[1] == 2 * (1000 - left[0]) and left[2] == left[1]


def test_without_limits_no_header_tells_of_any(fake):
    assert not [name for name in complete(fake.url).headers if name.startswith("x-ratelimit")]


def test_a_client_has_so_many_sequences_at_once_and_others_theirs(fake_engine, serving, eventually):
    hold = threading.Event()
    fake_engine.script = ["a", hold, "b"]
    with serving(fake_engine, sequence_limit=3, api_keys=["a", "b"]) as url, ThreadPoolExecutor() as pool:
        held = [pool.submit(complete, url, "a", n=2, temperature=1)]
        eventually(lambda: fake_engine.num_open == 1)
        refused = complete(url, "a", n=2, temperature=1)
        assert refused.status_code == 429 and "2 of 3 sequences at once" in refused.json()["error"]["message"]
        assert complete(url, "a", n=4, temperature=1).status_code == 400
        held += [pool.submit(complete, url, "a"), pool.submit(complete, url, "b", n=3, temperature=1)]
        eventually(lambda: fake_engine.num_open == 3)
        hold.set()
        assert [reply.result().status_code for reply in held] == [200] * 3
        assert complete(url, "a", n=3, temperature=1).status_code == 200


def test_texts_that_become_vectors_count_too(tmp_path, serving):
    write_bert(tmp_path)
    engine = AsyncLLM(str(tmp_path), overrides={"executor.num_threads": 1})
    with serving(engine, names=("tiny",), token_limit=RateLimit(A_YEAR, 100), sequence_limit=3) as url:
        for path, asked in (("/v1/embeddings", {"input": ["a b"]}), ("/embed", {"inputs": ["a b"]}),
                            ("/rerank", {"query": "a", "documents": ["b"]})):  # fmt: skip
            before = remaining(httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=20))
            reply = httpx.post(url + path, json=asked, timeout=20)
            assert reply.status_code == 200 and remaining(reply) < before
        assert httpx.post(f"{url}/v1/embeddings", json={"input": ["a"] * 4}, timeout=20).status_code == 400
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "a " * 90}, timeout=20).status_code in (400, 429)
