"""The rate limit: so many at once, then so many a second, for each client by itself."""

from __future__ import annotations

import httpx
import openai
import pytest

from minivllm.serve.ledger import OwnBuckets
from minivllm.serve.rate_limit import RateLimit, RateLimiter, client_of, parse


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_limit_is_read_as_requests_in_a_period():
    assert parse("60/min") == (1.0, 60) and parse("3/s") == (3.0, 3) and parse("7200/h", 5) == (2.0, 5)
    for wrong in ("60", "60/day", "/min", "-1/s", "0/s", "1.5/s", "x/s", "60/min/s"):
        with pytest.raises(ValueError, match="such as 60/min"):
            parse(wrong)
    with pytest.raises(ValueError, match="burst"):
        parse("60/min", 0)


def test_a_burst_then_the_rate(clock):
    limiter = RateLimiter(RateLimit(rate=0.5, burst=3), clock)
    assert [limiter.take("a") for _ in range(3)] == [0, 0, 0]
    assert limiter.take("a") == pytest.approx(2.0)
    clock.now += 1.5
    assert limiter.take("a") == pytest.approx(0.5)  # asking too early costs nothing
    clock.now += 0.5
    assert limiter.take("a") == 0 and limiter.take("a") > 0
    clock.now += 1e6  # never more than the burst
    assert [limiter.take("a") > 0 for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("rate", [1 / 3, 0.7, 60 / 7, 1e-4])
def test_a_client_that_waits_as_long_as_it_was_told_gets_in(clock, rate):
    limiter = RateLimiter(RateLimit(rate, 1), clock)
    for _ in range(200):
        assert limiter.take("a") == 0
        clock.now += limiter.take("a")


def test_over_a_long_time_no_client_gets_more_than_burst_and_rate(clock):
    limiter = RateLimiter(RateLimit(2.0, 5), clock)
    taken = 0
    for _ in range(1000):
        clock.now += 0.1
        taken += limiter.take("a") == 0
    assert taken == pytest.approx(5 + 2.0 * 100, abs=1)


def test_clients_have_buckets_of_their_own_and_the_table_is_bounded(clock):
    buckets = OwnBuckets(max_clients=3)
    limiter = RateLimiter(RateLimit(1.0, 1), clock, buckets)
    assert [limiter.take(name) for name in "abc"] == [0, 0, 0]
    assert limiter.take("a") > 0 and limiter.take("d") == 0  # which forgets b, who came longest ago
    assert len(buckets._of) == 3 and limiter.take("a") > 0 and limiter.take("b") == 0


def test_an_ipv6_client_is_its_network():
    assert client_of("10.0.0.1") == "10.0.0.1" == client_of("::ffff:10.0.0.1")
    assert client_of("2001:db8:1:2::1") == client_of("2001:db8:1:2:ffff::9") != client_of("2001:db8:1:3::1")
    assert client_of("fe80::1%eth0") and client_of("") == ""


# ---- over HTTP


def complete(url, key="", path="/v1/completions"):
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    if path == "/v1/messages":
        body["max_tokens"] = 5
    return httpx.post(url + path, json=body, headers={"x-api-key": key}, timeout=20)


def test_the_request_too_many_is_a_429_that_says_when_to_come_back(fake_engine, serving):
    with serving(fake_engine, rate_limit=RateLimit(0.1, 2)) as url:
        assert [complete(url).status_code for _ in range(3)] == [200, 200, 429]
        reply = complete(url)
        error = reply.json()["error"]
        assert 8 <= int(reply.headers["retry-after"]) <= 10
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert reply.headers["retry-after"] in error["message"]
        assert complete(url, path="/v1/messages").json()["error"]["type"] == "rate_limit_error"
        assert complete(url, key="made up").status_code == 429  # where no key is asked for, none makes a new client
        for path in ("/health", "/metrics", "/v1/models"):  # what makes no work
            assert httpx.get(url + path).status_code == 200
        assert 'status="429"' in httpx.get(f"{url}/metrics").text
    assert len(fake_engine.calls) == 2


def test_each_key_has_its_own_limit_and_a_wrong_one_takes_from_nobodys(fake_engine, serving):
    with serving(fake_engine, rate_limit=RateLimit(0.01, 2), api_keys=["one", "two"]) as url:
        assert [complete(url, "wrong").status_code for _ in range(4)] == [401] * 4
        assert [complete(url, "one").status_code for _ in range(3)] == [200, 200, 429]
        assert [complete(url, "two").status_code for _ in range(3)] == [200, 200, 429]


def test_the_openai_client_waits_and_comes_back(fake_engine, serving):
    with serving(fake_engine, rate_limit=RateLimit(1.0, 1)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=2, timeout=20)
        for _ in range(2):
            assert client.completions.create(model="fake", prompt="x").choices[0].text == "abc"
