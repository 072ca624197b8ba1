"""A recording as a prompt's input: samples -> the log-mel spectrogram that a model's encoder reads (vLLM's
multi_modal_data={"audio": ..}).

In the engine it is one item (request.Item) of the prompt's first token: no token stands for it, all of them read it. So
its digest is in the key of the first block and thereby in all keys behind it, and the spectrogram is carried to the
workers once, however many requests name it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minivllm import file_keys
from minivllm.errors import BadRequest, ModelError
from minivllm.files import read_json
from minivllm.request import Beside, Item

KEY = "multi_modal_data"
RATE = 16_000  # samples a second that a spectrogram is made of
HOP = 160  # of them, from one frame to the next
RATES = (1_000, 384_000)  # that a recording may have
LOUDEST = 1e4  # that a sample may be; full scale is 1


class AudioReader:
    """Of a model that reads recordings. Its requests all have one."""

    def __init__(self, num_mels: int, num_frames: int):
        """Of the encoder's input. The filters are transformers', whose import takes seconds."""
        from transformers import WhisperFeatureExtractor

        self.seconds, self.num_mels = num_frames * HOP // RATE, num_mels
        self._extract = WhisperFeatureExtractor(feature_size=num_mels, chunk_length=self.seconds)

    def check(self, folder: Path) -> None:
        """preprocessor_config.json, if the folder has one. Raises ModelError for one that asks for another
        spectrogram."""
        if not (file := folder / "preprocessor_config.json").is_file():
            return
        given, where = read_json(file), str(file)
        here = {"feature_size": self.num_mels, "sampling_rate": RATE, "hop_length": HOP, "chunk_length": self.seconds}
        for key, value in here.items():
            if given.get(key, value) != value:
                raise ModelError(f"{where}: {key}={given[key]!r} is not supported: the model's encoder reads {value}")
        file_keys.warn(where, file_keys.check(where, given, here.keys(), file_keys.PREPROCESSOR))

    def read(self, prompt: Any) -> Beside:
        """Of a prompt dictionary, which may hold what `heard` has made. Raises BadRequest."""
        data = prompt.get(KEY) if isinstance(prompt, Mapping) else None
        if data is None:
            raise BadRequest(
                'this model writes what it hears: give {"prompt": .., "multi_modal_data": {"audio": (samples, rate)}}',
                KEY,
            )
        if not isinstance(data, Mapping) or set(data) != {"audio"}:
            raise BadRequest(f'{KEY} must be {{"audio": ..}}: this model takes no other kind', KEY)
        return data["audio"] if isinstance(data["audio"], Beside) else self.heard(data["audio"])

    def heard(self, given: Any) -> Beside:
        """Samples, of 16,000 a second, or (samples, how many a second). Raises BadRequest."""
        samples, rate = given if isinstance(given, tuple) and len(given) == 2 else (given, RATE)
        samples = resampled(as_samples(samples), _checked(rate))
        if (seconds := len(samples) / RATE) > self.seconds:
            raise BadRequest(
                f"the recording is {seconds:.1f} seconds long, and the model hears {self.seconds} at once: cut it", KEY
            )
        found = self._extract(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        content = np.ascontiguousarray(found, "<f4").tobytes()
        digest = f"audio:{hashlib.sha256(content).hexdigest()}"
        return Beside((), (Item(0, 1, digest),), {digest: content})


def as_samples(given: Any) -> np.ndarray:
    """Of one channel, an array, a tensor or a list of floats -> float32. Raises BadRequest."""
    if hasattr(given, "detach"):  # a tensor of torch, which this file does not import
        given = given.detach().to("cpu").float().numpy()
    if isinstance(given, Sequence) and all(isinstance(x, float) for x in given):
        given = np.array(given, np.float32)
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f":
        raise BadRequest(
            f"audio must be an array of floating-point samples from -1 to 1, got {type(given).__name__}", KEY
        )
    if given.ndim != 1 or not given.size:
        raise BadRequest(f"audio must be samples of one channel, of shape [length], got {list(given.shape)}", KEY)
    if not (np.abs(given) <= LOUDEST).all():  # NaN is not, either
        raise BadRequest("audio must hold samples from -1 to 1, and not infinite or no numbers", KEY)
    return given.astype(np.float32)


def _checked(rate: Any) -> int:
    low, high = RATES
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not low <= rate <= high:
        raise BadRequest(f"audio's rate must be {low:,} to {high:,} samples a second, got {rate!r}", KEY)
    return int(rate)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """At RATE samples a second, by the discrete Fourier transform of the whole: what lies above half of the lower rate
    is left out, everything else stays as it is."""
    if rate == RATE:
        return samples
    count = max(1, round(len(samples) * RATE / rate))
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)
