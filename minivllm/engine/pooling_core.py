"""PoolingCore: the step loop of an engine that pools. The counterpart of EngineCore, and far less.

A request takes one forward and leaves nothing behind, so there is no KV cache, no preemption and no state between
steps: a step takes requests from the head of the queue while they fit a budget of tokens and a number of requests.
First come, first served, so none can be passed over for ever. It knows no text and no sockets.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minivllm.engine.core import EngineStats
from minivllm.pooling.text import Text

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger("minivllm")

NOT_FINITE = "the model computed a vector with numbers that are not finite (NaN or infinity)"


class RunsTexts(Protocol):
    def run(self, texts: list[Text]) -> np.ndarray: ...


class PoolingRequest(NamedTuple):
    id: str
    text: Text


class Pooled(NamedTuple):
    """The end of a request."""

    id: str
    vector: np.ndarray | None  # [width] float32; None: it failed
    error: str = ""


class Step(NamedTuple):
    """What happened in it, for whoever watches."""

    done: list[Pooled]
    total_tokens: int
    milliseconds: float


class PoolingCore:
    def __init__(self, model: RunsTexts, max_num_seqs: int, max_num_batched_tokens: int, check: bool = False):
        self.model = model
        self.max_num_seqs, self.max_num_batched_tokens, self.check = max_num_seqs, max_num_batched_tokens, check
        self.stats = EngineStats()
        self._waiting: deque[PoolingRequest] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request: PoolingRequest) -> None:
        """The caller has refused texts that are empty or longer than the budget."""
        length = len(request.text.token_ids)
        assert 0 < length <= self.max_num_batched_tokens, length
        self._waiting.append(request)
        self.stats.prompt_tokens += length
        self.stats.num_waiting = len(self._waiting)

    def abort(self, req_ids: Iterable[str]) -> None:
        """Forget those that still wait."""
        gone = frozenset(req_ids)
        self._waiting = deque(request for request in self._waiting if request.id not in gone)
        self.stats.num_waiting = len(self._waiting)

    def step(self) -> Step:
        """Run the next batch, if anything waits."""
        begin, batch = time.perf_counter(), self._take()
        self.stats.num_running, self.stats.num_waiting = len(batch), len(self._waiting)
        done = self._run(batch) if batch else []
        self.stats.num_running = 0
        self.stats.num_steps += 1
        num_tokens = sum(len(request.text.token_ids) for request in batch)
        assert not self.check or ([d.id for d in done] == [r.id for r in batch])
        return Step(done, num_tokens, 1e3 * (time.perf_counter() - begin))

    def _take(self) -> list[PoolingRequest]:
        batch: list[PoolingRequest] = []
        room = self.max_num_batched_tokens
        while self._waiting and len(batch) < self.max_num_seqs and len(self._waiting[0].text.token_ids) <= room:
            batch.append(self._waiting.popleft())
            room -= len(batch[-1].text.token_ids)
        return batch

    def _run(self, batch: list[PoolingRequest]) -> list[Pooled]:
        """A batch that fails is run again one by one: an error belongs to the request that causes it."""
        try:
            vectors = self.model.run([request.text for request in batch])
        except Exception as error:
            if len(batch) > 1:
                return [pooled for request in batch for pooled in self._run([request])]
            logger.error("request %s failed", batch[0].id, exc_info=error)
            return [Pooled(batch[0].id, None, f"{type(error).__name__}: {error}")]
        return [_finite(request.id, vector) for request, vector in zip(batch, vectors, strict=True)]


def _finite(req_id: str, vector: np.ndarray) -> Pooled:
    """JSON would write NaN as null, and a client would sort by it."""
    import numpy as np

    return Pooled(req_id, vector) if np.isfinite(vector).all() else Pooled(req_id, None, NOT_FINITE)
