"""Rule: a pattern matches what the libraries' `re` matches, in work that grows with the name and with the pattern
alone."""

from __future__ import annotations

import fnmatch
import re

import pytest

from minivllm.patterns import MAX_STATES, Pattern, PatternError, patterns, wildcards

NAMES = [
    f"model.layers.{i}.{module}"
    for i in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.q_proj2")
]
PATTERNS = [
    *(
        "q_proj",
        ".*q_proj",
        r".*\.(q|down)_proj",
        r"model\.layers\.[01]\..*",
        r".*\.1\..*",
        "nothing",
        "self_attn.q_proj",
    ),
    *(
        r"^model\.layers\.0\.mlp\.down_proj$",
        r".*\.layers\.(0|10)\.(self_attn|mlp)\..+?_proj",
        "model.*|x",
        "^.*k_proj|q",
    ),
    *(r"\w+\.\w+\.\d{1,2}\.[^.]+\.[a-z_]+", "^self_attn.q_proj", r"1\.mlp\.q_proj\d", "(?:.)+2", ""),
]


@pytest.mark.parametrize("text", PATTERNS)
def test_a_pattern_matches_what_pefts_does(text):
    whole, end = Pattern(text), Pattern(text, may_follow_a_dot=True)
    anywhere, part = Pattern(text, may_follow_anything=True), re.compile(rf"(?:{text})(?:(?<=\.)|(?=\.|$))")
    for name in NAMES:
        assert whole.begins(name) == bool(re.match(text, name)), name
        assert whole.begins_parts(name) == bool(part.match(name)), name
        assert anywhere.begins(name) == bool(re.search(text, name)), name
        assert whole.matches(name) == bool(re.fullmatch(text, name)), name
        assert end.matches(name) == bool(re.match(rf"(.*\.)?({text})$", name)), name


@pytest.mark.parametrize("text", ["((([a-z._0-9])+)+)+!", "(.*)*(.*)*(.*)*!", "(a|b|ab|[a-z.]*)*_proj!", "(.?){99}!"])
def test_no_pattern_makes_a_name_costly(text):
    pattern = Pattern(text)
    for name in NAMES * 20:
        assert not pattern.matches(name)
        assert not pattern.begins(name) and not pattern.begins_parts(name)
    assert sum(automaton.work for automaton, _ in pattern._automata) < MAX_STATES * sum(map(len, NAMES))


@pytest.mark.parametrize("text", ["(?=a)b", r"(a)\1", "a{1,99999}", "(", "a" * 5000, "a**", "(?i)a"])
def test_what_cannot_be_matched_so_is_refused(text):
    with pytest.raises(PatternError):
        Pattern(text)


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "lm_head",
        "*lm_head*",
        "model.layers.[01].*",
        "model.layers.[!0]*",
        "*.?_proj",
        "*q_proj[12]",
        "a.b[",
        "[]]*",
    ]
    + ["*mlp*", "model.layers.1.*.down_proj", "(x)*", "model+", "*[a-q]_proj"],
)
def test_wildcards_match_what_fnmatch_does(text):
    pattern = Pattern(wildcards(text))
    for name in [*NAMES, "lm_head", "a.b[", "]x", "(x)y", "model+"]:
        assert pattern.matches(name) == fnmatch.fnmatchcase(name, text), name


def test_the_patterns_of_a_list_are_bounded_together():
    with pytest.raises(PatternError, match="the patterns of a list are too large"):
        patterns(f".*{i}(.?){{60}}" for i in range(200))
    with pytest.raises(PatternError, match=r'the pattern "\(\?!a\)" is no regular expression that is supported'):
        patterns(["a", "(?!a)"])
