"""What needs more memory than there is ends with an error that says so, and nothing else does."""

from __future__ import annotations

import asyncio
import errno
import os

import httpx
import pytest
import torch
from fakes import FakeEngine, oracle

from minivllm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.errors import is_no_memory
from minivllm.plan import NO_MEMORY
from minivllm.serve.app import create_app


def raised(allocate):
    with pytest.raises((MemoryError, RuntimeError, OSError)) as caught:
        allocate()
    return caught.value


def fails(error):
    raise error


ALLOCATIONS = {
    "Python's": lambda: bytearray(1 << 60),
    "torch's": lambda: torch.empty(1 << 58),
    "a card's": lambda: fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")),
    "the system's": lambda: fails(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
}


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_an_allocation_that_fails_is_told_from_other_errors(allocate):
    assert is_no_memory(raised(allocate))
    assert not is_no_memory(RuntimeError("lightning")) and not is_no_memory(OSError(errno.EIO, "I/O error"))


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_a_step_without_memory_ends_the_request_that_needed_it(allocate):
    engine, prompts = FakeEngine(), {"a": [1] * 9, "large": [2] * 6, "c": [3] * 13}
    params = {name: engine.add(name, prompt, max_tokens=6) for name, prompt in prompts.items()}
    execute = engine.worker.execute

    def short_of_memory(plan):
        if "large" in plan.num_tokens:
            allocate()
        return execute(plan)

    engine.worker.execute, errors = short_of_memory, {}
    while engine.core.has_work:
        for delta in engine.core.step():
            engine.tokens[delta.req_id] += delta.token_ids
            if delta.error is not None:
                errors[delta.req_id] = delta.error
    assert errors == {"large": NO_MEMORY}
    assert all(engine.tokens[name] == oracle(prompts[name], params[name]) for name in ("a", "c"))


def test_the_client_is_told_to_come_back_and_others_are_served():
    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1})
    submit = engine._core.executor.submit

    def short_of_memory(plan):
        if plan.total_tokens > 100:
            torch.empty(1 << 58)
        return submit(plan)

    engine._core.executor.submit = short_of_memory
    app = create_app(engine, Metrics("tiny"), ["tiny"])

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as http:
            app.state.closing = asyncio.get_running_loop().create_future()
            ask = {"max_tokens": 3, "ignore_eos": True}
            large, small = await asyncio.gather(
                http.post("/v1/completions", json=ask | {"prompt": [5] * 200}),
                http.post("/v1/completions", json=ask | {"prompt": [5] * 20}),
            )
            assert (large.status_code, large.json()["error"]["code"]) == (503, "out_of_memory")
            assert large.headers["retry-after"] and small.status_code == 200
            assert (await http.get("/health")).json()["status"] == "ok"

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        engine.close()
