"""What one request may cost (price.py): the options of `serve` that say so. `serve --help` imports it, so it imports
little."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from minivllm.terminal import fail

FLAGS = {"sequences": "max_request_sequences", "tokens": "max_request_tokens", "answer_bytes": "max_answer_bytes"}
FLAGS |= {"audio_seconds": "max_audio_seconds"}


class RequestLimits(NamedTuple):
    """Of one request."""

    sequences: int = 1024
    tokens: int = 2**22
    answer_bytes: int | None = None  # None: as shares.most_answer_bytes says
    audio_seconds: int = 1500  # OpenAI's


def add_options(group: argparse._ArgumentGroup) -> None:
    most = RequestLimits()
    what = "refuse a request for more sequences: prompts times n"
    group.add_argument(
        "--max-request-sequences", type=int, default=most.sequences, metavar="N", help=f"{what} ({most.sequences})"
    )
    what = "refuse a request of more tokens, its prompts' and its outputs' at their longest"
    group.add_argument("--max-request-tokens", type=int, default=most.tokens, metavar="N", help=f"{what} (4 Mi)")
    what = "refuse a request whose answer could be longer, log-probabilities above all; long ones share it"
    auto = "128 MiB, or what one output of the whole context takes with 20 log-probabilities"
    group.add_argument("--max-answer-bytes", type=int, metavar="N", help=f"{what} ({auto})")
    what = "refuse a recording that is longer, however small its file is"
    group.add_argument(
        "--max-audio-seconds", type=int, default=most.audio_seconds, metavar="N", help=f"{what} ({most.audio_seconds})"
    )


def chosen(args: argparse.Namespace) -> RequestLimits:
    """Exits if one could not be kept to."""
    given = {field: getattr(args, name) for field, name in FLAGS.items()}
    for field, value in given.items():
        if value is not None and value < 1:
            fail(f"--{FLAGS[field].replace('_', '-')} {value}: must be at least 1")
    return RequestLimits(**given)
