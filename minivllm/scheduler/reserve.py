"""Admissions that set room aside for what running requests will still need: all of it, a share, or their prompts.

    | computed | rest of the prompt | output to come |
    |  blocks  |<-------- may still be taken ------->|   of each that runs, beside all that the newcomer needs

Blocks that several requests share are counted for each, so a shared prefix makes all of these pessimistic.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv.base import KVUsage
from minivllm.request import Request


class ReserveAll:
    """Prompt and max_tokens of everybody, so that nobody is ever preempted for want of blocks
    (huggingface/text-generation-inference 2.x, `backends/v3/src/queue.rs`: max_batch_total_tokens, here the pool)."""

    def __init__(self, max_model_len: int):
        self.max_model_len = max_model_len

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        longest = self.max_model_len
        reserved = sum(_to_come(r, r.num_final_slots(longest), usage) for r in running)
        return _blocks(req.num_final_slots(longest), usage) + reserved <= usage.num_free


class ReservePrompt:
    """Prompts as a whole, though they are computed in chunks, and a hundredth of the pool for outputs
    (microsoft/sarathi-serve, `core/block_space_manager/`: blocks for a prompt when it enters, and V0's watermark)."""

    def __init__(self, fraction: float = 0.01):
        self.fraction = fraction

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        reserved = sum(_to_come(r, r.num_tokens, usage) for r in running)
        kept = int(self.fraction * usage.num_total)
        return _blocks(req.num_tokens, usage) + reserved + kept <= usage.num_free


class ReserveShare:
    """All of the newcomer's max_tokens, and a share of what is left of the others': SGLang's new_token_ratio
    (sgl-project/sglang 2026, `srt/managers/schedule_policy.py`, `PrefillAdder`, and `new_token_ratio_tracker.py`).

    The share begins at 0.7 and falls to 0.098 within 600 steps; after a preemption it is what those that run have
    used of their max_tokens, with 20 tokens more each. An admission sees no steps: it takes them from the tokens that
    requests have gained since it was last asked.

    Not the original: SGLang begins again at 0.7 when nobody is left.
    """

    FIRST, LEAST, NUM_STEPS = 0.7, 0.7 * 0.14, 600
    SPARE = 20  # tokens each after a preemption
    MOST_OUTPUT = 4096  # tokens that are reserved of one request's output

    def __init__(self, max_model_len: int):
        self.max_model_len = max_model_len
        self.share = self.FIRST
        self._outputs: dict[str, int] = {}  # tokens of those that ran when it was last asked
        self._preempted: tuple[str, int] = ("", 0)  # who was seen to come back, and how often it had been preempted

    def admits(self, req: Request, new_tokens: int, running: Sequence[Request], usage: KVUsage) -> bool:
        self._learn(req, running)
        reserved = sum(_to_come(r, self._expected(r), usage) for r in running)
        return _blocks(req.num_tokens + self._output(req), usage) + reserved <= usage.num_free

    def _expected(self, req: Request) -> int:
        """Slots. Who has just entered counts whole."""
        share = self.share if req.num_output_tokens else 1.0
        return req.num_tokens + int(share * self._output(req))

    def _output(self, req: Request) -> int:
        """Tokens to come, but for the last, which needs no slot."""
        return min(max(req.num_final_slots(self.max_model_len) - req.num_tokens, 0), self.MOST_OUTPUT)

    def _learn(self, req: Request, running: Sequence[Request]) -> None:
        fall = (self.FIRST - self.LEAST) / self.NUM_STEPS
        outputs = {r.id: r.num_output_tokens for r in running}
        num_steps = max((outputs[r.id] - self._outputs.get(r.id, outputs[r.id]) for r in running), default=0)
        self.share = max(self.LEAST, self.share - fall * num_steps)
        self._outputs = outputs
        if req.num_preemptions and self._preempted != (req.id, req.num_preemptions):
            self._preempted = req.id, req.num_preemptions
            limits = sum(r.num_output_tokens + self._output(r) for r in running)
            used = sum(outputs.values()) + self.SPARE * len(running)
            self.share = min(1.0, used / (limits + 1))


def _to_come(req: Request, slots: int, usage: KVUsage) -> int:
    """Blocks that it will take to grow to so many slots."""
    held = req.num_computed_tokens + req.num_in_flight
    return max(_blocks(slots, usage) - _blocks(held, usage), 0)


def _blocks(num_tokens: int, usage: KVUsage) -> int:
    return -(-num_tokens // usage.block_size) * usage.num_groups
