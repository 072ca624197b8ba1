"""Prompts: a trace's requests as an engine core takes them, made cheaply. For a million of them, in their order.

As workload.prompt_tokens has it, the same name gives the same piece. What is a request's own begins with its number and
goes on with one token: to a prefix cache, whose keys are chained, that is as good as chance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from minivllm.request import EngineRequest, SamplingParams
from minivllm.simulate.workload import FIRST_TOKEN, TraceRequest, prompt_tokens

KEPT_PIECES = 1024  # whose tokens are remembered
KEPT_LENGTHS = 1 << 16


class Prompts:
    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._piece: Callable[[int, int], list[int]] = lru_cache(KEPT_PIECES)(self._make_piece)
        self._params: Callable[[int], SamplingParams] = lru_cache(KEPT_LENGTHS)(params_of)
        self._filler = [FIRST_TOKEN]

    def request(self, number: int, asked: TraceRequest) -> EngineRequest:
        """number: of no other request. A trace that has groups has each request in one."""
        name, group = (number, "") if asked.group is None else (asked.group, f"of {asked.group}")
        tokens, params = self.tokens(name, asked), self._params(asked.num_output)
        return EngineRequest(str(number), tokens, params, arrival_time=asked.arrival, group=group)

    def tokens(self, number: int, asked: TraceRequest) -> list[int]:
        shared: list[int] = []
        for name in asked.pieces:
            if len(shared) >= asked.num_prompt:
                break
            shared += self._piece(name, asked.piece_tokens)
        del shared[asked.num_prompt :]
        return shared + self._own(number, asked.num_prompt - len(shared))

    def _own(self, number: int, count: int) -> list[int]:
        """The number's digits, the lowest first; where they do not fit, numbers far apart are alike."""
        base = self._vocab_size - FIRST_TOKEN
        digits = []
        while number or not digits:
            number, digit = divmod(number, base)
            digits.append(FIRST_TOKEN + digit)
        if len(self._filler) < count:
            self._filler *= -(-count // len(self._filler))
        return (digits + self._filler[: max(0, count - len(digits))])[:count]

    def _make_piece(self, name: int, count: int) -> list[int]:
        return prompt_tokens(TraceRequest(0.0, count, 1, (name,), count), self._vocab_size, seed=0)


def params_of(num_output: int) -> SamplingParams:
    """So many tokens, exactly."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
