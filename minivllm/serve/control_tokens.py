"""What becomes of a control token's text in a client's words, by `--control-tokens-in-text`:

    tokens    the token, as in vLLM: a client may write a part of the template itself, and end its own turn with it
    refuse    a 400 that names the token
    text      letters, which the model reads as such (engine/control_texts.py)

A client's words are all strings of its messages, tools and variables of the template. A prompt that is no conversation
is written as the model reads it, control tokens and all.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.engine.control_texts import ControlTexts, MarkedText, each_text
from minivllm.registry import Registry

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import TextTokenizer


class ControlTokens(Protocol):
    def held(self, value: Any, where: str) -> Any:
        """JSON that a client has sent, as the template is to get it. Raises BadRequest, naming where."""
        ...

    def rendered(self, text: str) -> str: ...


class AsTokens:
    def held(self, value: Any, where: str) -> Any:
        return value

    def rendered(self, text: str) -> str:
        return text


class Refused(AsTokens):
    def __init__(self, tokenizer: TextTokenizer):
        self.texts = ControlTexts(tokenizer.control_ids)

    def held(self, value: Any, where: str) -> Any:
        return each_text(value, partial(self.texts.refused, where=where))


class AsText:
    """Raises ModelError where the tokenizer cannot."""

    def __init__(self, tokenizer: TextTokenizer):
        self.texts = ControlTexts(tokenizer.control_ids, tokenizer.letters())

    def held(self, value: Any, where: str) -> Any:
        return each_text(value, partial(self.texts.marked, where=where))

    def rendered(self, text: str) -> str:
        return self.texts.rendered(text)


def plain(text: str) -> str:
    return text.plain if isinstance(text, MarkedText) else text


CONTROL_TOKENS: Registry = Registry(
    "what becomes of control tokens in text",
    {name: f"minivllm.serve.control_tokens:{made}" for name, made in (
        ("tokens", "as_tokens"), ("refuse", "Refused"), ("text", "AsText"),
    )},
)  # fmt: skip


def as_tokens(tokenizer: TextTokenizer) -> AsTokens:
    return AsTokens()
