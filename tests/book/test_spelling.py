"""Every word of the book is in an English dictionary, or in words.txt: the words of this field and of this project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bookext import quotes

ROOT = Path(__file__).parent.parent.parent
OURS = Path(__file__).parent / "words.txt"
PAGES = quotes.pages()


def words(text: str) -> list[str]:
    """What is said in words: without code, directives, their options, links' targets, markup and names with digits."""
    blocks = r"^(`{3,})\{?(?:snippet|console|python|bash|json|text|include|records|ratios|matrix).*?^\1$"
    text = re.sub(blocks, "", text, flags=re.DOTALL | re.M)
    text = re.sub(r"^\s*(?:[:`]{3,}.*|:[\w-]+:.*|[\w/]+\.py::.*|ch[\w*/]+|\$ .*)$", "", text, flags=re.M)
    text = re.sub(r"\{num\}`[^`]*`|`[^`]*`|\]\([^)]*\)|<[^>]*>|&\w+;|\bhttps?://\S+|\$[^$\n]+\$", " ", text)
    return re.findall(r"(?<![\w/.-])[A-Za-z][A-Za-z’']*[A-Za-z](?![\w/]|\.\w)", text)


@pytest.fixture(scope="module")
def known():
    checker = pytest.importorskip("spellchecker", reason='pip install -e ".[dev]"').SpellChecker()
    checker.word_frequency.load_words(OURS.read_text().split())
    return lambda word: word in checker


def is_right(word: str, known) -> bool:
    word = word.replace("’", "'").lower()
    return any(map(known, {word, word.removesuffix("'s"), word.removesuffix("'")}))


@pytest.mark.parametrize("page", PAGES.values(), ids=list(PAGES))
def test_every_word_is_known(page, known):
    wrong = sorted({word for word in words(page.read_text()) if not is_right(word, known)})
    assert not wrong, f"{', '.join(wrong)}: mend them, or add them to {OURS.relative_to(ROOT)}"


def test_a_wrong_word_is_noticed_and_code_is_not_read(known):
    assert [word for word in words("the recieved `kv_cahce` {num}`abc` [x](quz.md)") if not is_right(word, known)] == [
        "recieved"
    ]


def test_our_words_are_sorted():
    ours = OURS.read_text().split()
    assert ours == sorted(set(ours)), "sort tests/book/words.txt, each word once"
