"""What the clients' files share. Imports nothing of minivllm: it runs in the clients' own environments too.

The models are so small that they seldom do what they are told, and random weights never do. So what a test asks for is
held by a grammar with an end (a forced call, a schema without free strings), or may be anything.
"""

import re
import time
import urllib.request
from contextlib import contextmanager
from typing import Literal, NamedTuple

from pydantic import BaseModel

CAPABILITIES = ("call", "stream", "tool loop", "structured", "both", "abort")

QUESTION = "Who are you?"
GREEDY = {"temperature": 0, "max_tokens": 24}
HOT = {"temperature": 1.0, "seed": 1, "max_tokens": 400}  # random weights end a list sooner or later, unless greedy
LONG_ENOUGH = 400  # tokens: the answer to QUESTION ends before, which some clients of /v1/responses insist on
ENDLESS = {"temperature": 0, "max_tokens": 1500}  # more than comes until a client has left


class Report(BaseModel):
    """The weather. Some clients take bounds of strings and numbers out of a schema, and then nothing ends them."""

    sky: Literal["rain", "sun"]
    is_cold: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER_TOOL = {"type": "function", "function": WEATHER}


CHOICES = ["none", "auto", "required"]


class Served(NamedTuple):
    url: str
    model: str

    @contextmanager
    def one_aborted(self, seconds: float = 30):
        """What runs inside leaves one request, which the server then ends."""
        before = self._num_aborted()
        yield
        deadline = time.monotonic() + seconds
        while self._num_aborted() != before + 1:
            assert time.monotonic() < deadline, "the server goes on with what nobody reads"
            time.sleep(0.02)

    def _num_aborted(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            text = reply.read().decode()
        found = re.search(r'^minivllm:request_success_total\{[^}]*finished_reason="abort"[^}]*\} (\S+)$', text, re.M)
        return int(float(found[1])) if found else 0
