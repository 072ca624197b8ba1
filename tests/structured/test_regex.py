"""The in-house automaton against Python's re, and against counting out."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.structured import regex
from minivllm.structured.automaton import DEAD, MAX_DFA_STATES, START, TooLarge, compile_tree, utf8_ranges
from minivllm.structured.json_text import integers
from minivllm.structured.regex import RegexError, parse, parse_search, render, simplify

PATTERNS = [
    *("a", "ab|c", "(a|b)*abb", "a*b+c?", "(ab){2,3}", "a{2}", "a{1,}", "[ab]{0,2}c", "[^a]b", ".{2}", "(a|)(b|)c"),
    *("a??b*?", "(?:a(?:b(?:c)?)?)?", "(?P<n>a)b", "[a-c]{1,3}|c", "^ab$", "^a|b$", "a{0}b", "(a*)*", "(a|b|c){2,2}"),
    *(r"\.a", r"[\].]", r"[a\-b]", r"\d", r"\w\W", r"\s", r"[^\w]", "[]a]", "[a-]", "(a{0,2}){0,2}", "b{1,1}"),
]


def matches(dfa, text: str) -> bool:
    return bool(dfa.accepting[dfa.next(START, text.encode())])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_expression_matches_what_re_matches(pattern):
    dfa, expected = compile_tree(parse(pattern)), re.compile(pattern, re.ASCII)
    for n in range(5):
        for letters in product("abc.-] 1"[: 8 if n < 4 else 3], repeat=n):
            text = "".join(letters)
            assert matches(dfa, text) == bool(expected.fullmatch(text)), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_plain_notation_says_the_same(pattern):
    one, other = compile_tree(parse(pattern)), compile_tree(parse(render(parse(pattern)) or "a{0}"))
    for letters in product("abc.-]1", repeat=3):
        for n in range(4):
            assert matches(one, "".join(letters[:n])) == matches(other, "".join(letters[:n]))


@pytest.mark.parametrize("pattern", ["b", "^b", "b$", "^b$", "^a|b$", "a|^b", "bc|^c$", "^$", "^", "a{2}"])
def test_a_search_finds_what_re_finds(pattern):
    dfa = compile_tree(parse_search(pattern))
    for n in range(5):
        for letters in product("abc", repeat=n):
            text = "".join(letters)
            assert matches(dfa, text) == bool(re.search(pattern, text)), text


expressions = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "é"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(expressions, st.lists(st.text("abé😀", max_size=6), max_size=8))
def test_any_expression_matches_what_re_matches(pattern, texts):
    dfa = compile_tree(parse(pattern))
    for text in texts:
        assert matches(dfa, text) == bool(re.fullmatch(pattern, text)), text


nested = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "ab", ""]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "{2,3}", "{0}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=8,
)
SHORT = ["".join(letters) for n in range(8) for letters in product("ab", repeat=n)]


@settings(max_examples=400, deadline=None)
@given(nested)
def test_a_simplified_expression_matches_what_re_matches(pattern):
    dfa, plain = compile_tree(simplify(parse(pattern))), compile_tree(parse(pattern))
    assert [text for text in SHORT if matches(dfa, text)] == [text for text in SHORT if matches(plain, text)]
    for text in SHORT[:31]:
        assert matches(dfa, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "pattern, simplified",
    [
        ("((a*)*)*", "(?:a)*"), ("(a+)+", "(?:a)+"), ("(a?)*", "(?:a)*"), ("(a*)?", "(?:a)*"), ("(a?)+", "(?:a)*"),
        ("(a+)*", "(?:a)*"), ("a*a*a*", "(?:a)*"), ("a*a", "(?:a)+"), ("aaa", "aaa"), ("(a{2}){3}", "(?:a){6,6}"),
        ("(a{1,100}){1,100}", "(?:a){1,10000}"), ("(a{2,3})*", "(?:(?:a){2,3})*"),
        ("(a|b*|c?)*", "(?:[a-c])*"), ("(a?b*)*", "(?:[a-b])*"), ("(a|)+", "(?:a)*"), ("((a|b)|c|ab)", "(?:[a-c]|ab)"),
        ("(?:(?:)*|a{0}){7}", ""), ("((a*)*)*" * 100, "(?:a)*"), ("(?:a+|a*b|aa)*" * 100, "(?:(?:a|(?:a)*b|aa))*"),
        ("(a{3,5}){2,}", "(?:a){6,}"), ("(a{4,5}){2,}", "(?:(?:a){4,5}){2,}"),
        ("(a{2}){0,3}", "(?:(?:a){2,2}){0,3}"),
    ],
)  # fmt: skip
def test_nested_repetition_is_read_in_one_way(pattern, simplified):
    assert render(parse(pattern)) == simplified


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_utf8_ranges_hold_the_code_points_between_two_and_no_others(a, b):
    low, high = min(a, b), max(a, b)
    inside = [c for c in (low, high, (low + high) // 2, low + 1, high - 1) if low <= c <= high]
    outside = [c for c in (low - 1, high + 1, 0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF)]
    dfa = compile_tree(regex.Chars(((low, high),)) if not 0xD800 <= low <= high <= 0xDFFF else regex.EMPTY)
    for code in (*inside, *outside):
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            assert matches(dfa, chr(code)) == (low <= code <= high), hex(code)


def test_utf8_ranges_of_all_characters_are_those_of_the_standard():
    """Unicode, table 3-7: nine sequences; surrogates and overlong forms are not among them."""
    rows = [row for low, high in regex.negate(()) for row in utf8_ranges(low, high)]
    assert len(rows) == 9
    assert sum(int(np.prod([high - low + 1 for low, high in row])) for row in rows) == 0x110000 - 0x800


@pytest.mark.parametrize("low, high", [(0, 0), (0, 9), (7, 123), (-5, 5), (-120, -9), (99, 101), (10, 10), (-1, 1000)])
def test_integers_between_two_bounds(low, high):
    dfa = compile_tree(integers(low, high))
    for n in range(-1300, 1300):
        assert matches(dfa, str(n)) == (low <= n <= high), n
    assert not matches(dfa, "01") and not matches(dfa, "-0") and not matches(dfa, "")


@pytest.mark.parametrize(
    "low, high", [(5, None), (0, None), (-7, None), (None, 5), (None, 0), (None, -12), (100, None)]
)
def test_integers_beyond_one_bound(low, high):
    dfa = compile_tree(integers(low, high))
    for n in (*range(-130, 130), 10**9, -(10**9), 999, 1000, -999):
        assert matches(dfa, str(n)) == ((low is None or n >= low) and (high is None or n <= high)), n


@pytest.mark.parametrize(
    "pattern, why",
    [
        ("(a", r"without its \)"), ("a)", r"unmatched \)"), ("[a", r"without its \]"), ("a**", "quantifier of"),
        ("*a", "nothing to repeat"), ("a{2,1}", "wrong order"), ("a{x}", "begins no"), ("(?=a)", "look-around"),
        (r"\bx", "word boundaries"), (r"(a)\1", "back-references"), (r"\p{L}", "Unicode classes"), ("a^b", "anchor"),
        ("[b-a]", "wrong order"), ("\\", "at the end"), (r"\y", "unknown escape"), (r"[^\s\S]", "without characters"),
        (r"\ud800", "no character"), ("(" * 60 + ")" * 60, "deep"), ("a++", "quantifier of"), ("(a$)b", "anchor"),
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused_with_the_place(pattern, why):
    with pytest.raises(RegexError, match=why):
        parse(pattern)


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){20}", "(a{0,400}){0,400}", "(a?){9000}", "(a{1,99}){1,99}"])
def test_what_would_blow_up_is_refused_in_time(pattern):
    with pytest.raises(TooLarge):
        compile_tree(parse(pattern))
    assert MAX_DFA_STATES < 1 << 20


def test_every_live_state_can_still_end():
    """What a mask relies on: a token that does not lead to the dead state never leads into a blind alley."""
    for pattern in PATTERNS:
        dfa = compile_tree(parse(pattern))
        can_end = dfa.accepting.copy()
        for _ in range(len(can_end)):
            can_end |= can_end[dfa.table].any(1)
        assert can_end[START:].all() and not can_end[DEAD], pattern
