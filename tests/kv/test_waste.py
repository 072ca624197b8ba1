"""The waste figure of the vLLM paper, from the control plane alone: no model runs, each step's tokens are made up."""

import math
import random

import pytest

from minivllm.kv.contiguous import ContiguousKVManager, reserve_max, reserve_oracle, reserve_pow2
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix import NoPrefix
from minivllm.kv.waste import Waste, paged_waste
from minivllm.plan import StepOutput
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.base import Limits
from minivllm.scheduler.unified import UnifiedScheduler

NUM_SLOTS, MAX_MODEL_LEN = 15_700, 2048  # OPT-13B on an A100 with 40 GB, table 1 of the paper
BLOCK_SIZE = 16

# Figure 2 of the paper, in percent: tokens, reserved, internal, external & others. It gives only the first for vLLM.
PAPER = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
# Points of percent. 300 lengths with a deviation of 1.1 means have a mean that is off by 6 %; of the third of the pool
# that tokens and reserved take together under max, two such errors are 4 points. Paged loses less than a block of 16 a
# request of 500 tokens, and the free blocks, which are fewer than one prompt needs. How well a power of two fits (pow2,
# and the oracle's rounding) also depends on the shape of the lengths: the paper has ShareGPT's, we a log-normal with
# the same means. Measured: max 19.5 12.7 58.9 8.5, pow2 28.2 18.6 8.4 44.6, oracle 34.7 23.1 0.5 41.2,
# paged 96.6 1.5 0.0 1.0.
POINTS = {"max": 4, "pow2": 6, "oracle": 6, "paged": 2}


def managers() -> dict:
    num_blocks = NUM_SLOTS // BLOCK_SIZE
    policies = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}
    contiguous = {n: ContiguousKVManager(num_blocks, BLOCK_SIZE, policies[n], MAX_MODEL_LEN) for n in policies}
    return {**contiguous, "paged": PagedKVManager(num_blocks, BLOCK_SIZE, NoPrefix())}


def lognormal(rng, mean, sigma=1.0):
    return max(4, min(1020, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def mean_waste(kv, num_requests=300, every=16):
    """Over the time in which requests wait, so that memory is what limits."""
    rng = random.Random(0)
    scheduler = UnifiedScheduler(kv, Limits(256, 2560, MAX_MODEL_LEN, kv.usage.num_total * kv.block_size))
    final_lengths = {}
    for i in range(num_requests):
        num_prompt, num_output = lognormal(rng, 161), lognormal(rng, 338)  # ShareGPT's means, figure 11
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        scheduler.add(Request(str(i), params, [1] * num_prompt, num_prompt))
        final_lengths[str(i)] = num_prompt + num_output
    seen = []
    while True:
        plan = scheduler.schedule(0.0)
        requests = scheduler.requests
        ready = [r for r, n in plan.num_tokens.items() if plan.start[r] + n == requests[r].num_tokens]
        scheduler.update(plan, StepOutput({req_id: [0] for req_id in ready}))
        if not scheduler.waiting:
            break
        if plan.step % every == 0:
            waiting = scheduler.waiting[-1]
            measure = kv.waste if isinstance(kv, ContiguousKVManager) else lambda *args: paged_waste(kv, *args)
            seen.append(measure(requests, final_lengths, waiting))
            assert -1e-9 <= seen[-1].free < 1 and min(seen[-1]) >= 0
    scheduler.check()
    return Waste(*(100 * sum(part) / len(seen) for part in zip(*seen, strict=True)))


@pytest.mark.parametrize("name", PAPER)
def test_kv_used_for_tokens_is_near_the_papers_figure_2(name):
    waste = mean_waste(managers()[name])
    assert waste.tokens == pytest.approx(PAPER[name][0], abs=POINTS[name])
    if name == "max":
        assert waste == pytest.approx(PAPER[name], abs=POINTS[name])
