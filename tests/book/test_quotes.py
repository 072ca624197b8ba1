"""A quote is the code as it is now, and a changed symbol fails until somebody has read the page again."""

from __future__ import annotations

import re

import pytest
from bookext import quotes

# The reference is made of the code as it is, and says nothing around it.
PAGES = [path for name, path in quotes.pages().items() if not name.startswith("docs/reference/")]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr(quotes, "ROOT", tmp_path)

    def write(code: str) -> str:
        (tmp_path / "m.py").write_text(code)
        return quotes.find("m.py", "A.f").lock

    return write


CODE = "class A:\n    def f(self, x):\n        return x + 1\n"


def test_the_lock_of_a_symbol_holds_when_others_change_and_comments_move(tree):
    lock = tree(CODE)
    assert tree("# moved\nimport os\n\n" + CODE.replace("x):", "x):  # why")) == lock
    assert quotes.quote(f"m.py::A.f @{lock}").code.startswith("def f(self, x):  # why\n    return")


@pytest.mark.parametrize("change", [("x + 1", "x + 2"), ("self, x", "self, x=0"), ("def f", "@property\n    def f")])
def test_a_changed_symbol_is_refused_until_it_is_locked_again(tree, change):
    lock = tree(CODE)
    now = tree(CODE.replace(*change))
    with pytest.raises(quotes.QuoteError, match="make relock"):
        quotes.quote(f"m.py::A.f @{lock}")
    text, changed = quotes.relock(f"see m.py::A.f @{lock} there")
    assert text == f"see m.py::A.f @{now} there" and changed == ["m.py::A.f"]
    assert quotes.relock(text) == (text, [])


def test_a_symbol_that_is_gone_or_too_long_is_refused(tree):
    tree(CODE)
    with pytest.raises(quotes.QuoteError, match="0 symbols are called A.g"):
        quotes.find("m.py", "A.g")
    with pytest.raises(quotes.QuoteError, match="no such file"):
        quotes.find("n.py", "A")
    lock = tree(CODE + "        x\n" * quotes.MAX_LINES)
    with pytest.raises(quotes.QuoteError, match="at most 25"):
        quotes.quote(f"m.py::A.f @{lock}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(quotes.ROOT)))
def test_every_quote_of_a_page_is_locked_to_the_code_as_it_is(page):
    text = re.sub(r"^```\{api\} .*$", "", page.read_text(), flags=re.MULTILINE)  # signatures, which need no lock
    assert text.count(".py::") == len(quotes.REFERENCE.findall(text)), "a quote without a lock"
    for matched in quotes.REFERENCE.finditer(text):
        quotes.quote(matched[0])


@pytest.mark.parametrize("page", [p for p in PAGES if "chapters" in p.parts])  # tests/test_readme.py runs the others'
def test_code_of_a_chapter_is_quoted_not_typed(page):
    languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE))
    assert languages <= {"console"}, "a block of code that no test runs"
