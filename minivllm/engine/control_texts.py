"""The text of a control token in what a client has written: `<|im_end|>` in a user's message.

A chat template writes a conversation as one text, in which a tokenizer takes such texts for the tokens: the template's
own, and a client's. So what a client has written is marked before it is rendered. A mark is a character of a private
plane for each text. What is rendered is cut at the tokens that the template has written, and a piece with marks is
encoded with the marks' texts in their place, by a tokenizer that knows no control tokens.

Control tokens are those that tokenizer.json calls special. Others that stand beside the vocabulary, as `<tool_call>`
does with some models, are a model's way to write, and are read as ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from minivllm.errors import BadRequest

FIRST_MARK = 0x10F000  # of plane 16: no text of anybody's holds these characters


class MarkedText(str):
    """A rendered conversation with marks; `controls`: what they stand for."""

    __slots__ = ("controls",)
    controls: ControlTexts

    @property
    def plain(self) -> str:
        return self.controls.written(self)


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


class ControlTexts:
    def __init__(self, controls: Mapping[str, int], letters: Encodes | None = None):
        """controls: the texts and their tokens. letters: a tokenizer that knows none, for texts that are marked."""
        texts = sorted(controls)
        self._controls, self._letters = dict(controls), letters
        self._marks = {text: chr(FIRST_MARK + i) for i, text in enumerate(texts)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        longest_first = sorted(texts, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._find_mark = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + max(0, len(texts) - 1))}]")

    def refused(self, text: str, where: str) -> str:
        """Raises BadRequest, naming the token."""
        if found := self._find.search(text):
            what = f"{where} holds {found[0]}, which is a control token of this model"
            raise BadRequest(f"{what}, and refused here (--control-tokens-in-text)", where)
        return text

    def marked(self, text: str, where: str) -> str:
        """Raises BadRequest for a text that has such characters already."""
        if self._find_mark.search(text):
            raise BadRequest(f"{where} holds a character from U+{FIRST_MARK:X} on, which this server needs", where)
        return self._find.sub(lambda found: self._marks[found[0]], text)

    def rendered(self, text: str) -> MarkedText:
        made = MarkedText(text)
        made.controls = self
        return made

    def written(self, text: str) -> str:
        """With the texts in the place of their marks."""
        return self._find_mark.sub(lambda found: self._texts[found[0]], text)

    def encode(self, text: str, encoding: Any) -> list[int]:
        """encoding: the tokenizer's own of the marked text, without tokens around it."""
        assert (letters := self._letters) is not None, "who marks texts has it"
        ids: list[int] = []
        piece: list[int] = []
        begin = 0

        def settle(end: int) -> None:
            raw = text[begin:end]
            ids.extend(letters.encode(self.written(raw)) if self._find_mark.search(raw) else piece)
            piece.clear()

        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._controls.get(text[start:end].strip()) == token:
                settle(start)
                ids.append(token)
                begin = end
            else:
                piece.append(token)
        settle(len(text))
        return ids


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON with other texts, names of members too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): each_text(item, change) for name, item in value.items()}
    return [each_text(item, change) for item in value] if isinstance(value, list) else value
