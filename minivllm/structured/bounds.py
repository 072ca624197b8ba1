"""How often a grammar's text, in GBNF's notation or Lark's, may repeat one of its pieces by numbers alone.

`{1,1000}` four deep, in one rule or over four of them, is 54 characters and 10^12 copies. Libraries count rather than
write them out, but follow every count that a text may stand at: masks then take seconds. Only bounds inside bounds
multiply; rules that lead back to themselves do so without a number. A text that is no grammar is left to the library,
which says so with the place.
"""

from __future__ import annotations

import re

from minivllm.structured import regex

MOST = 10**9  # nothing is counted beyond
_TOKEN = re.compile(  # reads on from wherever it stands: what does not end, ends with the text
    r"""
      (?P<text> "(?:[^"\\]|\\.?)*+"?+ | \[(?:[^\]\\]|\\.?)*+\]?+ )
    | (?P<comment> \#[^\n]*+ | //[^\n]*+ )
    | (?P<regex> /(?:[^/\\\n]|\\.?)++/ )
    | (?P<define> [A-Za-z_][\w-]*+ (?:\s++ | \.\d++ | \[[^]\n]*+\] | \{[^}\n]*+\})*+ (?:::=|:) )
    | (?P<name> [A-Za-z_][\w-]*+ )
    | (?P<bounds> \{\s*+[0-9]++\s*+(?:,\s*+[0-9]*+\s*+)?+\} | ~\s*+[0-9]++\s*+(?:\.\.\s*+[0-9]++)?+ )
    | (?P<open> [(\[{] )
    | (?P<close> [)\]}] )
    """,
    re.VERBOSE | re.DOTALL,
)
Copies = dict[str, int]  # name of a rule -> how often it may come at one place; "": what is no rule


def nested_bounds(grammar: str) -> int:
    """The largest product of bounds inside bounds; 1 if there are none, MOST if it is as large or larger."""
    return _largest(_Reader().read(grammar))


class _Reader:
    def __init__(self) -> None:
        self.rules: dict[str, Copies] = {}
        self.group: Copies = {}  # the newest that is open: a rule, or parentheses
        self.around: list[Copies] = []  # the groups that it is in
        self.last: Copies = {}  # the last item, which bounds may follow

    def read(self, grammar: str) -> dict[str, Copies]:
        for token in _TOKEN.finditer(grammar):
            kind, text = token.lastgroup, token[0]
            if kind == "define":
                self._settle()
                self.around = []
                self.group = self.rules.setdefault(re.match(r"[\w-]+", text)[0], {})
            elif kind == "open":
                self._settle()
                self.around.append(self.group)
                self.group = {}
            elif kind == "close" and self.around:
                self._settle()
                self.last, self.group = self.group, self.around.pop()
            elif kind == "bounds":
                high = _largest_number(text)
                self.last = {name: min(MOST, copies * high) for name, copies in self.last.items()}
            elif kind in ("name", "text", "regex"):
                self._settle()
                self.last = {text: 1} if kind == "name" else {"": _of_regex(text) if kind == "regex" else 1}
        self._settle()
        return self.rules

    def _settle(self) -> None:
        """No bounds follow the last item."""
        for name, copies in self.last.items():
            self.group[name] = max(copies, self.group.get(name, 1))
        self.last = {}


def _largest_number(text: str) -> int:
    return max(1, *(int(digits) if len(digits) < 10 else MOST for digits in re.findall(r"\d+", text)))


def _of_regex(text: str) -> int:
    """Of one of Lark's terminals."""
    try:
        return min(MOST, regex.nested_bounds(regex.parse(text[1:-1])))
    except regex.RegexError:
        return 1


def _largest(rules: dict[str, Copies]) -> int:
    found: dict[str, int] = {}
    entered: set[str] = set()
    pending = list(rules)
    while pending:  # what a rule names comes before it
        name = pending[-1]
        if name not in entered:
            entered.add(name)
            pending += [other for other in rules[name] if other in rules and other not in entered]
        else:
            pending.pop()
            known = [copies * found.get(other, 1) for other, copies in rules[name].items()]
            found.setdefault(name, min(MOST, max(known, default=1)))
    return max(found.values(), default=1)
