"""Admission: may a waiting request join those that run? Asked before its blocks are allocated, and only while others
run: a request that would be alone is always admitted, or nobody would ever be served.

Blocks that are free now are not enough to know, because every running request grows. Admit too eagerly, and somebody
is preempted later and computed again; too timidly, and the pool stands empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minivllm.kv.base import KVUsage
from minivllm.request import Request


class Admission(Protocol):
    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        """req would compute new_tokens in this step, beside `running` (those admitted in this very step included)."""
        ...


class AdmitAll:
    """Whoever finds free blocks runs; growth is settled by preemption (vLLM V1)."""

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        return True


class Watermark:
    """A fraction of the pool stays free after each admission, so that those that run can grow for a few steps before
    somebody must go again (vLLM V0's `BlockSpaceManager`, 1 %)."""

    def __init__(self, fraction: float = 0.01):
        self.fraction = fraction

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        # Who comes back from the host computes few tokens and takes many blocks, so a preempted request counts whole.
        needed = req.num_tokens if req.num_preemptions else new_tokens
        num_blocks = -(-needed // usage.block_size) * usage.num_groups
        return usage.num_free - num_blocks >= int(self.fraction * usage.num_total)


class FullPrompt:
    """All that is known of a request fits into free blocks now, not only the chunk that it would begin with: else long
    prompts enter piece by piece and push each other out (vLLM's `scheduler_reserve_full_isl`, on since 0.19). Nothing
    stays reserved: those that run may take the blocks while its later chunks wait.

    Blocks that it would share with running requests are counted as if it needed its own.
    """

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        return -(-req.num_tokens // usage.block_size) * usage.num_groups <= usage.num_free


class PredictedPeak:
    """LightLLM's: admit if the pool can hold what all will need at the worst moment to come, should each run to its
    max_tokens. Then nobody is ever preempted for want of blocks, and the pool is as full as that promise allows.

    (ModelTC/lightllm, `server/router/req_queue/continues_batch/impl.py`; Gong et al., "Past-Future Scheduler for LLM
    Serving under SLA Guarantees", ASPLOS 2025, predicts the lengths where this takes max_tokens.)

    Let request j hold u_j slots and get r_j more, one a step, and sort by r, the largest first. Use only grows until
    somebody ends, so the worst moment is the last step of some request i, r_i steps from now. Those with r_j < r_i have
    given everything back by then, and the others have grown by r_i each:

        peak = max_i  sum_{j <= i} (u_j + r_i)  =  max_i ( sum_{j <= i} u_j  +  i * r_i )      in slots (LightLLM)
        peak = max_i  sum_{j <= i} ceil((u_j + r_i) / block_size)                              in blocks (here)

    This holds for requests that grow in step. Who is still being prefilled starts to grow at a time that is not known,
    and is counted with all that it will ever hold. So is a newcomer that computes only a part of its tokens now. One
    that computes all of them may be a token ahead of the others (scheduler/phased: they stand still in its prefill),
    so it is counted with a token more.

    A promise only where running requests are not held up one by one: policy fcfs. Shared blocks make it pessimistic,
    and so do layers with windows, which are counted as if they kept all tokens.
    With engine.overlap=2 a request that ends gives its blocks back a step later than is counted on here.
    """

    def __init__(self, block_size: int, max_model_len: int):
        self.block_size = block_size
        self.max_model_len = max_model_len

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        return self.peak(req, new_tokens, running) * usage.num_groups <= usage.num_total

    def peak(self, req: Request, new_tokens: int, running: Sequence[Request]) -> int:
        """Blocks."""
        apart = 0
        growing = []
        for r in running:
            final = r.num_final_slots(self.max_model_len)
            if r.num_computed_tokens < r.num_tokens - 1:
                apart += -(-final // self.block_size)
            else:
                holds = min(r.num_expected_tokens, final)
                growing.append((holds, final - holds))
        final = req.num_final_slots(self.max_model_len)
        if new_tokens < req.num_tokens:
            apart += -(-final // self.block_size)
        else:
            growing.append((req.num_tokens + 1, final - req.num_tokens))
        return apart + peak_blocks(growing, self.block_size)


def peak_blocks(growing: Sequence[tuple[int, int]], block_size: int) -> int:
    """max_i sum_{j <= i} ceil((u_j + r_i) / block_size) over (u, r), in O(n (log n + block_size)).

    With u = a * B + b and r = c * B + d the term is a + c + ceil((b + d) / B), and the last part of it is 0, 1 or 2. So
    it is enough to know the sum of all a, and how many have each b.
    """
    peak = sum_a = 0
    with_b = [0] * block_size
    for i, (u, r) in enumerate(sorted(growing, key=lambda each: -each[1]), 1):
        a, b = divmod(u, block_size)
        c, d = divmod(r, block_size)
        sum_a += a
        with_b[b] += 1
        above_0 = i if d else i - with_b[0]
        above_1 = sum(with_b[block_size - d + 1 :])
        peak = max(peak, sum_a + i * c + above_0 + above_1)
    return peak
