"""Engines over the fake model, with a scheduler and an admission, and what is done with them."""

from __future__ import annotations

import random

from fakes import FakeEngine, oracle

from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix import NoPrefix
from minivllm.scheduler.base import Limits
from minivllm.scheduler.unified import UnifiedScheduler

LONGEST = 80


def engine_with(scheduler, admission, num_blocks, block_size, budget=512, max_num_seqs=32):
    engine = FakeEngine(num_blocks, LONGEST, **{"kv.block_size": block_size, "scheduler.max_num_seqs": max_num_seqs})
    engine.kv = PagedKVManager(num_blocks, block_size, NoPrefix())
    limits = Limits(max_num_seqs, budget, LONGEST, num_blocks * block_size)
    chunks = scheduler is UnifiedScheduler
    engine.scheduler = engine.core.scheduler = scheduler(engine.kv, limits, None, chunks, admission)
    return engine


def run_workload(engine, seed, num_requests=40):
    rng = random.Random(seed)
    wanted = {}
    for i in range(num_requests):
        prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 40))]
        max_tokens = rng.randrange(1, 40)
        params = engine.add(str(i), prompt, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
        wanted[str(i)] = oracle(prompt, params, LONGEST)
        for _ in range(rng.randrange(5)):
            engine.step()
    assert engine.run() == wanted


def plans(engine, steps=10**6):
    """{request: tokens} of each step."""
    seen, schedule = [], engine.core.scheduler.schedule
    engine.core.scheduler.schedule = lambda now: (plan := schedule(now), seen.append(dict(plan.num_tokens)))[0]
    while engine.core.has_work and len(seen) < steps:
        engine.step()
    engine.core.scheduler.schedule = schedule
    return seen
