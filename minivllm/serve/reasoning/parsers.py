"""The formats in which models think. Each is a way to read; reader.py has the parts.

The names, and what counts as thinking, are vLLM's (`--reasoning-parser`, vllm/reasoning). Where its whole and its
streamed answers differ, these follow the streamed one, so that both are the same here. Whether the prompt has opened or
closed the thinking is seen in the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from minivllm.serve.reasoning.reader import MAX_BLANK, ReasoningReader, Rest, Start, Thought


class _TaggedReader(ReasoningReader):
    """An opening, the thinking, an ending, the answer."""

    may_open: tuple[str, ...]  # what begins the thinking, after spaces
    thinks_unasked = False  # a fresh answer is thinking even without an opening

    @property
    def is_inside(self) -> bool:
        return self._step == self._inside or (self._step == self._opening and self._unopened == self._inside)

    def _first_step(self, start: Start) -> Callable[[], bool]:
        if start is Start.BEHIND:
            return self._behind
        is_open = start is Start.INSIDE or self.thinks_unasked
        self._unopened = self._inside if is_open else self._behind
        return self._opening

    def _opening(self) -> bool:
        window = self._held[self._at : self._at + MAX_BLANK]
        text = window.lstrip()
        if found := next((opening for opening in self.may_open if text.startswith(opening)), None):
            self._at, self._step = self._at + len(window) - len(text) + len(found), self._inside
            return True
        if len(window) < MAX_BLANK and any(opening.startswith(text) for opening in self.may_open):
            return False
        self._step = self._unopened
        return True

    def _inside(self) -> bool:
        calls = self.calls(self.functions) if self.functions else ()
        if (found := self._tell_until((*self.endings, *calls), Thought)) is None:
            return False
        if found in calls:
            self._tell(Rest, found)
            self._answered.append(found)
        self._step = self._behind
        return True

    def _behind(self) -> bool:
        text, self._at = self._held[self._at :], len(self._held)
        self._tell(Rest, text)
        self._answered.append(text)
        return False


class Qwen3Reader(_TaggedReader):
    """<think>...</think>, then the answer: Qwen 3 and models like it (GLM 4.5, SmolLM3). Templates since Qwen's 2507
    release end the prompt with <think>; before, the model writes it. An answer that begins with neither has no
    thinking."""

    markers = ("<think>", "</think>")
    marks = (("<think>",), ("</think>",))
    opened_by = openings = may_open = ("<think>",)
    closed_by = endings = ("</think>",)


CALLS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>")


class KimiK2Reader(Qwen3Reader):
    """The same, and a call ends the thinking as well: Kimi K2 Thinking forgets </think> before one (vLLM's kimi_k2)."""

    markers = (*Qwen3Reader.markers, *CALLS)
    marks = (("<think>", CALLS[0]), ("</think>", CALLS[0]))

    @classmethod
    def calls(cls, functions: Collection[str]) -> tuple[str, ...]:
        return CALLS


class DeepSeekR1Reader(Qwen3Reader):
    """The same, and a fresh answer is thinking until </think>, whether it writes <think> or not: DeepSeek R1."""

    marks = (("<｜Assistant｜>", "<think>"), ("<｜Assistant｜>", "</think>"))
    openings = ()
    thinks_unasked = True


class MistralReader(_TaggedReader):
    """[THINK]...[/THINK], at the beginning or behind some words: Magistral. An ending of what was never begun is
    dropped."""

    markers = ("[THINK]", "[/THINK]")
    marks = (("[THINK]",),)
    opened_by = openings = may_open = ("[THINK]",)
    closed_by = endings = ("[/THINK]",)

    def _first_step(self, start: Start) -> Callable[[], bool]:
        return self._before if start is Start.FRESH else super()._first_step(start)

    def _before(self) -> bool:
        marker = self._tell_until(self.markers, Rest)
        if marker in self.openings:
            self._step = self._inside
        return marker is not None


class GraniteReader(_TaggedReader):
    """Here is my thought process: ... Here is my response: ...: Granite 3.2, whose weights say "Here's" at times."""

    markers = ()  # words, and no tokens
    marks = (("Here is my thought process:",),)
    opened_by = openings = may_open = ("Here is my thought process:", "Here's my thought process:")
    closed_by = endings = ("Here is my response:", "Here's my response:")


CHANNEL, MESSAGE, END, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
NAMESPACE = "functions."
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
ENDS = (END, RETURN, CALL, START, CHANNEL)  # of a message; the last two begin another whose end was forgotten
MAX_HEADER = 512  # characters
_RECIPIENT, _CHANNEL = re.compile(r"\bto=(\S+?)(?=<\||\s|$)"), re.compile(r"<\|channel\|>\s*(\w+)")
_SENDER = re.compile(r"^\s*(<\|start\|>)?assistant")


class HarmonyReader(ReasoningReader):
    """OpenAI's harmony, which gpt-oss writes: messages, each in a channel.

        <|channel|>analysis<|message|>...<|end|>                                         thinking
        <|start|>assistant<|channel|>commentary to=functions.f ...<|message|>...<|call|>  a call
        <|start|>assistant<|channel|>final<|message|>...<|return|>                       content; commentary is, too

    A call is handed on as it stands, from its <|channel|>, for the tool parser to read; of all else only the text. Two
    messages of one kind are parted by a line end, as in vLLM. The format: openai/harmony, docs/format.md.
    """

    markers = (CHANNEL, MESSAGE, END, START, RETURN, CALL, CONSTRAIN)
    marks = ((f"{CHANNEL}analysis",),)
    opened_by = (f"{CHANNEL}analysis{MESSAGE}",)
    closed_by = (f"{CHANNEL}final{MESSAGE}",)
    endings = (f"{CHANNEL}final{MESSAGE}",)
    farewell = f"{END}{START}assistant"
    before = f"{END}{START}assistant"
    leavings = (f"{CHANNEL}commentary",)

    @classmethod
    def calls(cls, functions: Collection[str]) -> tuple[str, ...]:
        heads = f"{CHANNEL}commentary", f"{CHANNEL}analysis", f"{START}assistant"
        return tuple(f"{head} to={name}" for head in heads for name in (NAMESPACE, *functions))

    def _first_step(self, start: Start) -> Callable[[], bool]:
        self._kind: type[Thought] | type[Rest] = Thought if start is Start.INSIDE else Rest  # of the message's text
        self._is_call = False
        self._parting = ""  # comes before the message's text
        self._told: set[type] = set()  # kinds of text that there were
        return self._header if start is Start.FRESH else self._body

    @property
    def is_inside(self) -> bool:
        return self._step == self._body and self._kind is Thought

    @property
    def is_answering(self) -> bool:
        return self._step == self._body and self._kind is Rest

    def _header(self) -> bool:
        header = self._held[self._at : self._at + MAX_HEADER]
        text, end = header.lstrip(), header.find(MESSAGE)
        begins = (CHANNEL, START, MESSAGE, "to=")
        may_be_one = text.startswith(begins) or any(begin.startswith(text) for begin in begins)
        if may_be_one and end >= 0:
            self._at += end + len(MESSAGE)
            self._begin(header[:end])
        elif may_be_one and len(header) < MAX_HEADER:
            return False
        else:
            self._begin("")  # no harmony at all: it is content
            if marker := next((marker for marker in (START, CHANNEL) if text.startswith(marker)), ""):
                end = len(header) - len(text) + len(marker)  # the rest would begin a header again
                self._show(header[:end])
                self._at += end
        return True

    def _begin(self, header: str) -> None:
        """header: of a message whose text comes next."""
        found, to = _CHANNEL.search(header), _RECIPIENT.search(header)
        channel, recipient = found[1] if found else "final", to[1] if to else None
        self._is_call = recipient is not None and (channel != "analysis" or self._is_function(recipient))
        self._kind = Thought if channel == "analysis" and not self._is_call else Rest
        self._parting = "\n" if self._kind in self._told and not self._is_call else ""
        if self._is_call:
            own = _SENDER.sub("", header).strip()  # the recipient may stand before the channel, too
            own = own if own.startswith(CHANNEL) else f"{CHANNEL}{channel} to={recipient} {CONSTRAIN}json"
            self._tell(Rest, own + MESSAGE)
        self._step = self._body

    def _is_function(self, recipient: str) -> bool:
        """The model's own tools, such as python, are called in its thinking; in long contexts it leaves out the
        namespace of others."""
        return recipient.startswith(NAMESPACE) or recipient in self.functions

    def _body(self) -> bool:
        before, marker = self._take_until(ENDS)
        self._show(before)
        if marker is None:
            return False
        if self._is_call:
            self._tell(Rest, marker if marker in (END, RETURN, CALL) else CALL)
        if marker in (START, CHANNEL):
            self._at -= len(marker)
        self._step = self._header
        return True

    def _show(self, text: str) -> None:
        """More of the message's text."""
        if not text:
            return
        if self._kind is Rest:
            self._answered.append(text)
        self._tell(self._kind, self._parting + text)
        self._parting = ""
        if not self._is_call:
            self._told.add(self._kind)

    def end(self) -> list[Thought | Rest]:
        if self._step == self._header and "<" in self._held:  # a header that was cut off is nobody's text
            self._held = ""
        return super().end()
