"""A random life of an engine: requests with grammars and adapters come, are preempted and aborted in the middle of a
speculation. What is left must be what each would have been alone, and nothing may stay behind."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from lora.adapters import write_adapter

from minivllm import LLM, SamplingParams, StructuredParams

SMALL = {"model.path": "dummy:tiny", "model.dtype": "float32", "executor.num_threads": 1, "kv.block_size": 4}
ALONE = {"kv.num_blocks": 400, "kv.prefix": "none", "spec_decode.method": "none"}
NAMES = ("", "a", "b", "c")
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(root / name, i, 8)) for i, name in enumerate("abc")}


def requests(rng: random.Random) -> list[tuple[list[int], SamplingParams, str]]:
    """Prompts that repeat themselves, so that look-up has something to guess."""
    found = []
    for i in range(NUM_REQUESTS):
        phrase = [rng.randrange(200) for _ in range(rng.randrange(2, 6))]
        grammar = StructuredParams(regex="([a-z]{1,3} ){2,20}") if i % 3 == 0 else None
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True, structured=grammar)
        found.append((phrase * rng.randrange(2, 6), params, rng.choice(NAMES)))
    return found


def live(folders, overrides, todo, rng: random.Random | None):
    """-> {request: tokens}, {those that were aborted}, steps with drafts. rng: None: all come at once and stay."""
    lora = {"lora.enabled": True, "lora.max_loras": 2, "lora.adapters": folders, "debug.check": True}
    with LLM(overrides={**SMALL, **lora, **overrides}) as llm:
        core, tokens, aborted, waiting = llm._core, defaultdict(list), set(), list(enumerate(todo))
        executor = getattr(core.executor, "inner", core.executor)  # with an overlap it is in a thread
        runner, drafted, running = executor.worker.runner, 0, set()
        while waiting or core.has_work:
            while waiting and (rng is None or rng.random() < 0.4):
                i, (prompt, params, adapter) = waiting.pop(0)
                for request in llm._front.requests(prompt, params, str(i), "final", adapter=adapter):
                    core.add(request)
                running.add(str(i))
            if rng is not None and running and rng.random() < 0.05:
                victim = rng.choice(sorted(running))
                running.discard(victim)
                aborted.add(victim)
                core.abort([victim])
            before = core.stats.num_drafted
            for delta in core.step():
                tokens[delta.req_id] += delta.token_ids
                if delta.finish_reason is not None:
                    running.discard(delta.req_id)
            drafted += core.stats.num_drafted > before
        while not core.is_settled:
            core.step()
        core.scheduler.check()  # no block is in use
        assert not runner.rows.of
        assert all(not processor.states for processor in runner.head.sampler.processors if hasattr(processor, "states"))
        proposer = runner.head.proposer
        assert not any(getattr(proposer, name, None) for name in ("probs", "text", "lookups", "trust")), "by row"
        assert not any(adapter.num_users for adapter in llm.list_loras())
        return dict(tokens), aborted, drafted, core.stats.num_preempted


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft", "self_draft"])
@pytest.mark.parametrize("seed, overlap", [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)])
def test_rejections_preemptions_and_aborts_leave_everything_right(seed, overlap, method, folders):
    rng = random.Random(seed)
    todo = requests(rng)
    wanted, _, _, _ = live(folders, ALONE, todo, None)
    small = {"kv.num_blocks": 24, "debug.preempt_every": 5, "spec_decode.method": method, "spec_decode.adaptive": False}
    small |= {"spec_decode.model": "dummy:tiny", "spec_decode.k": 4, "engine.overlap": overlap}
    got, aborted, drafted, num_preempted = live(folders, small, todo, rng)
    assert drafted and num_preempted, "nothing was guessed, or nobody was preempted: the lines below show nothing"
    assert len(wanted) == NUM_REQUESTS
    for req_id, tokens in wanted.items():
        mine = got.get(req_id, [])
        assert mine == (tokens[: len(mine)] if req_id in aborted else tokens), req_id
