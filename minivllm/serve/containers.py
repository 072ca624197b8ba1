"""Which sound files are opened at all, by their first bytes. A library that reads files reads many more kinds of them
than anybody asks for, and its faults are in the rare ones.

    WAV    RIFF .. WAVE, whose samples are plain: PCM, floats, A-law, u-law (RFC 2361)
    FLAC   fLaC (RFC 9639)
    Ogg    OggS (RFC 3533), whose first packet begins a Vorbis, Opus or FLAC stream
    MP3    the first frame of an MPEG layer I to III

An ID3 tag before one of these is left out.
"""

from __future__ import annotations

import struct

FORMATS = "WAV, FLAC, Ogg and MP3"
PLAIN = {1, 3, 6, 7}  # WAVE_FORMAT_PCM, IEEE_FLOAT, ALAW, MULAW
EXTENSIBLE = 0xFFFE
STREAMS = (b"\x01vorbis", b"OpusHead", b"\x7fFLAC")
MOST_TAGS = 16


def admitted(data: bytes) -> bytes | None:
    """The file without its tag; None if it is of none of these kinds."""
    for _ in range(MOST_TAGS):
        if data[:3] != b"ID3":
            break
        data = data[10 + _tag_size(data[6:10]) :]
    return data if any(is_kind(data) for is_kind in (_is_wav, _is_flac, _is_ogg, _is_mp3)) else None


def _tag_size(data: bytes) -> int:
    """ID3v2: four bytes of seven bits."""
    size = 0
    for byte in data:
        size = size << 7 | byte & 0x7F
    return size


def _is_wav(data: bytes) -> bool:
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return False
    formats, at = [], 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"fmt ":
            formats.append(_format(data[at + 8 : at + 8 + size]))
        at += 8 + size + size % 2
    return len(formats) == 1 and formats[0] in PLAIN


def _format(chunk: bytes) -> int:
    if len(chunk) < 16:
        return 0
    (tag,) = struct.unpack_from("<H", chunk)
    return struct.unpack_from("<H", chunk, 24)[0] if tag == EXTENSIBLE and len(chunk) >= 26 else tag


def _is_flac(data: bytes) -> bool:
    return data[:4] == b"fLaC"


def _is_ogg(data: bytes) -> bool:
    return data[:4] == b"OggS" and len(data) > 27 and data[27 + data[26] :].startswith(STREAMS)


def _is_mp3(data: bytes) -> bool:
    """Eleven bits of ones, then a version and a layer that exist."""
    return len(data) > 4 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x18 != 0x08 and data[1] & 6 != 0
