"""What a step and a request may reach at most, and who can never be served within it."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.errors import BadRequest, NeverFits
from minivllm.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # requests in a step
    max_num_batched_tokens: int  # tokens in a step: the budget
    max_model_len: int  # tokens of a request, output included
    kv_capacity: int  # tokens that the whole KV pool holds
    max_new_items: int | None = None  # items that a step makes ready, but always all of one request (items.py)
    max_items: int | None = None  # that are ready at once

    def check_fits(self, req: Request, chunked_prefill: bool) -> None:
        """Raises NeverFits for a request that no amount of waiting can serve."""
        prompt, longest = req.num_prompt_tokens, req.num_final_slots(self.max_model_len)
        if prompt == 0:
            raise BadRequest("the prompt is empty", "prompt")
        if prompt >= self.max_model_len:
            raise NeverFits(
                f"the prompt has {prompt} tokens, which leaves no room for output: "
                f"max_model_len is {self.max_model_len} tokens",
                "prompt",
            )
        if longest > self.kv_capacity:
            raise NeverFits(
                f"prompt and output may reach {longest} tokens; the KV pool holds {self.kv_capacity}. "
                "Lower max_tokens or give the pool more blocks (kv.num_blocks, kv.memory)",
                "max_tokens",
            )
        if not chunked_prefill and longest > self.max_num_batched_tokens:
            raise NeverFits(
                f"prompt and output may reach {longest} tokens, which one step must be able to recompute; "
                f"without chunked prefill a step takes {self.max_num_batched_tokens}. "
                "Raise scheduler.max_num_batched_tokens or turn scheduler.chunked_prefill on",
                "max_tokens",
            )
