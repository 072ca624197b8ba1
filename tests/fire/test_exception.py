"""A request that makes the engine's steps raise is ended alone: those that share its steps do not notice."""

from __future__ import annotations

import asyncio
import json

from fire.wire import ask

MODEL, NEIGHBOURS, MARK = "dummy:tiny", 12, 666
BODY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def body_of(i: int) -> dict:
    return BODY | {"prompt": [i + 5] * (i + 1), "stream": i % 2 == 0}


def tokens_of(answer) -> list[int]:
    chunks = answer.events or [json.loads(answer.body)]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


def sabotage(engine) -> list[int]:
    """Have the worker raise in the tenth decode of a request that is marked. The steps that raised."""
    worker = engine._core.executor.worker
    execute, marked, raised = worker.execute, {}, []

    def sabotaged(plan):
        marked.update({j.req_id: j.num_prompt_tokens for j in plan.joins if j.params.seed == MARK})
        out = execute(plan)
        if any(plan.start[r] + n >= marked[r] + 10 for r, n in plan.num_tokens.items() if r in marked):
            raised.append(plan.step)
            raise RuntimeError("lightning")
        return out

    worker.execute = sabotaged
    return raised


def test_neighbours_get_the_same_tokens_and_the_culprit_an_error(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    overrides = {"kv.num_blocks": 512, "model.dtype": "float32", "debug.check": True}
    engine = AsyncLLM(MODEL, overrides=overrides, max_model_len=512, max_num_seqs=16)
    with serving(engine, Metrics(MODEL), (MODEL,)) as url:
        port = int(url.rpartition(":")[2])

        async def neighbours():
            return await asyncio.gather(*(ask(port, body_of(i)) for i in range(NEIGHBOURS)))

        async def with_culprits():
            wanted = asyncio.create_task(neighbours())
            culprits = [ask(port, BODY | {"prompt": "y", "seed": MARK, "stream": stream}) for stream in (False, True)]
            return await asyncio.gather(*culprits), await wanted

        right = asyncio.run(neighbours())
        raised = sabotage(engine)
        culprits, others = asyncio.run(with_culprits())
        assert raised
        assert [answer.status for answer in culprits] == [500, 200]
        assert all(answer.error["code"] == "internal_error" for answer in culprits)
        assert "lightning" not in str(culprits)
        assert len(tokens_of(culprits[1])) <= 10
        assert [tokens_of(answer) for answer in others] == [tokens_of(answer) for answer in right]
        assert all(len(tokens_of(answer)) == 24 and answer.error is None for answer in others)
        assert engine.stats.kv_usage == 0 and not engine._front.processor
