"""Rule: a pattern matches what PEFT's `re` matches, in work that grows with the name and with the pattern alone."""

from __future__ import annotations

import re

import pytest

from minivllm.lora.patterns import MAX_STATES, Pattern, PatternError

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
    for name in NAMES:
        assert whole.matches(name) == bool(re.fullmatch(text, name)), name
        assert end.matches(name) == bool(re.match(rf"(.*\.)?({text})$", name)), name


@pytest.mark.parametrize("text", ["((([a-z._0-9])+)+)+!", "(.*)*(.*)*(.*)*!", "(a|b|ab|[a-z.]*)*_proj!", "(.?){99}!"])
def test_no_pattern_makes_a_name_costly(text):
    pattern = Pattern(text)
    for name in NAMES * 20:
        assert not pattern.matches(name)
    assert pattern._matches.__self__.work < MAX_STATES * sum(map(len, NAMES))


@pytest.mark.parametrize("text", ["(?=a)b", r"(a)\1", "a{1,99999}", "(", "a" * 5000, "a**", "(?i)a"])
def test_what_cannot_be_matched_so_is_refused(text):
    with pytest.raises(PatternError):
        Pattern(text)
