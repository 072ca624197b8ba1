"""A sound file as pieces that a model hears one at a time.

Read by libsndfile (soundfile): WAV, AIFF, FLAC, Ogg with Vorbis or Opus, MP3. It is decoded piece by piece, and no
further than a recording may be long: a small file may hold days of silence.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from minivllm.errors import BadRequest

FORMATS = "WAV, FLAC, Ogg and MP3"
MOST_CHANNELS = 32
BACK_SECONDS = 1.0  # before a piece must end, its end is looked for in this time, or in the last quarter of it
QUIET_SECONDS = 0.1  # that are compared by how loud they are


class Recording(NamedTuple):
    samples: np.ndarray  # float32, of all channels together
    rate: int  # of them a second


def pieces(data: bytes, seconds: int, most: int, name: str) -> Iterator[Recording]:
    """Of at most `seconds` each, cut where it is quiet. most: seconds of all. name: of the field. Raises BadRequest."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.channels > MOST_CHANNELS:
                raise BadRequest(f"{name}: {file.channels} channels; at most {MOST_CHANNELS} are mixed", name)
            room = most * file.samplerate
            for piece in _pieces(file, seconds):
                if (room := room - len(piece)) < 0:
                    limit = f"{most:,} seconds at most in one request (--max-audio-seconds)"
                    raise BadRequest(f"{name}: the recording is too long; {limit}", name)
                yield Recording(piece, file.samplerate)
    except soundfile.SoundFileError as e:
        reason = str(e).removeprefix("Error opening ").partition(": ")[2].rstrip(".") or "unknown"
        raise BadRequest(f"{name} is no sound file that can be read ({reason}). Read are {FORMATS}", name) from None


def _pieces(file: Any, seconds: int) -> Iterator[np.ndarray]:
    """file: a soundfile.SoundFile."""
    whole, kept = seconds * file.samplerate, np.zeros(0, np.float32)
    while True:
        new = file.read(whole + 1 - len(kept), dtype="float32", always_2d=True).mean(1, dtype=np.float32)
        kept = np.concatenate([kept, new])
        if len(kept) <= whole:  # the file has ended
            if len(kept):
                yield kept
            return
        end = quietest(kept[:whole], file.samplerate)
        yield kept[:end]
        kept = kept[end:]


def quietest(samples: np.ndarray, rate: int) -> int:
    """Where to cut: in the middle of what is least loud near the end."""
    window = max(1, int(QUIET_SECONDS * rate))
    first = len(samples) - min(int(BACK_SECONDS * rate), len(samples) // 4)
    squares = np.cumsum(samples[first:].astype(np.float64) ** 2)
    loudness = squares[window:] - squares[:-window]  # of the window behind each place
    return len(samples) if not len(loudness) else first + int(loudness.argmin()) + window // 2
