"""In a child (minivllm/sandbox.py): a sound file as pieces that a model hears one at a time.

Read by libsndfile (soundfile), some thousand frames at a time, whose channels are mixed at once: memory depends on how
long a piece is, and neither on its channels nor on the file. It is read no further than a recording may be long: a
small file may hold days of silence.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from minivllm.engine.audio import RATES, as_samples, resampled
from minivllm.errors import BadRequest
from minivllm.serve.containers import FORMATS

MOST_CHANNELS = 32
FRAMES = 4096  # that are decoded at once
BACK_SECONDS = 1.0  # before a piece must end, its end is looked for in this time, or in the last quarter of it
QUIET_SECONDS = 0.1  # that are compared by how loud they are
SECONDS = struct.Struct("<d")
REFUSED, PIECE = b"r", b"s"  # the first byte of a part


class Task(msgspec.Struct, array_like=True):
    data: bytes
    seconds: int  # of a piece, at most
    most: int  # of all
    name: str  # of the field


def prepare(setup: bytes) -> Callable[[bytes], Iterator[bytes]]:
    import soundfile  # noqa: F401  before the limits are set

    return work


def work(task: bytes) -> Iterator[bytes]:
    """Parts: b"s", how many seconds they are, and float32 samples, RATE of them a second; or b"r" and why the file is
    refused."""
    asked = msgspec.msgpack.decode(task, type=Task)
    try:
        for piece, rate in pieces(asked):
            samples = resampled(as_samples(piece), rate)
            yield PIECE + SECONDS.pack(len(piece) / rate) + samples.astype("<f4").tobytes()
    except BadRequest as error:
        yield REFUSED + str(error).encode()


def pieces(asked: Task) -> Iterator[tuple[np.ndarray, int]]:
    """Samples of all channels together, and how many there are in a second. Cut where it is quiet. Raises
    BadRequest."""
    import soundfile

    name, (low, high) = asked.name, RATES
    try:
        with soundfile.SoundFile(io.BytesIO(asked.data)) as file:
            if file.channels > MOST_CHANNELS:
                raise BadRequest(f"{name}: {file.channels} channels; at most {MOST_CHANNELS} are mixed", name)
            if not low <= file.samplerate <= high:
                what = f"{file.samplerate:,} samples a second; {low:,} to {high:,} are read"
                raise BadRequest(f"{name}: {what}", name)
            room = asked.most * file.samplerate
            for piece in _pieces(file, asked.seconds):
                if (room := room - len(piece)) < 0:
                    limit = f"{asked.most:,} seconds at most in one request (--max-audio-seconds)"
                    raise BadRequest(f"{name}: the recording is too long; {limit}", name)
                yield piece, file.samplerate
    except soundfile.SoundFileError as e:
        reason = str(e).removeprefix("Error opening ").partition(": ")[2].rstrip(".") or "unknown"
        raise BadRequest(f"{name} is no sound file that can be read ({reason}). Read are {FORMATS}", name) from None


def _pieces(file: Any, seconds: int) -> Iterator[np.ndarray]:
    """file: a soundfile.SoundFile."""
    whole, kept = seconds * file.samplerate, np.zeros(0, np.float32)
    while True:
        kept = np.concatenate([kept, *_mixed(file, whole + 1 - len(kept))])
        if len(kept) <= whole:  # the file has ended
            if len(kept):
                yield kept
            return
        end = quietest(kept[:whole], file.samplerate)
        yield kept[:end]
        kept = kept[end:]


def _mixed(file: Any, number: int) -> Iterator[np.ndarray]:
    """The next frames, so many if there are."""
    while number > 0:
        block = file.read(min(number, FRAMES), dtype="float32", always_2d=True)
        if not len(block):
            return
        yield block.mean(1, dtype=np.float32)
        number -= len(block)


def quietest(samples: np.ndarray, rate: int) -> int:
    """Where to cut: in the middle of what is least loud near the end."""
    window = max(1, int(QUIET_SECONDS * rate))
    first = len(samples) - min(int(BACK_SECONDS * rate), len(samples) // 4)
    squares = np.cumsum(samples[first:].astype(np.float64) ** 2)
    loudness = squares[window:] - squares[:-window]  # of the window behind each place
    return len(samples) if not len(loudness) else first + int(loudness.argmin()) + window // 2
