"""Rule: no file of a tokenizer makes a few letters take all time or memory. What is read of it says so before any text
is, and no known family is refused."""

from __future__ import annotations

import json
import random
import string
import time
from typing import Any

import pytest
import tiny_tokenizers as tiny
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from minivllm.engine import tokenizer as tokenizer_module
from minivllm.engine import tokenizer_costs
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.engine.tokenizer_costs import CostError, check_pattern
from minivllm.errors import BadRequest, ModelError
from minivllm.loading.gguf_cuts import CUTS

KNOWN = [
    *(pattern for cut in CUTS.values() for pattern in cut.patterns),
    r" {2,}",  # T5
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # BLOOM
    r"(?=(\d{3})+(?!\d))",  # SuperBPE
    r"\d{1,3}(?=(?:\d{3})*\b)",  # Seed-OSS
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
]
ENDLESS = [
    "(x+x+)+y", "(x*)*y", "(x+)+$", "((x+))+y", "(x|xx)+y", "(?:x|x)*y", "(x?){30}x{30}", "x?" * 30 + "x" * 30,
    "(x{1,30}){1,30}y", "x*x*y", "x+x+x+$", "(?:x+x+)y", "(x{0,99})x{0,99}y", "(x|x)" * 30 + "y", "x{2,}+y", "x+*y",
    r"(x+)\1+y", r"(?<a>x|\g<a>x)y", "(?~x+x+)y", "(?=x+x+y)x", "((?>x+)x*)+y", "(x+?x+?)+?y", "[x]*[xy]*[^z]*z",
    r"(?i)(X+)+y", r"(?i:(X+)+)y", "(?#a)(x+)+y", "(" * 60 + "x" + ")" * 60,
]  # fmt: skip


def splitting(pattern):
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(string.printable)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return tokenizer


def loaded(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("pattern", KNOWN)
def test_the_expressions_of_known_families_are_taken(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_an_expression_that_may_look_for_ever_is_refused(pattern):
    with pytest.raises(CostError, match="regular expression"):
        check_pattern(pattern)


def test_a_tokenizer_that_backtracks_is_refused_with_its_file(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json has a regular expression that repeats"):
        loaded(tmp_path, splitting("(x+x+)+y"))


PIECES = [
    "x",
    "y",
    "[xy]",
    "x+",
    "x*",
    "y?",
    "(",
    ")",
    "(?:",
    "(?=",
    "(?!",
    "(?>",
    "|",
    "+",
    "*",
    "{2}",
    "{1,3}",
    "?",
    "++",
]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_taken_ends_soon_on_texts_made_to_hold_it(seed):
    """What Oniguruma gives up on, after ten million steps, would be a panic."""
    rng, taken = random.Random(seed), 0
    texts = ["x" * 300, "xy" * 150, "y" * 299 + "z", "x" * 299 + "z", "xxy" * 100 + "z"]
    while taken < 25:
        pattern = "".join(rng.choices(PIECES, k=rng.randrange(2, 9)))
        try:
            tokenizer = splitting(pattern)
        except Exception:
            continue
        try:
            check_pattern(pattern)
        except CostError:
            continue
        taken += 1
        begin = time.thread_time()
        for text in texts:
            tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert time.thread_time() - begin < 2, pattern


def growing(content: str, times: int, pattern: str | Regex = "x") -> Any:
    steps = [normalizers.Replace(pattern, content) for _ in range(times)]
    tokenizer = tiny.byte_level()._tokenizer.__class__.from_str(tiny.byte_level()._tokenizer.to_str())
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: growing("x" * 1000, 6),
        lambda: growing("xx", 30),
        lambda: growing("xx", 30, Regex("x")),
        lambda: growing("x" * 100, 1, Regex("")),
        lambda: growing("\u2581" * 70, 1, " "),
    ],
)
def test_what_makes_too_much_of_a_letter_is_refused(tmp_path, make):
    with pytest.raises(ModelError, match="makes one character more than 64"):
        loaded(tmp_path, make())


def test_a_prefix_and_a_decoder_grow_a_text_too(tmp_path):
    tokenizer = growing("x", 1)
    tokenizer.normalizer = normalizers.Prepend("x" * 100)
    with pytest.raises(ModelError, match="Prepend"):
        loaded(tmp_path, tokenizer)
    tokenizer.normalizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("x", "xx") for _ in range(20)])
    with pytest.raises(ModelError, match="Replace"):
        loaded(tmp_path, tokenizer)


def test_rules_of_sentencepiece_are_as_long_as_their_longest(monkeypatch):
    import base64

    made = base64.b64encode((8).to_bytes(4, "little") + b"\1" * 8 + b"a\0" + b"b" * 70 + b"\0").decode()
    assert tokenizer_costs.longest_replacement(made) == 70
    assert tokenizer_costs.longest_replacement("") == 1
    with pytest.raises(CostError, match="base64"):
        tokenizer_costs.longest_replacement("a")


@pytest.mark.parametrize("make", [tiny.byte_level, tiny.byte_fallback, tiny.word_piece])
def test_common_tokenizers_are_taken(tmp_path, make):
    assert loaded(tmp_path, make()._tokenizer).encode("hello")


def test_a_panic_is_an_error_of_the_text_that_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module.tokenizer_costs, "check", lambda parts: None)
    tokenizer = loaded(tmp_path, splitting("(x+x+)+y"))
    with pytest.raises(BadRequest, match="tokenizer fails on this text"):
        tokenizer.encode("x" * 24)
    assert tokenizer.encode("ab"), "it goes on"


def test_reading_what_a_file_costs_takes_no_time(tmp_path):
    state = json.loads(tiny.byte_level()._tokenizer.to_str())
    begin = time.thread_time()
    tokenizer_costs.check(
        [{"type": "Split", "pattern": {"Regex": KNOWN[0]}}, *(state[k] or {} for k in ("normalizer",))]
    )
    assert time.thread_time() - begin < 0.05
