"""Suffix lookup: which continuation is the most frequent one after the longest ending that was seen before?
(SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975.)

Two texts are searched, the request's own (prompt and output) and earlier outputs of its cache_salt, and the guess with
the higher score is taken. From the state of the longest match the most frequent next token is followed, for as long as
the product of its shares stays above MIN_CHANCE and the guess is no longer than the match supports (MAX_PER_MATCH); the
score is the sum of these products: the number of tokens expected to be accepted.

The paper keeps suffix trees of bounded depth. Here it is a suffix automaton (Blumer et al. 1985): every substring of
any length, at most two states a token, and each new token in amortised constant time. The longest ending that occurred
before is then nothing to search for: it is the suffix link of the last state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from minivllm.spec_decode.lookup import NOTHING, Guess, trust_of

MIN_CHANCE = 0.2
MAX_PER_MATCH = 2  # drafts for each token that matched
MAX_SALTS = 64
MAX_COUNTED = 24  # endings of the text, longest first, whose occurrences a new token counts


class SuffixAutomaton:
    """States are numbers; 0 is the empty string. A state stands for endings of the text that occur in the same places,
    the longest of them `length` tokens long."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]  # the longest ending of a state's strings that occurs elsewhere, too
        self.length = [0]
        self.count = [0]  # occurrences, of endings not far below the longest (see MAX_COUNTED)
        self.last = 0

    def extend(self, token: int) -> None:
        self.last = self._add(token)
        state = self.last
        for _ in range(MAX_COUNTED):
            if state <= 0:
                break
            self.count[state] += 1
            state = self.link[state]

    def start_over(self) -> None:
        """What comes next follows nothing."""
        self.last = 0

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest ending of (matched tokens at state) + token that occurs here: its state and length."""
        while state and matched <= self.length[self.link[state]]:
            state = self.link[state]  # the state was split since
        while state and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        if token in self.next[state]:
            return self.next[state][token], matched + 1
        return 0, 0

    def follow(self, state: int, most: int) -> tuple[list[int], float]:
        """The likeliest continuation and how many of its tokens are expected to be right."""
        tokens: list[int] = []
        chance, score = 1.0, 0.0
        while len(tokens) < most:
            while state and not self.next[state]:
                state = self.link[state]  # the end of the text: a shorter ending has occurred before
            if not state:
                break
            following = self.next[state]
            counts = [(self.count[to], -token) for token, to in following.items()]
            best, token = max(counts)
            chance *= best / max(1, sum(count for count, _ in counts))
            if chance < MIN_CHANCE:
                break
            tokens.append(-token)
            score += chance
            state = following[-token]
        return tokens, score

    def _add(self, token: int) -> int:
        """The state of the text with token behind it."""
        last = self.last
        if token in self.next[last]:  # only after start_over(): this has been seen from an earlier beginning
            to = self.next[last][token]
            return to if self.length[to] == self.length[last] + 1 else self._split(last, token, to)
        new = self._state({}, 0, self.length[last] + 1, 0)
        state = last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            to = self.next[state][token]
            is_whole = self.length[to] == self.length[state] + 1
            self.link[new] = to if is_whole else self._split(state, token, to)
        return new

    def _split(self, state: int, token: int, to: int) -> int:
        """The strings of `to` that come from `state` and below occur more often from now on: a state of their own."""
        new = self._state(dict(self.next[to]), self.link[to], self.length[state] + 1, self.count[to])
        self.link[to] = new
        while state >= 0 and self.next[state].get(token) == to:
            self.next[state][token] = new
            state = self.link[state]
        return new

    def _state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1


class EarlierOutputs:
    """Outputs of requests that have left, for those that run now. At most `max_tokens` of them: once they are more, the
    older half is forgotten."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.outputs: deque[list[int]] = deque()
        self.num_tokens = 0
        self.automaton = SuffixAutomaton()
        self.generation = 0  # counts the rebuilds: states of an older one mean nothing

    def add(self, output: list[int]) -> None:
        output = output[-self.max_tokens :] if self.max_tokens else []
        if not output:
            return
        self.outputs.append(output)
        self.num_tokens += len(output)
        if self.num_tokens <= self.max_tokens:
            self._index(output)
            return
        self.shrink(max(self.max_tokens // 2, len(output)))

    def shrink(self, most: int) -> None:
        """Forget the oldest outputs, until there are so many tokens at most."""
        while self.num_tokens > most:
            self.num_tokens -= len(self.outputs.popleft())
        self.automaton = SuffixAutomaton()
        self.generation += 1
        for kept in self.outputs:
            self._index(kept)

    def _index(self, output: list[int]) -> None:
        self.automaton.start_over()
        for token in output:
            self.automaton.extend(token)


class EarlierBySalt:
    """The outputs that a request may be guessed by: those of its cache_salt, since a guess that comes true makes an
    answer come sooner, and so tells what was said before. At most MAX_SALTS of them, those used last, and `max_tokens`
    in all, but for the outputs of requests that still run: who has most forgets half of it."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.by_salt: OrderedDict[str, EarlierOutputs] = OrderedDict()

    def of(self, salt: str) -> EarlierOutputs:
        found = self.by_salt.setdefault(salt, EarlierOutputs(self.max_tokens))
        self.by_salt.move_to_end(salt)
        if len(self.by_salt) > MAX_SALTS:
            self.by_salt.popitem(last=False)
        while sum(earlier.num_tokens for earlier in self.by_salt.values()) > self.max_tokens:
            largest = max(self.by_salt.values(), key=lambda earlier: earlier.num_tokens)
            largest.shrink(largest.num_tokens // 2)
        return found


class SuffixLookup:
    """A Lookup over one request's prompt and output, and over earlier outputs."""

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int, earlier: EarlierOutputs):
        self.own = SuffixAutomaton()
        self.earlier = earlier
        self.output = list(tokens[num_prompt_tokens:])
        self.recent: deque[int] = deque(maxlen=64)  # enough to find the place again after a rebuild
        self.state, self.matched, self.generation = 0, 0, earlier.generation
        self._take(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self.output += tokens
        self._take(tokens)

    def draft(self, most: int) -> Guess:
        state = self.own.link[self.own.last] if self.own.last else 0
        own = self._guess(self.own, state, self.own.length[state], most)
        other = self._guess(self.earlier.automaton, *self._place(), most)
        return max(own, other, key=lambda guess: guess[1])[0]

    def close(self) -> None:
        self.earlier.add(self.output)

    def _guess(self, text: SuffixAutomaton, state: int, matched: int, most: int) -> tuple[Guess, float]:
        if not matched:
            return NOTHING, 0.0
        tokens, score = text.follow(state, min(most, MAX_PER_MATCH * matched))
        return Guess(tokens, trust_of(matched)), score

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.own.extend(token)
        self.recent.extend(tokens)
        if self.generation == self.earlier.generation:
            self._walk(tokens)

    def _walk(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state, self.matched = self.earlier.automaton.step(self.state, self.matched, token)

    def _place(self) -> tuple[int, int]:
        """State and length of the longest match in the earlier outputs."""
        if self.generation != self.earlier.generation:
            self.state, self.matched, self.generation = 0, 0, self.earlier.generation
            self._walk(self.recent)
        text = self.earlier.automaton
        while self.state and self.matched <= text.length[text.link[self.state]]:
            self.state = text.link[self.state]  # the state was split since
        return self.state, self.matched
