"""The requests that every engine gets, as token ids: seeded, new ids in every round, the same for all engines."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Workload:
    what: str
    num_reqs: int
    input_len: tuple[int, int]  # lowest and highest, uniform
    output_len: tuple[int, int]
    counts: str = "output"  # tokens a second of which side: output, input, or decode (output without its first token)

    @property
    def kind(self) -> str:
        """What an engine may be unable to do: "batch" is many requests that want to run together."""
        return "batch" if self.num_reqs > 8 and self.counts == "output" else "single"


WORKLOADS = {
    "one": Workload("1 request, 128 in, 128 out", 1, (128, 128), (128, 128)),
    "decode": Workload("the same, decode alone", 1, (128, 128), (128, 128), "decode"),
    "eight": Workload("8 requests, 128 in, 128 out", 8, (128, 128), (128, 128)),
    "mixed32": Workload("32 requests, 64-256 in and out", 32, (64, 256), (64, 256)),
    "mixed64": Workload("64 requests, 100-512 in and out", 64, (100, 512), (100, 512)),
    "prefill": Workload("prefill of 16 x 1,000", 16, (1000, 1000), (1, 1), "input"),
}


@dataclass(frozen=True)
class Requests:
    prompts: list[list[int]]
    num_tokens: list[int]

    def job(self, num_tokens: int | None = None) -> dict[str, Any]:
        return {
            "do": "generate",
            "prompts": self.prompts,
            "num_tokens": self.num_tokens if num_tokens is None else [num_tokens] * len(self.prompts),
        }


def quick(workload: Workload) -> Workload:
    """Fewer and shorter, for a look: its figures stand beside each other, not beside those of the full size."""
    shorter = lambda lengths: tuple(max(1, n // 4) for n in lengths)  # noqa: E731
    return replace(
        workload,
        what=workload.what + " (quick)",
        num_reqs=max(1, workload.num_reqs // 4) if workload.num_reqs > 8 else workload.num_reqs,
        input_len=workload.input_len if workload.counts == "input" else shorter(workload.input_len),
        output_len=shorter(workload.output_len),
    )


def draw(name: str, workload: Workload, seed: int, round_: int, vocab: int) -> Requests:
    """Lengths depend on the seed alone, so that all rounds do the same work; ids on the round too, so that no prefix
    cache can answer for an earlier one."""
    key = zlib.crc32(name.encode())
    lengths = np.random.default_rng([seed, key])
    num_in = lengths.integers(workload.input_len[0], workload.input_len[1] + 1, workload.num_reqs)
    num_out = lengths.integers(workload.output_len[0], workload.output_len[1] + 1, workload.num_reqs)
    ids = np.random.default_rng([seed, key, round_ + 1])
    return Requests([ids.integers(0, vocab, n).tolist() for n in num_in], num_out.tolist())
