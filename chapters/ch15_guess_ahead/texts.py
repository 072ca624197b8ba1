"""What the model is asked to write in chapter 15: some of what bench/spec_decode.py asks for."""

from __future__ import annotations

from bench.texts import COPYING, FREE

Messages = list[dict[str, str]]


def conversation(said: str, begun: str) -> Messages:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": begun}]


TEXTS = {
    "records": conversation(*COPYING["json"]),
    "quotation": conversation(*COPYING["summary"]),
    "code": conversation(*COPYING["code"]),
    "story": conversation(*FREE["story"]),
}
