"""What an answer tells of its time, by the names and for what vLLM 0.33 has them: --enable-per-request-metrics."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import httpx
import pytest

from minivllm.engine.async_llm import AsyncLLM

NAMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
TINY = {"kv.num_blocks": 200, "kv.block_size": 8, "executor.num_threads": 1, "model.dtype": "float32"}
SAMPLING = {"ignore_eos": True, "temperature": 0}
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, **SAMPLING},
    "completions": {"prompt": "Hi", "max_tokens": 6, **SAMPLING},
    "responses": {"input": "Hi", "max_output_tokens": 6, **SAMPLING},
}


@pytest.fixture(scope="module")
def served(serving):
    engine = AsyncLLM("dummy:tiny", overrides=TINY)
    with serving(engine, names=("tiny",), tells_timings=True) as url:
        yield SimpleNamespace(url=url)


def ask(served, path: str, **fields) -> dict:
    reply = httpx.post(f"{served.url}/v1/{path}", json=BODIES[path] | fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(served, path: str, **fields) -> list[dict]:
    body = BODIES[path] | {"stream": True} | fields
    with httpx.stream("POST", f"{served.url}/v1/{path}", json=body, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def check(told: dict, num_tokens: int) -> None:
    assert told.keys() == NAMES and min(told.values()) >= 0
    assert told["mean_itl_ms"] == pytest.approx(told["generation_time_ms"] / (num_tokens - 1))
    inference = told["time_to_first_token_ms"] + told["generation_time_ms"]
    assert told["tokens_per_second"] == pytest.approx(1e3 * num_tokens / inference)


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_tells_how_long_it_waited_and_took(served, path):
    begin = time.monotonic()
    told = ask(served, path)["metrics"]
    check(told, 6)
    parts = told["queue_time_ms"] + told["time_to_first_token_ms"] + told["generation_time_ms"]
    assert parts <= 1e3 * (time.monotonic() - begin)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_tells_it_with_its_usage_alone(served, path):
    *others, last = events(served, path, stream_options={"include_usage": True})
    check(last["metrics"], 6)
    assert not any("metrics" in chunk for chunk in [*others, *events(served, path)])


def test_the_response_that_ends_a_stream_tells_it(served):
    *others, last = events(served, "responses")
    check(last["response"]["metrics"], 6)
    assert not any("metrics" in event.get("response", {}) for event in others)


def test_a_single_token_has_no_time_between_tokens(served):
    told = ask(served, "completions", max_tokens=1)["metrics"]
    assert told["mean_itl_ms"] is None and told["generation_time_ms"] == 0
    *_, last = events(served, "completions", max_tokens=1, stream_options={"include_usage": True})
    assert last["metrics"].keys() == NAMES - {"mean_itl_ms"}, "vLLM's streams leave out what is null"


@pytest.mark.parametrize("fields", [{"n": 2, "temperature": 1}, {"prompt": ["Hi", "Ho"]}])
def test_several_sequences_have_no_one_time(served, fields):
    assert ask(served, "completions", **fields)["metrics"] is None


def test_what_a_text_stops_has_times_too(served):
    """The engine core does not end it: the front end has it aborted."""
    text = ask(served, "completions")["choices"][0]["text"]
    stopped = ask(served, "completions", stop=text[2:4], max_tokens=60)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["metrics"].keys() == NAMES and stopped["metrics"]["time_to_first_token_ms"] > 0


def test_without_the_option_there_is_no_such_field(fake):
    assert "metrics" not in httpx.post(f"{fake.url}/v1/completions", json=BODIES["completions"]).json()
