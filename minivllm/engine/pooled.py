"""From the engine core's deltas to the vectors that a client waits for. The counterpart of output.py, and far less: a
request comes in one piece, at its end.

A client's request may have many texts, each of them a request of the core; it is complete when all are, or one has
failed. Names and shapes of the offline outputs are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.errors import MinivllmError, OutOfMemory
from minivllm.plan import NO_MEMORY, Delta

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """One text's vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput  # .embedding: list[float], at unit length if the model says so
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """How well one document answers its query."""

    request_id: str
    prompt_token_ids: list[int]  # of the document, or of the pair
    outputs: ScoringOutput  # .score: float
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]  # of each label, by its number
    label: str  # of the greatest

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """Which class one text is of."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput  # .probs: list[float]
    finished: bool = True


@dataclass(slots=True)
class PooledOutput:
    """The end of a client's request."""

    request_id: str
    vectors: list[np.ndarray]  # [width] float32 each, in the order of its texts; not all of them if one has failed
    error: str | None = None
    finished: bool = True

    def all_vectors(self, what: str = "") -> list[np.ndarray]:
        """Raises OutOfMemory or MinivllmError for a text that failed. what: stands before the reason."""
        if self.error is not None:
            raise (OutOfMemory if self.error == NO_MEMORY else MinivllmError)(what + self.error)
        return self.vectors


@dataclass(slots=True)
class _Call:
    """A client's request."""

    id: str
    ids: list[str]  # of the engine core, in the order of the texts
    found: dict[str, np.ndarray] = field(default_factory=dict)


class PooledProcessor:
    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self._call_of: dict[str, _Call] = {}  # by the id that the engine core knows

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, request_id: str, ids: Sequence[str]) -> None:
        """Expect vectors. ids: those that the engine core will use, one a text."""
        assert request_id not in self._calls, request_id
        call = self._calls[request_id] = _Call(request_id, list(ids))
        self._call_of |= dict.fromkeys(ids, call)

    def parent_of(self, req_id: str) -> str | None:
        """The request that an id of the engine core belongs to."""
        call = self._call_of.get(req_id)
        return None if call is None else call.id

    def scheduled(self, req_ids: Iterable[str], begin: float) -> None:
        """No times are told of a vector."""

    def named(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """No token is reported, so none has to be named."""
        return {}

    def process(self, deltas: Sequence[Delta]) -> tuple[list[PooledOutput], list[str]]:
        """One step's deltas -> (requests that are complete, ids to abort in the engine core)."""
        import numpy as np

        outputs: list[PooledOutput] = []
        aborts: list[str] = []
        for delta in deltas:
            call = self._call_of.pop(delta.req_id, None)
            if call is None:  # whoever asked has gone
                continue
            if delta.error is None:
                call.found[delta.req_id] = np.frombuffer(delta.pooled, np.float32)
            else:
                aborts += self.abort(call.id)
                outputs.append(PooledOutput(call.id, [], delta.error))
            if len(call.found) == len(call.ids):
                del self._calls[call.id]
                outputs.append(PooledOutput(call.id, [call.found[req_id] for req_id in call.ids]))
        return outputs, aborts

    def abort(self, request_id: str) -> list[str]:
        """Forget a request whose client has left; the ids to abort in the engine core. Unknown ids are no error."""
        call = self._calls.pop(request_id, None)
        if call is None:
            return []
        return [req_id for req_id in call.ids if self._call_of.pop(req_id, None) is not None]
