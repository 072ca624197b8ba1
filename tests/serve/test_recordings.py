"""Rule: sound is read in a child, of the kinds that are named, and takes no more memory than its seconds do."""

from __future__ import annotations

import io
import os
import struct

import numpy as np
import pytest
import soundfile
from models.speech import recording, sound

from minivllm import wanted
from minivllm.engine.audio import RATE, RATES
from minivllm.errors import BadRequest
from minivllm.sandbox import Sandbox
from minivllm.serve import recordings, sound_child
from minivllm.serve.containers import admitted
from minivllm.serve.recordings import pieces

DOCUMENTED = {("WAV", kind) for kind in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")}
DOCUMENTED |= {("WAVEX", kind) for _, kind in DOCUMENTED}
DOCUMENTED |= {("FLAC", kind) for kind in ("PCM_S8", "PCM_16", "PCM_24")}
DOCUMENTED |= {("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_I"), ("MP3", "MPEG_LAYER_II")}
DOCUMENTED |= {("MP3", "MPEG_LAYER_III")}
FORMATS = sorted(soundfile.available_formats().keys() - {"SD2"})  # which would write a second file, beside the test
KINDS = [(kind, sub) for kind in FORMATS for sub in soundfile.available_subtypes(kind)]


def written(kind: str, sub: str) -> bytes | None:
    """None: the library reads it, and does not write it."""
    try:
        return sound(recording(0), format=kind, subtype=sub)
    except (soundfile.SoundFileError, ValueError, TypeError):
        return None


@pytest.mark.parametrize(("kind", "sub"), KINDS)
def test_of_all_kinds_that_the_library_reads_those_that_are_named_are_opened(kind, sub):
    data = written(kind, sub)
    assert data is None or (admitted(data) is not None) == ((kind, sub) in DOCUMENTED)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_bytes_are_looking_at_them_ends(seed):
    draw = np.random.default_rng(seed)
    head = draw.choice(np.array([b"RIFF\x04\0\0\0WAVE", b"OggS", b"ID3\x04\0\0", b"fLaC", b"\xff\xfb", b""], object))
    data = head + draw.bytes(int(draw.integers(0, 200)))
    for end in range(len(data)):
        admitted(data[:end])


def test_a_tag_is_left_out_and_what_stands_behind_it_is_looked_at():
    tag = b"ID3\x04\0\0" + bytes([0, 0, 1, 0]) + bytes(128)
    flac = sound(recording(0), format="FLAC")
    assert admitted(tag + tag + flac) == flac
    assert admitted(tag + written("AIFF", "IMA_ADPCM")) is None


def test_a_second_description_of_the_samples_is_refused():
    wav = sound(recording(0), subtype="PCM_16")
    adpcm = struct.pack("<HHIIHH", 0x11, 1, RATE, RATE, 256, 4)
    assert admitted(wav + b"fmt " + struct.pack("<I", len(adpcm)) + adpcm) is None


class Reader:
    """Of a file, counting the samples that one call reads."""

    most = 0

    def __init__(self, file: soundfile.SoundFile):
        self._file, self.samplerate = file, file.samplerate

    def read(self, frames: int, **how: object) -> np.ndarray:
        Reader.most = max(Reader.most, frames * self._file.channels)
        return self._file.read(frames, **how)


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (48_000, 2), (192_000, 8), (384_000, 32)])
def test_some_thousand_frames_are_decoded_at_once_whatever_the_rate_and_channels(rate, channels):
    data, Reader.most = sound(np.zeros((3 * rate // 2, channels), np.float32), rate, subtype="PCM_U8"), 0
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        found = list(sound_child._pieces(Reader(file), 1))
    assert sum(map(len, found)) == 3 * rate // 2 and all(piece.ndim == 1 for piece in found)
    assert Reader.most <= sound_child.FRAMES * channels


@pytest.mark.parametrize("rate", [RATES[0] - 1, RATES[1] + 1, 1_000_000, 2**31 - 1])
def test_a_rate_that_no_sound_has_is_refused_before_anything_is_decoded(rate):
    data = bytearray(sound(recording(0), subtype="PCM_16"))
    data[24:28] = struct.pack("<I", rate)  # of the header
    with pytest.raises(BadRequest, match="samples a second; 1,000 to 384,000 are read"):
        list(pieces(bytes(data), 1, 10, "file"))


@pytest.mark.parametrize("kind", ["OGG", "FLAC"])
def test_what_is_made_of_a_recording_depends_on_its_seconds_alone(kind):
    rate = 192_000 if kind == "FLAC" else 96_000
    many = sound(np.zeros((rate, 8), np.float32), rate, kind)
    for data in (many, sound(np.zeros(8_000, np.float32), 8_000, kind)):
        (piece,) = pieces(data, 30, 30, "file")
        assert len(piece.samples) == RATE and piece.seconds == 1.0


def test_the_library_runs_in_a_process_of_its_own(monkeypatch):
    list(pieces(sound(recording(0)), 1, 10, "file"))
    assert recordings._sandbox().pid not in (None, os.getpid())
    monkeypatch.setattr(Sandbox, "stream", lambda *_: iter([]))
    assert list(pieces(sound(recording(0)), 1, 10, "file")) == []


def test_a_child_goes_on_after_a_refusal_and_ends_with_its_client():
    long = sound(np.zeros(60 * RATE, np.float32), format="FLAC")
    list(pieces(sound(recording(0)), 1, 10, "file"))
    pid = recordings._sandbox().pid
    with pytest.raises(BadRequest, match="2 seconds at most"):
        list(pieces(long, 1, 2, "file"))
    assert recordings._sandbox().pid == pid
    with wanted.asking(lambda: False), pytest.raises(wanted.Unwanted):
        list(pieces(long, 1, 100, "file"))
