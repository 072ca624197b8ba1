"""A sound file as pieces that a model hears one at a time: its kind is looked at here, and it is read in a child with
limits (sound_child.py), one for each thread that asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from minivllm import wanted
from minivllm.errors import BadRequest
from minivllm.sandbox import Limits, Sandbox, TooMuch
from minivllm.serve import sound_child
from minivllm.serve.containers import FORMATS, admitted

# Time: a minute of ordinary sound is decoded in a tenth of a second. Memory: the file, and a piece while its rate is
# changed, which is the most at 384,000 samples a second.
LIMITS = Limits(seconds=60.0, megabytes=1024)

_own = threading.local()  # the sandbox of a thread


class Recording(NamedTuple):
    samples: np.ndarray  # float32, of all channels together, audio.RATE of them a second
    seconds: float


def pieces(data: bytes, seconds: int, most: int, name: str) -> Iterator[Recording]:
    """Of at most `seconds` each, cut where it is quiet. most: seconds of all. name: of the field. Raises BadRequest;
    Unwanted if nobody waits for them any more."""
    if (file := admitted(data)) is None:
        why = "no sound file that can be read (Format not recognised)"
        raise BadRequest(f"{name} is {why}. Read are {FORMATS}", name)
    task = msgspec.msgpack.encode(sound_child.Task(file, seconds, most, name))
    refused = None
    try:
        for part in _sandbox().stream(task, wanted.is_wanted):
            if part[:1] == sound_child.REFUSED:
                refused = BadRequest(part[1:].decode(), name)
            elif part:
                yield _recording(part[1:])
    except TooMuch as error:
        raise BadRequest(f"{name}: reading it {error}", name) from None
    if refused is not None:  # once the child is done: who leaves it before ends it
        raise refused


def _recording(part: bytes) -> Recording:
    size = sound_child.SECONDS.size
    return Recording(np.frombuffer(part, "<f4", offset=size), sound_child.SECONDS.unpack_from(part)[0])


def _sandbox() -> Sandbox:
    if not hasattr(_own, "sandbox"):
        _own.sandbox = Sandbox("minivllm.serve.sound_child", b"", LIMITS)
    return _own.sandbox
