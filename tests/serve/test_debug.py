"""/debug/trace: there only if asked for, behind the keys, the same from an engine in a process of its own."""

from __future__ import annotations

import httpx
import pytest

TINY = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1, "debug.recent_steps": 50}


@pytest.fixture(scope="module", params=["inproc", "process"])
def url(request, serving):
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={**TINY, "engine.core": request.param})
    with serving(engine, names=("tiny",), debug_endpoints=True, api_keys=["k"]) as url:
        yield url


def get(url, query="", key="k"):
    return httpx.get(f"{url}/debug/trace{query}", headers={"x-api-key": key}, timeout=20)


def test_the_last_steps_are_shown_with_their_phases_and_requests(url):
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": "k"}, timeout=20).json()
    events = get(url, "?steps=50").json()["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    (track,) = [tid for name, tid in tracks.items() if name.startswith(answer["id"])]
    names = [e["name"] for e in events if e["pid"] == 2 and e["tid"] == track and e["ph"] in "Xi"]
    assert names == ["arrives", "waiting", "prefill", *["decode"] * 4, "length"]
    assert {"schedule", "execute", "update"} <= {e["name"] for e in events}
    steps = [e for e in get(url, "?steps=2").json()["traceEvents"] if e["name"].startswith("step ")]
    assert len(steps) == 2
    assert get(url).status_code == 200


@pytest.mark.parametrize("steps", ["0", "51", "-1", "x", "9" * 5000])
def test_a_number_of_steps_that_cannot_be_is_a_400(url, steps):
    reply = get(url, f"?steps={steps}")
    assert reply.status_code == 400 and "from 1 to 50" in reply.json()["error"]["message"]


def test_it_needs_a_key(url):
    assert get(url, key="wrong").status_code == 401


def test_it_is_there_only_if_asked_for(url, fake_engine, serving):
    assert "/debug/trace" in httpx.get(f"{url}/openapi.json").json()["paths"]
    with serving(fake_engine) as plain:
        assert get(plain).status_code == 404 and "--debug-endpoints" in get(plain).json()["error"]["message"]
        assert "/debug/trace" not in httpx.get(f"{plain}/openapi.json").json()["paths"]
