"""Streaming equals decoding everything and cutting, for any tokens, in any chunks."""

from __future__ import annotations

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.detokenizer import Detokenizer, NullDetokenizer, StopStrings
from minivllm.request import SamplingParams

KINDS = {"byte_level": tiny.byte_level, "byte_fallback": tiny.byte_fallback, "word_piece": tiny.word_piece}
MANY = settings(max_examples=150, deadline=None)
TEXTS = st.text(
    st.one_of(st.sampled_from("abhelo wrdstpn,."), st.sampled_from("éß日本語😀👩‍👧🎉"), st.characters(codec="utf-8"))
)
STOPS = st.one_of(st.text("abhelo .", min_size=1, max_size=5), st.text("é日😀a", min_size=1, max_size=3))
CUTS = st.lists(st.integers(0, 6), max_size=60)


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """ids in pieces of these sizes (0: an empty push), the rest one by one."""
    out, at = [], 0
    for size in sizes:
        out.append(ids[at : at + size])
        at += size
    return out + [[token] for token in ids[at:]]


def stream(tokenizer, prompt, ids, sizes=(), **params):
    """-> (pieces as they came, the detokenizer)."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params), prompt)
    pieces = [detokenizer.push(chunk) for chunk in chunks(ids, list(sizes))]
    pieces.append(detokenizer.push([], finished=True))
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer


def cut(text: str, stops: list[str], include: bool = False, from_end: int = 0) -> tuple[str, str | None]:
    """The slow reference: at the first end (beyond from_end) of a stop string, the longest one that ends there."""
    for end in range(from_end + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@MANY
@given(data=st.data(), sizes=CUTS, skip=st.booleans())
def test_any_bytes_in_any_chunks_give_the_whole_decode(data, sizes, skip):
    tokenizer = tiny.byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    prompt = tokenizer.encode("hello")
    pieces, _ = stream(tokenizer, prompt, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)


@MANY
@given(text=TEXTS, sizes=CUTS, kind=st.sampled_from(["byte_level", "byte_fallback"]))
def test_a_text_comes_back_and_no_piece_ends_inside_a_character(text, sizes, kind):
    tokenizer = KINDS[kind]()
    prompt = tokenizer.encode("hello")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, _ = stream(tokenizer, prompt, ids, sizes)
    expected = tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))
    assert "".join(pieces) == expected
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@MANY
@given(ids=st.lists(st.integers(0, 11), max_size=40), sizes=CUTS)
def test_a_decoder_that_looks_at_neighbours_is_followed(ids, sizes):
    tokenizer = tiny.word_piece()
    prompt = [2, 3]
    pieces, _ = stream(tokenizer, prompt, ids, sizes)
    assert "hello world" + "".join(pieces) == tokenizer.decode([*prompt, *ids])


@MANY
@given(
    text=TEXTS,
    stops=st.lists(STOPS, max_size=5),
    sizes=CUTS,
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    data=st.data(),
)
def test_stop_strings_cut_exactly_and_never_leak_whatever_the_chunks(text, stops, sizes, include, min_tokens, data):
    tokenizer = tiny.byte_level()
    if text:  # a piece of the text, so that long stop strings are met too
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : start + data.draw(st.integers(1, 8))]]
    ids = tokenizer.encode(text)
    pieces, detokenizer = stream(
        tokenizer, [5], ids, sizes, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    # Characters that the first min_tokens tokens complete cannot end a stop string.
    head, _ = stream(tokenizer, [5], ids[:min_tokens])
    expected, stop = cut(text, stops, include, len("".join(head[:-1])))
    assert "".join(pieces) == expected
    assert detokenizer.stopped_by == stop
    if stop is None:
        assert detokenizer.num_tokens == len(ids)


@MANY
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6))
def test_held_back_is_exactly_what_may_still_become_a_stop_string(text, stops):
    automaton = StopStrings(stops)
    state = 0
    for end, char in enumerate(text, 1):
        state = automaton.step(state, char)
        seen = text[:end]
        assert automaton.found[state] == max((s for s in stops if seen.endswith(s)), key=len, default="")
        open_ends = [n for n in range(end + 1) if any(len(s) > n and s.startswith(seen[end - n :]) for s in stops)]
        assert automaton.held[state] == max(open_ends)


def test_text_that_is_no_stop_string_after_all_is_released_at_once():
    tokenizer = tiny.byte_level()
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["###END"]), [5])
    shown = [detokenizer.push(tokenizer.encode(char)) for char in "a##b###EN!"]
    assert shown == ["a", "", "", "##b", "", "", "", "", "", "###EN!"]


def test_tokens_after_the_stop_string_are_not_used():
    tokenizer = tiny.byte_level()
    ids = [token for char in "abcdef" for token in tokenizer.encode(char)]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["c"]), [5])
    assert detokenizer.push(ids, finished=True) == "ab"
    assert (detokenizer.num_tokens, detokenizer.stopped_by) == (3, "c")
    assert detokenizer.push(ids) == "" and detokenizer.text == "ab"


def test_of_two_stop_strings_the_first_complete_one_wins_also_inside_one_token():
    tokenizer = tiny.byte_level()
    (token,) = tokenizer.encode(" hello")
    for ids in ([token], tokenizer.encode(" ") + tokenizer.encode("h") + [token]):
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["hello", "el"]), [5])
        detokenizer.push(ids)
        assert detokenizer.stopped_by == "el"
        assert detokenizer.text == tokenizer.decode(ids).split("el")[0]


def test_an_unfinished_character_shows_only_when_nothing_more_comes():
    tokenizer = tiny.byte_level()
    ids = tokenizer.encode("\u1234")  # three tokens of one byte each
    assert len(ids) == 3
    detokenizer = Detokenizer(tokenizer, SamplingParams(), [5])
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.push([], finished=True) == "\ufffd" == tokenizer.decode(ids[:2])


def test_a_prompt_that_ends_inside_a_character_lets_the_output_finish_it():
    tokenizer = tiny.byte_level()
    ids = tokenizer.encode("\u1234")
    detokenizer = Detokenizer(tokenizer, SamplingParams(), [5, *ids[:2]])
    assert detokenizer.push(ids[2:]) == "\u1234"


@pytest.mark.parametrize("prompt, expected", [(["<s>"], "hello"), (["<s>", "x"], " hello")])
def test_sentencepiece_drops_the_first_space_only_where_nothing_is_shown_before(prompt, expected):
    tokenizer = tiny.byte_fallback()
    ids = tokenizer.encode("hello", add_special_tokens=False)
    prompt_ids = [tokenizer._id(token) for token in prompt]
    pieces, _ = stream(tokenizer, prompt_ids, ids)
    assert "".join(pieces) == expected


def test_special_tokens_are_shown_only_if_asked_for():
    tokenizer = tiny.byte_level()
    ids = [*tokenizer.encode("a"), *tokenizer.eos_token_ids, *tokenizer.encode("b")]
    assert "".join(stream(tokenizer, [5], ids)[0]) == "ab"
    assert "".join(stream(tokenizer, [5], ids, skip_special_tokens=False)[0]) == f"a{tiny.EOS}b"


def test_an_unknown_id_adds_nothing():
    tokenizer = tiny.byte_level()
    assert "".join(stream(tokenizer, [5], [10**6, *tokenizer.encode("a")])[0]) == "a"


def test_without_a_tokenizer_tokens_are_only_counted():
    detokenizer = NullDetokenizer()
    assert detokenizer.push([1, 2], finished=True) == "" == detokenizer.text
    assert detokenizer.num_tokens == 2 and detokenizer.stopped_by is None
