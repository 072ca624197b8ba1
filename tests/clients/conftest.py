"""A server over random weights and a small context, on a real socket, as the clients' packages find it."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from serve.conftest import serving

MODEL = "dummy:tiny"


@pytest.fixture(scope="package")
def server():
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    overrides = {"kv.num_blocks": 1024, "model.dtype": "float32", "debug.check": True}
    engine = AsyncLLM(MODEL, overrides=overrides, max_model_len=2048, max_num_seqs=16)
    with serving(engine, Metrics(MODEL), (MODEL,)) as url:
        yield SimpleNamespace(url=url, engine=engine, post=lambda path, **body: post(url + path, body))


def post(url: str, body: dict) -> dict:
    reply = httpx.post(url, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()
