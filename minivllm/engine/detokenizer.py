"""Tokens to text, as they come. Three promises:

- never half a UTF-8 character: bytes wait until the character is whole (or known to be invalid: then U+FFFD);
- never a piece of a stop string: text that may still become one waits, exactly as long as it may;
- the pieces depend on how tokens arrive, their concatenation never does.

So a stop string is defined without reference to tokens: reading character by character, the first one to be complete
ends the text (of two that end together, the longer). Text of the first min_tokens tokens completes nothing.

Where a model thinks before it answers, a client stops what it reads: the answer. Stop strings begin and end in it,
tokens that a request stops at stop it alone, and min_tokens counts its tokens.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.request import SamplingParams

REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    def push(self, token_id: int) -> str:
        """The text that is certain now."""
        ...

    def flush(self) -> str:
        """The rest: what a decoder of the whole sequence shows for an unfinished character."""
        ...


class AnswerFinder(Protocol):
    """Follows one text and tells the thinking in it from the answer (serve/reasoning)."""

    answered: str  # of the answer, which the last push has made certain, as it stands in the text

    def push(self, text: str) -> Any:
        """What comes next."""

    @property
    def is_answering(self) -> bool:
        """What comes now is of the answer, as far as is known."""
        ...

    @property
    def num_held(self) -> int:
        """Characters at the end of the text of which it is not known yet what they are."""
        ...


class ByteStream:
    """For tokenizers whose tokens are bytes: a table and an incremental UTF-8 decoder, below a microsecond a token."""

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A decoder that drops a text's first space drops the prompt's, unless the prompt shows nothing.
        self._strip = tokenizer.strips_first_space and not any(
            self._token_bytes(t) for t in prompt_token_ids if t not in self._skipped
        )
        for token_id in prompt_token_ids[-4:]:  # the prompt may end inside a character, of 4 bytes at most
            self._feed(token_id)

    def push(self, token_id: int) -> str:
        text = self._feed(token_id)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _feed(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._token_bytes(token_id))


class WindowStream:
    """For any other tokenizer: decode a window of tokens twice, without and with the new ones, and take the difference.

    The window starts one piece back, so that a decoder that looks at neighbours (spaces, word pieces) sees them. (The
    prefix and read offsets of Hugging Face's text-generation-inference.)
    """

    _MAX_PENDING = 8  # tokens: no character takes more; text that still ends in U+FFFD then really holds it

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-8:])
        self._num_shown = len(self._window)
        self._shown = self._decode()

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        pending = len(self._window) - self._num_shown
        if len(text) <= len(self._shown) or (text.endswith(REPLACEMENT) and pending < self._MAX_PENDING):
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


class StopStrings:
    """An Aho-Corasick automaton (1975): one state for all stop strings, one transition a character.

    The state is the longest end of the text that begins a stop string; so its depth is what must be held back.
    """

    def __init__(self, stops: Sequence[str]):
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.found = [""]  # the longest stop string that the text ends with in this state
        self.held = [0]  # characters that may still become part of a longer match
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.fail.append(0)
                    self.found.append("")
                    self.held.append(0)
                    depth.append(depth[state] + 1)
                state = self.next[state][char]
            self.found[state] = stop
        queue = [0]
        for state in queue:  # breadth first: a state's fail link is shallower, so it is complete already
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char) if state else 0
                self.found[child] = self.found[child] or self.found[self.fail[child]]
                self.held[child] = depth[child] if self.next[child] else self.held[self.fail[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while char not in self.next[state]:
            if not state:
                return 0
            state = self.fail[state]
        return self.next[state][char]


_automaton = functools.lru_cache(maxsize=128)(StopStrings)


class Detokenizer:
    """The text of one output. `text` is what has been released; `stopped_by` the stop string that ended it, or the
    stop token, where the engine core does not know which tokens are of the answer."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        find_answer: Callable[[], AnswerFinder] | None = None,
    ):
        """find_answer: for a model that thinks; None: all of the text is the answer."""
        kind = ByteStream if tokenizer.has_bytes else WindowStream
        self._stream: TokenStream = kind(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stop_ids = params.answer_stop_token_ids
        self._stops = _automaton(tuple(params.stop or ())) if params.stop or self._stop_ids else None
        self._finder = find_answer() if find_answer is not None and self._stops is not None else None
        self._state = 0
        self._held = ""
        self._num_chars = self._answer_end = 0  # that the finder has seen, and where the last of the answer ends there
        self._num_before = 0  # tokens up to the answer
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self.num_tokens = 0  # pushed and used; tokens after the one that completed a stop string are not
        self.stopped_by: str | int | None = None
        self._released: list[str] = []

    @property
    def text(self) -> str:
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def push(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """More tokens -> the text that may be shown now. finished: no more will come, nothing stays behind."""
        new = ""
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            new += self._push(token_id)
        if finished and self.stopped_by is None:
            new += self._release(self._stream.flush())
            new += self._held
            self._held = ""
        if new:
            self._released.append(new)
        return new

    def _push(self, token_id: int) -> str:
        self.num_tokens += 1
        if self._finder is not None and not self._finder.is_answering:
            self._num_before = self.num_tokens
        elif token_id in self._stop_ids and self.num_tokens - self._num_before >= self._min_tokens:
            return self._stop_at(token_id)
        return self._release(self._stream.push(token_id))

    def _release(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        return self._release_of_all(text) if self._finder is None else self._release_of_answer(text, self._finder)

    def _release_of_all(self, text: str) -> str:
        text, start = self._held + text, len(self._held)
        for i in range(start, len(text)):
            if stop := self._follow(text[i]):
                return self._stop(text[: i + 1], stop)
        released = len(text) - self._stops.held[self._state]
        self._held = text[released:]
        return text[:released]

    def _release_of_answer(self, text: str, finder: AnswerFinder) -> str:
        """The same, where only some characters are of the answer, and it may take others to find out which."""
        text, start = self._held + text, len(self._held)
        for i in range(start, len(text)):
            self._num_chars += 1
            finder.push(text[i])
            end = self._num_chars - finder.num_held
            if not (answered := finder.answered):
                continue
            if end - len(answered) != self._answer_end:
                self._state = 0  # what has come before is of another part
            self._answer_end = end
            for num_behind, char in zip(range(len(answered) - 1, -1, -1), answered, strict=True):
                if stop := self._follow(char):
                    return self._stop(text[: i + 1 - finder.num_held - num_behind], stop)
        is_whole = self._answer_end + finder.num_held == self._num_chars  # nothing but the answer has come last
        held = finder.num_held + (self._stops.held[self._state] if is_whole else 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _follow(self, char: str) -> str:
        """The stop string that ends with this character of the answer; "": none."""
        self._state = self._stops.step(self._state, char)
        return self._stops.found[self._state] if self.num_tokens - self._num_before > self._min_tokens else ""

    def _stop(self, text: str, stop: str) -> str:
        self.stopped_by = stop
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(stop)]

    def _stop_at(self, token_id: int) -> str:
        shown = (
            self._release(self._stream.push(token_id)) if self._include_stop else self._release(self._stream.flush())
        )
        if self.stopped_by is None:
            self.stopped_by = token_id
            shown, self._held = shown + self._held, ""
        return shown


class NullDetokenizer:
    """For detokenize=False and for models without a tokenizer: token ids only."""

    text = ""
    stopped_by = None

    def __init__(self) -> None:
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int], finished: bool = False) -> str:
        self.num_tokens += len(token_ids)
        return ""
