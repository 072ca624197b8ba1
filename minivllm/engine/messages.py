"""What passes between a front end and its engine core, in one process or across two: plain data, so that it can be
encoded. Commands go down, messages come up.

On a socket each is one MessagePack value (msgspec's tagged unions: the kind stands first), a command behind the name of
the front end that sends it. Nothing is ever pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minivllm import errors
from minivllm.config import Decision, EngineConfig
from minivllm.engine.core import EngineStats
from minivllm.lora.table import Adapter
from minivllm.plan import Delta
from minivllm.request import EngineRequest, Sibling, sequence_ids


class Command(msgspec.Struct, tag=True, array_like=True, gc=False):
    pass


class Add(Command):
    """A prompt's sequences. What they share, such as lists as long as the vocabulary, is sent once, and is one object
    for all of them behind the wire, too."""

    request: EngineRequest  # the first
    siblings: list[Sibling] = []
    others: list[EngineRequest] = []  # with prompts of their own, which shall run together with it

    @classmethod
    def together(cls, requests: Sequence[EngineRequest]) -> Add:
        first, *others = requests
        return cls(first, [Sibling(other.id, other.params.seed) for other in others])

    @property
    def sequence_ids(self) -> list[str]:
        """Those that deltas bear."""
        request = self.request
        if request.beam is not None:
            return sequence_ids(request.group or request.id, request.beam.beam_width)
        return [request.id, *(sibling.id for sibling in self.siblings), *(other.id for other in self.others)]

    @property
    def requests(self) -> list[EngineRequest]:
        return [self.request, *(sibling.beside(self.request) for sibling in self.siblings), *self.others]


class Abort(Command):
    req_ids: list[str]


class Call(Command):
    """One of the engine's `calls`, by name, between two steps. Answered by Returned with the same id."""

    id: int
    name: str
    args: list[Any]
    replica: int | None = None  # of an engine with several: this one; None: all


class Close(Command):
    """Leave what runs, free everything, end."""


class Gone(Command):
    """A front end has ended, however that went: nobody reads the answers to its requests."""

    client: str


class Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    pass


class Facts(Message):
    """The engine is ready, or ready again after its end. What a front end needs to know of it."""

    config: EngineConfig
    decisions: list[Decision]
    max_model_len: int
    model_name: str
    tokenizer_dir: str
    info: dict[str, Any]
    adapters: list[Adapter]  # LoRA's, loaded now
    replica: int = 0  # of an engine with several, here and below: which of them


class Adapters(Message):
    """Those that requests may name from now on: a front end, this one or another, has loaded or unloaded one."""

    loaded: list[Adapter]


class Report(Message):
    """One step is done."""

    deltas: list[Delta]
    stats: EngineStats  # after the step
    joined: list[str]  # requests that ran for the first time, or again after a preemption
    total_tokens: int
    times_ms: dict[str, float]
    replica: int = 0


class Stalled(Message):
    """A step or a call runs longer than engine.step_timeout. Told once; Resumed follows if it ends."""

    seconds: float
    plan: str  # what the step does, or the call's name
    replica: int = 0


class Resumed(Message):
    """What Stalled has told of is over."""

    replica: int = 0


class Refused(Message):
    """A request that the core did not take."""

    req_id: str
    error: Failure


class Returned(Message):
    """What a Call gave, as plain data, or how it failed."""

    id: int
    value: Any
    error: Failure | None = None


class Ended(Message):
    """The core will not step again, unless a Facts follows."""

    error: Failure
    replica: int = 0


class Failure(msgspec.Struct, array_like=True, gc=False):
    """An exception by name. Errors of minivllm come back as what they were, any other as EngineDead."""

    kind: str
    text: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error), getattr(error, "param", None))

    def exception(self) -> errors.MinivllmError:
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.MinivllmError)):
            return errors.EngineDead(f"{self.kind}: {self.text}")
        return kind(self.text, self.param) if issubclass(kind, errors.BadRequest) else kind(self.text)


COMMANDS = Add | Abort | Call | Close | Gone
MESSAGES = Facts | Adapters | Report | Stalled | Resumed | Refused | Returned | Ended
