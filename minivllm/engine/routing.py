"""Which replica a request goes to. A policy is asked once for each prompt, and told of nothing but replicas that died.

round_robin    each in turn
least_loaded   where the fewest sequences live; of equals, where fewest prompt tokens lie before them; then in turn.
               (vLLM's data-parallel load balancer counts requests too, those that wait four times.)
prefix         where the longest beginning of the prompt is cached, unless that replica has far more to do than another
               (SGLang's router, policy cache_aware: prefix matching above a threshold, shortest queue out of balance)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from operator import itemgetter
from typing import NamedTuple, Protocol

from minivllm.kv.block_extras import block_extras
from minivllm.request import EngineRequest

MIN_SHARE = 0.3  # of a prompt that must be known somewhere for its place to matter
SLACK, RATIO = 8, 1.5  # a replica may have so many sequences more than the least loaded one, and so many times as many
MAX_KNOWN_BLOCKS = 1 << 17  # remembered for each replica


class Load(NamedTuple):
    """A replica that runs."""

    replica: int
    num_sequences: int  # that live there
    num_prompt_tokens: int  # of these, of requests of this front end


class Ledger:
    """What a router has sent to a replica and has not heard the end of."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}  # our sequences there -> tokens of their prompts
        self._num_tokens = 0

    def add(self, req_ids: Iterable[str], num_tokens: int) -> None:
        """num_tokens: of each one's prompt. No id is live already."""
        for req_id in req_ids:
            self.live[req_id] = num_tokens
            self._num_tokens += num_tokens

    def remove(self, req_id: str) -> bool:
        """Whether it was live."""
        num_tokens = self.live.pop(req_id, None)
        self._num_tokens -= num_tokens or 0
        return num_tokens is not None

    def clear(self) -> list[str]:
        """Who was live."""
        lost, self.live, self._num_tokens = list(self.live), {}, 0
        return lost

    def load(self, replica: int, num_others: int = 0) -> Load:
        """num_others: sequences there of which it knows nothing else."""
        return Load(replica, len(self.live) + num_others, self._num_tokens)


_LOAD = itemgetter(1, 2)  # sequences, then tokens


class RoutingPolicy(Protocol):
    def choose(self, request: EngineRequest, loads: Sequence[Load]) -> int:
        """The replica of the request. loads: of those that run, at least one, in their order."""
        ...

    def forget(self, replica: int) -> None:
        """It has died: nothing is cached there."""
        ...


class RoundRobin:
    def __init__(self, block_size: int):
        self._turn = count()

    def choose(self, request: EngineRequest, loads: Sequence[Load]) -> int:
        return loads[next(self._turn) % len(loads)].replica

    def forget(self, replica: int) -> None:
        pass  # what is cached where makes no difference


class LeastLoaded:
    def __init__(self, block_size: int):
        self._turn = count(1)
        self._last_turn: dict[int, int] = {}

    def choose(self, request: EngineRequest, loads: Sequence[Load]) -> int:
        least = min(map(_LOAD, loads))
        equal = [load.replica for load in loads if _LOAD(load) == least]
        chosen = min(equal, key=lambda replica: self._last_turn.get(replica, 0))
        self._last_turn[chosen] = next(self._turn)
        return chosen

    def forget(self, replica: int) -> None:
        pass


class Prefix:
    """Remembers the blocks of every prompt that it sent somewhere, by keys that are chained over all blocks before (as
    the prefix cache's are). It knows neither what a replica has evicted meanwhile nor the outputs: a wrong guess costs
    time, never a wrong answer, and so Python's own hash is good enough."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._known: dict[int, OrderedDict[int, None]] = {}  # by replica, the least recently used first
        self._by_load = LeastLoaded(block_size)

    def choose(self, request: EngineRequest, loads: Sequence[Load]) -> int:
        keys = self._keys(request)
        known = [load.replica for load in loads if keys and keys[0] in self._known.get(load.replica, ())]
        matched = {replica: self._match(replica, keys) for replica in known}
        longest = max(matched.values(), default=0)
        candidates: Sequence[Load] = ()
        if longest and longest * self._block_size >= MIN_SHARE * len(request.prompt_token_ids):
            least = min(load.num_sequences for load in loads)
            limit = max(least + SLACK, least * RATIO)
            candidates = [
                load for load in loads if matched.get(load.replica) == longest and load.num_sequences <= limit
            ]
        chosen = self._by_load.choose(request, candidates or loads)
        self._learn(chosen, keys)
        return chosen

    def forget(self, replica: int) -> None:
        self._known.pop(replica, None)

    def _keys(self, request: EngineRequest) -> list[int]:
        size, tokens = self._block_size, request.prompt_token_ids
        keys, key = [], 0
        for first in range(0, len(tokens) - size + 1, size):
            end = first + size
            key = hash((key, *tokens[first:end], *block_extras(request, first, end)))
            keys.append(key)
        return keys

    def _match(self, replica: int, keys: Sequence[int]) -> int:
        """How many blocks of the beginning it has seen."""
        known = self._known.get(replica, ())
        return next((i for i, key in enumerate(keys) if key not in known), len(keys))

    def _learn(self, replica: int, keys: Sequence[int]) -> None:
        known = self._known.setdefault(replica, OrderedDict())
        for key in reversed(keys):  # the beginning last: it outlives what follows it
            known[key] = None
            known.move_to_end(key)
        while len(known) > MAX_KNOWN_BLOCKS:
            known.popitem(last=False)
