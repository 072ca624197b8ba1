"""A reader's events as OpenAI's messages, whole or as deltas, and how many tokens the thinking took.

What is no thinking goes on to the answer of the rest, which may look for tool calls (tools/answer.py). Thinking is in
two fields, `reasoning` and its older name `reasoning_content`, as in vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from minivllm.serve.protocol import ChatDelta, ChatMessage
from minivllm.serve.reasoning.reader import Event, ReasoningReader, Thought
from minivllm.serve.tools.answer import Answer

if TYPE_CHECKING:
    from minivllm.engine.tokenizer import TextTokenizer


class ReasoningAnswer:
    """One choice's answer. shown=False: the thinking is read and left out."""

    def __init__(self, reader: ReasoningReader, rest: Answer, shown: bool = True):
        self.reader, self.rest, self.shown = reader, rest, shown

    def message(self, text: str) -> ChatMessage:
        events = [*self.reader.push(text), *self.reader.end()]
        thought = "".join(event.text for event in events if isinstance(event, Thought))
        message = self.rest.message("".join(event.text for event in events if not isinstance(event, Thought)))
        message.content = message.content or (None if thought else message.content)
        if self.shown:
            message.reasoning = message.reasoning_content = thought or None
        return message

    def deltas(self, text: str, finished: bool) -> list[ChatDelta]:
        deltas = [delta for event in self.reader.push(text) for delta in self._deltas(event)]
        if finished:
            deltas += [delta for event in self.reader.end() for delta in self._deltas(event)]
            deltas += self.rest.deltas("", finished=True)
        return deltas

    def _deltas(self, event: Event) -> Iterable[ChatDelta]:
        if not isinstance(event, Thought):
            return self.rest.deltas(event.text, finished=False)
        return [ChatDelta(reasoning=event.text, reasoning_content=event.text)] if self.shown else []

    def finish_reason(self, reason: str | None) -> str | None:
        return self.rest.finish_reason(reason)


class ThinkingTokens:
    """Counts the tokens of each choice that are thinking, with those that end it. The readers see one token at a time,
    since how the text was cut for a stream may not matter."""

    def __init__(self, make_reader: Callable[[], ReasoningReader], tokenizer: TextTokenizer):
        self._readers: defaultdict[int, ReasoningReader] = defaultdict(make_reader)
        self._tokenizer = tokenizer

    def count(self, choice: int, token_ids: Sequence[int]) -> int:
        reader, num_thinking = self._readers[choice], 0
        for token in token_ids:
            was_inside = reader.is_inside
            reader.push(self._tokenizer.token_text(token))
            num_thinking += was_inside or reader.is_inside
        return num_thinking
