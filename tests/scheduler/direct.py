"""A scheduler without an engine: tests hand it the outputs of its steps, and look at its plans."""

from __future__ import annotations

from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.base import Limits, SchedulerBase
from minivllm.scheduler.unified import UnifiedScheduler

OF_REQUEST = ("arrival_time", "priority", "adapter", "cache_salt", "group", "pooling", "items")


def scheduler_of(
    kind: type[SchedulerBase] = UnifiedScheduler,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = 100,
    **options,
) -> SchedulerBase:
    kv = PagedKVManager(num_blocks, block_size, HashPrefix(seed="test"))
    return kind(kv, Limits(max_num_seqs, budget, max_model_len, kv.capacity), **options)


def request(req_id: str, prompt: int | list[int], **fields) -> Request:
    """prompt: its tokens, or how many. fields: the request's, and its SamplingParams."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    own = {name: fields.pop(name) for name in OF_REQUEST if name in fields}
    return Request(req_id, SamplingParams(**fields), tokens, len(tokens), **own)


def plan_and_update(scheduler, out: StepOutput | None = None) -> tuple[StepPlan, list[Delta]]:
    """A step. Without an output each request that has computed all of its tokens gets the token 1."""
    plan = scheduler.schedule(0.0)
    if out is None:
        ends = {req_id: plan.start[req_id] + num_new for req_id, num_new in plan.num_tokens.items()}
        out = StepOutput({req_id: [1] for req_id, end in ends.items() if end == scheduler.requests[req_id].num_tokens})
    deltas = scheduler.update(plan, out)
    scheduler.check()
    return plan, deltas
